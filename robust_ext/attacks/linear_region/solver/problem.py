"""What the two iterations of the solver share: the problem in scaled rows, and its progress."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.solver.constraints import Constraints
from robust_ext.attacks.linear_region.solver.norms import is_contradiction, lower_bound
from robust_ext.attacks.linear_region.solver.scaling import Scaling


@dataclass(frozen=True)
class Progress:
    """Where the problems stand: a point ``(B, D)``, and a row of ``(B,)`` each.

    Attributes:
        points: In the box, and nearly feasible near the end.
        distance: Of the points from the inputs.
        violation: By how much the points miss the worst row, in units of distance; at least 0.
        bound: Below the distance of every feasible point.
        infeasible: Whether it is proven that there is none.
    """

    points: Tensor
    distance: Tensor
    violation: Tensor
    bound: Tensor
    infeasible: Tensor


@dataclass
class ScaledProblem:
    """The rows times their factors, with the box and the inputs.

    Args:
        constraints: The rows as they are.
        scaling: Their factors.
        inputs: ``x0``, ``(B, D)``.
        values: Scaled values of the rows at the inputs, ``(B, M)``.
        bounds: Of the box.
        norm: ``"linf"``, ``"l2"`` or ``"l1"``.
        margin: Relative, that a proof of infeasibility must have.
    """

    constraints: Constraints
    scaling: Scaling
    inputs: Tensor
    values: Tensor
    bounds: tuple[float, float]
    norm: str
    margin: float

    def forward(self, points: Tensor) -> Tensor:
        """Scaled values of the rows, ``(B, M)``."""
        return self.constraints.forward(points).mul_(self.scaling.rows)

    def adjoint(self, multipliers: Tensor) -> Tensor:
        """The force that multipliers of the scaled rows ``(B, M)`` put on the points, ``(B, D)``."""
        return self.constraints.adjoint(multipliers * self.scaling.rows)

    def reward(self, multipliers: Tensor) -> Tensor:
        """``-y . (C x0 + d)``, ``(B,)``."""
        return -dot(multipliers, self.values).squeeze(1)

    def proofs(self, force: Tensor, reward: Tensor) -> tuple[Tensor, Tensor]:
        """Lower bounds on the distances, and whether infeasibility is proven, both ``(B,)``."""
        bound = lower_bound(self.norm, force, reward, self.inputs, self.bounds)
        return bound, is_contradiction(force, reward, self.inputs, self.bounds, self.margin)

    def select(self, rows: Tensor) -> ScaledProblem:
        """The problems of these indices, int64 ``(R,)``, alone."""
        return replace(
            self,
            constraints=self.constraints.select(rows),
            scaling=self.scaling.select(rows),
            inputs=self.inputs[rows],
            values=self.values[rows],
        )


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner products of rows, ``(B, 1)``."""
    return (a * b).sum(1, keepdim=True)


def square(a: Tensor) -> Tensor:
    """Squared lengths of rows, ``(B, 1)``; on CPUs several times faster than :func:`dot`."""
    lengths: Tensor = torch.linalg.vector_norm(a, dim=1, keepdim=True)
    return lengths.square_()
