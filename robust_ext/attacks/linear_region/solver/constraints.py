"""What the solver needs of the constraints: products with their matrix and with its transpose, no more."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from robust_ext.core.errors import InvalidArgumentError


class Constraints(Protocol):
    """The rows ``C_b z + d_b >= 0`` of a batch of problems; their values are affine in ``z``.

    The solver calls it without gradients switched on. An implementation that needs them switches them on itself. The
    products must be new tensors: the solver writes into them.
    """

    @property
    def decision(self) -> Tensor:
        """Which rows decide the class, bool ``(M,)``: the same rows in every problem."""

    def forward(self, points: Tensor) -> Tensor:
        """``C_b z + d_b``, from ``(B, D)`` to ``(B, M)``."""

    def adjoint(self, multipliers: Tensor) -> Tensor:
        """``C_b^T y``, from ``(B, M)`` to ``(B, D)``."""

    def select(self, rows: Tensor) -> Constraints:
        """The problems of these indices, int64 ``(R,)``, alone."""


class DenseConstraints:
    """Constraints whose matrices are written out: for problems that are small, and to test with.

    Args:
        matrix: ``(B, M, D)``, float32 or float64.
        offset: ``(B, M)`` of the same dtype.
        decision: bool ``(M,)``; no row when left out.

    Raises:
        InvalidArgumentError: Shapes that do not fit together.

    Example:
        >>> constraints = DenseConstraints(torch.tensor([[[1.0, 1.0]]]), torch.tensor([[-1.0]]))
        >>> constraints.forward(torch.tensor([[0.5, 0.25]]))
        tensor([[-0.2500]])
    """

    def __init__(self, matrix: Tensor, offset: Tensor, decision: Tensor | None = None) -> None:
        if matrix.dim() != 3:
            raise InvalidArgumentError("matrix", f"shape {tuple(matrix.shape)}", "shape (B, M, D)")
        if decision is None:
            decision = torch.zeros(matrix.shape[1], dtype=torch.bool, device=matrix.device)
        expected = {
            "offset": (offset, matrix.shape[:2], matrix.dtype),
            "decision": (decision, matrix.shape[1:2], torch.bool),
        }
        for name, (value, shape, dtype) in expected.items():
            if value.shape != shape or value.dtype != dtype:
                raise InvalidArgumentError(
                    name, f"{value.dtype} of shape {tuple(value.shape)}", f"{dtype} of shape {tuple(shape)}"
                )
        self.matrix, self.offset, self.decision = matrix, offset, decision

    def forward(self, points: Tensor) -> Tensor:
        """``C_b z + d_b``, from ``(B, D)`` to ``(B, M)``."""
        return torch.bmm(self.matrix, points.unsqueeze(2)).squeeze(2) + self.offset

    def adjoint(self, multipliers: Tensor) -> Tensor:
        """``C_b^T y``, from ``(B, M)`` to ``(B, D)``."""
        return torch.bmm(multipliers.unsqueeze(1), self.matrix).squeeze(1)

    def select(self, rows: Tensor) -> DenseConstraints:
        """The problems of these indices, int64 ``(R,)``, alone."""
        return DenseConstraints(self.matrix[rows], self.offset[rows], self.decision)
