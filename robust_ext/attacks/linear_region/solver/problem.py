"""What the two iterations of the solver share: the problem in scaled rows, its scaling, and its progress.

Source of the scaling: Croce, Rauber and Hein, "Scaling up the randomized gradient-free adversarial attack reveals
overestimation of robustness using established attacks" (2019), section 4.2. They measure the norms of ten rows of a
layer and use their mean for all of it; here each row has its own estimate, as ``E (c . g)^2 = ||c||^2`` for a standard
normal ``g``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.solver.constraints import Constraints
from robust_ext.attacks.linear_region.solver.norms import is_contradiction, lower_bound
from robust_ext.core.validation import check_integer, check_number


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Positive factors of the rows ``(B, M)``, and the spectral norm ``(B,)`` of the matrix times them.

    Any factors lead to the right solution, so those of a region serve its neighbours too; the norm may be rough.
    """

    rows: Tensor
    norm: Tensor

    def select(self, rows: Tensor) -> Scaling:
        """Those of the problems of these indices, int64 ``(R,)``."""
        return Scaling(rows=self.rows[rows], norm=self.norm[rows])


@dataclass(frozen=True)
class Progress:
    """Where the problems stand: points ``(B, D)`` in the box, nearly feasible near the end, and a row of ``(B,)`` each.

    The violation is by how much a point misses the worst row, in units of distance; the bound lies below the distance
    of every feasible point; ``infeasible`` states whether it is proven that there is none. The multipliers are
    ``(B, M)``.
    """

    points: Tensor
    distance: Tensor
    violation: Tensor
    bound: Tensor
    infeasible: Tensor
    multipliers: Tensor


@dataclass
class ScaledProblem:
    """The rows times their factors, with the box, the inputs ``x0`` ``(B, D)`` and the scaled values there ``(B, M)``.

    A proof of infeasibility must have the relative ``margin``.
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


@torch.no_grad()
def estimate_scaling(
    constraints: Constraints,
    inputs: Tensor,
    *,
    generator: torch.Generator,
    probes: int = 16,
    power_iterations: int = 8,
    decision_weight: float = 5.0,
) -> Scaling:
    """Factors that bring rows to about norm 1, and the decision rows to ``decision_weight``.

    Takes ``probes + power_iterations + 1`` products with the matrix and ``power_iterations`` with its transpose, for
    the norms of the rows and for that of the matrix, which is on average a little too low. The inputs are any points
    near the solutions; all problems share the random vectors. The weight is lowered to half the norm of the whole
    matrix where that is smaller, since beyond it the decision rows alone would dictate a shorter step.
    """
    check_integer("probes", probes, minimum=1)
    check_integer("power_iterations", power_iterations, minimum=1)
    check_number("decision_weight", decision_weight, minimum=1)
    base = constraints.forward(inputs)

    def draw() -> Tensor:
        return torch.randn(inputs.shape[1], generator=generator, dtype=torch.float64).to(inputs).expand_as(inputs)

    squares = torch.zeros_like(base)
    for _ in range(probes):
        squares += (constraints.forward(inputs + draw()) - base).square_()
    sizes = (squares / probes).sqrt_()
    if sizes.numel() == 0:
        return Scaling(rows=torch.ones_like(sizes), norm=sizes.new_zeros(len(sizes)))
    # Differences this small are rounding: such a row is constant, and must not be blown up.
    least = sizes.amax(1, keepdim=True) * (16 * torch.finfo(sizes.dtype).eps)
    rows = torch.where(least > 0, sizes.maximum(least), 1).reciprocal_()
    vector, norm = draw(), sizes.new_zeros(len(sizes))
    for number in range(power_iterations):
        if 2 * number >= power_iterations:
            weight = (norm / 2).clamp(1, decision_weight).unsqueeze(1)
            weighted = torch.where(constraints.decision, rows * weight, rows)
        else:
            weighted = rows
        vector = vector / vector.norm(dim=1, keepdim=True).clamp_min(torch.finfo(vector.dtype).tiny)
        image = (constraints.forward(inputs + vector) - base) * weighted
        norm = image.norm(dim=1)
        vector = constraints.adjoint(image * weighted)
    return Scaling(rows=weighted, norm=norm)
