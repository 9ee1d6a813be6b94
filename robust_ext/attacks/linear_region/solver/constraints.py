"""What the solver needs of the constraints: products with their matrix and with its transpose, no more."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.network.regions import Regions
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.target import PassCounter


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
    """Constraints whose matrices ``(B, M, D)`` and offsets ``(B, M)`` are written out, for problems that are small.

    Which rows decide is bool ``(M,)``; none when left out.
    """

    def __init__(self, matrix: Tensor, offset: Tensor, decision: Tensor | None = None) -> None:
        if matrix.dim() != 3:
            raise InvalidArgumentError("matrix", f"shape {tuple(matrix.shape)}", "shape (B, M, D)")
        if decision is None:
            decision = torch.zeros(matrix.shape[1], dtype=torch.bool, device=matrix.device)
        for name, value, shape, dtype in (
            ("offset", offset, matrix.shape[:2], matrix.dtype),
            ("decision", decision, matrix.shape[1:2], torch.bool),
        ):
            if value.shape != shape or value.dtype != dtype:
                got, expected = (
                    f"{kind} of shape {tuple(n)}" for kind, n in ((value.dtype, value.shape), (dtype, shape))
                )
                raise InvalidArgumentError(name, got, expected)
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


class RegionConstraints:
    """The constraints of problems 10 and 11 of Croce, Rauber and Hein (2019), for the solver.

    They are the rows that keep each of ``B`` points in its region, and then ``differences @ logits``, the combinations
    of the ``K`` logits ``(B, R, K)`` that must be at least 0. The passes are counted.
    """

    def __init__(self, regions: Regions, differences: Tensor, counter: PassCounter) -> None:
        self.regions, self._differences, self._counter = regions, differences, counter

    @cached_property
    def decision(self) -> Tensor:
        """Which rows decide the class, bool ``(M + R,)``: the last ``R``."""
        rows = self._differences.shape[1]
        places = torch.arange(self.regions.constraints + rows, device=self._differences.device)
        return places >= self.regions.constraints

    def forward(self, points: Tensor) -> Tensor:
        """The values at points ``(B, D)``, ``(B, M + R)``; one forward pass."""
        self._counter.count_forward(len(points))
        values, logits = self.regions.forward(points.view(-1, *self.regions.shape), spare=self._differences.shape[1])
        values[:, self.regions.constraints :] = (self._differences * logits.unsqueeze(1)).sum(2)
        return values

    def adjoint(self, multipliers: Tensor) -> Tensor:
        """The transposed product of multipliers ``(B, M + R)``, ``(B, D)``; one backward pass."""
        self._counter.count_backward(len(multipliers))
        kept = self.regions.constraints
        logits = (multipliers[:, kept:].unsqueeze(2) * self._differences).sum(1)
        return self.regions.adjoint(multipliers[:, :kept], logits).flatten(1)

    def select(self, rows: Tensor) -> RegionConstraints:
        """Those of some problems, int64 indices."""
        return RegionConstraints(self.regions.select(rows), self._differences[rows], self._counter)


def class_differences(labels: Tensor, aims: Tensor, *, count: int, targeted: bool) -> Tensor:
    """Combinations of the ``count`` logits that are at least 0 where a point is adversarial, float32 ``(B, R, count)``.

    Labels and aims are int64 ``(B,)``. Untargeted: the logit of the aim minus that of the label, the one row of
    problem 10. Targeted: the logit of the label minus every logit, the rows of problem 11, its own being 0.
    """
    every = torch.eye(count, device=labels.device)
    return every[labels].unsqueeze(1) - every if targeted else (every[aims] - every[labels]).unsqueeze(1)
