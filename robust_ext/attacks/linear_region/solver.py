"""The nearest point of a box that satisfies linear constraints, for many problems at once and without their matrices.

Source: Croce, Rauber and Hein, "Scaling up the randomized gradient-free adversarial attack reveals overestimation of
robustness using established attacks" (2019), problems 10, 11 and 15, for any of the three norms. A problem leaves the
batch when it is solved, or when its dual bound proves that there is nothing to be won.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.methods import AcceleratedDual, Method, PrimalDual, Progress
from robust_ext.attacks.linear_region.problem import RegionConstraints, ScaledProblem


class Status(IntEnum):
    """The outcome of a problem."""

    SOLVED = 0
    NO_IMPROVEMENT = 1
    INFEASIBLE = 2
    CAP = 3


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A solution: points ``(B, D)`` in the box, a bound, a :class:`Status` and iterations, ``(B,)`` each.

    The points may miss constraints by the tolerance, or by more if the problem was not solved: verify them. The bound
    lies below the distance of every feasible point, up to rounding, and is infinite without one. The multipliers
    ``(B, M)``, of the rows as they are and at least 0, are a start for similar problems.
    """

    points: Tensor
    bound: Tensor
    status: Tensor
    iterations: Tensor
    multipliers: Tensor


@torch.no_grad()
def solve(
    constraints: RegionConstraints,
    inputs: Tensor,
    *,
    norm: str,
    bounds: tuple[float, float],
    scaling: tuple[Tensor, Tensor],
    best: Tensor | None = None,
    points: Tensor | None = None,
    multipliers: Tensor | None = None,
    iterations: int = 500,
    tolerance: float = 1e-3,
    margin: float = 2e-5,
    in_time: Callable[[], bool] = lambda: True,
) -> Solution:
    """Minimise the distance from the inputs ``(B, D)`` over the feasible points of the box.

    Args:
        constraints: The rows of each problem.
        inputs: float32 or float64 ``(B, D)`` in bounds.
        norm: "linf", "l2" or "l1".
        bounds: The box.
        scaling: Factors of the rows and norms of the scaled matrices, see
            :func:`robust_ext.attacks.linear_region.problem.estimate_scaling`.
        best: Distances ``(B,)``; a problem ends once it provably cannot beat its own.
        points: Where to start, ``(B, D)`` in bounds; the inputs by default. In l2 they follow from the multipliers.
        multipliers: Where to start, ``(B, M)`` of at least 0 for the unscaled rows; zeros by default.
        iterations: The most iterations, each one product with the matrix and one with its transpose.
        tolerance: A problem is solved when its point violates no (scaled) row by more than this share of its distance,
            and the distance and the dual bound differ by no more than it.
        margin: The relative margin of a proof, so that rounding cannot forge one.
        in_time: Ends the iteration when it returns False.
    """
    count = constraints.decision.numel()
    best = inputs.new_full((len(inputs),), torch.inf) if best is None else best.to(inputs)
    status = torch.full((len(inputs),), int(Status.SOLVED), device=inputs.device)
    found = Solution(
        points=inputs.clone(),
        bound=inputs.new_zeros(len(inputs)),
        status=status,
        iterations=torch.zeros_like(status),
        multipliers=inputs.new_zeros(len(inputs), count),
    )
    if found.multipliers.numel() == 0:
        return found
    factors, size = scaling
    values = constraints.forward(inputs) * factors
    problem = ScaledProblem(constraints, factors, size, inputs, values, bounds, norm, margin)
    begin = None if multipliers is None else multipliers / factors
    method = AcceleratedDual(problem, begin) if norm == "l2" else PrimalDual(problem, points, begin)
    _iterate(method, found, best, iterations, tolerance, margin, in_time)
    found.bound[found.status == Status.INFEASIBLE] = torch.inf
    found.multipliers.mul_(factors)
    return found


def _iterate(
    method: Method,
    found: Solution,
    best: Tensor,
    iterations: int,
    tolerance: float,
    margin: float,
    in_time: Callable[[], bool],
) -> None:
    """Write the results of the method into the solution; problems leave the batch once they are solved."""
    active = torch.arange(len(best), device=best.device)
    for number in range(1, iterations + 1):
        method.step()
        last = number == iterations or not in_time()
        if number % method.interval and not last:
            continue
        progress = method.progress()
        found.bound[active] = found.bound[active].maximum(progress.bound)
        verdict = _verdict(progress, found.bound[active], best[active], tolerance, margin)
        going = (verdict == Status.CAP).nonzero().flatten()
        if not last and len(going) == len(active):
            continue
        found.iterations[active], found.status[active] = number, verdict
        found.points[active], found.multipliers[active] = progress.points, progress.multipliers
        if last or len(going) == 0:
            break
        active = active[going]
        method.select(going)


def _verdict(progress: Progress, bound: Tensor, best: Tensor, tolerance: float, margin: float) -> Tensor:
    """Return the status of each problem, ``CAP`` for those that continue."""
    slack = tolerance * progress.distance
    solved = (progress.violation <= slack) & ((progress.distance - bound).abs() <= slack)
    verdict = torch.full_like(bound, int(Status.CAP), dtype=torch.int64)
    verdict[solved] = int(Status.SOLVED)
    verdict[bound > best * (1 + margin)] = int(Status.NO_IMPROVEMENT)
    verdict[progress.infeasible] = int(Status.INFEASIBLE)
    return verdict
