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

from robust_ext.attacks.linear_region.solver.linear import AcceleratedDual, PrimalDual
from robust_ext.attacks.linear_region.solver.problem import (
    Constraints,
    Progress,
    ScaledProblem,
    Scaling,
    estimate_scaling,
)
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.threat import NORMS
from robust_ext.core.validation import check_choice, check_number


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
    constraints: Constraints,
    inputs: Tensor,
    *,
    norm: str,
    bounds: tuple[float, float],
    generator: torch.Generator,
    best: Tensor | None = None,
    scaling: Scaling | None = None,
    points: Tensor | None = None,
    multipliers: Tensor | None = None,
    iterations: int = 500,
    tolerance: float = 1e-3,
    margin: float = 2e-5,
    in_time: Callable[[], bool] | None = None,
) -> Solution:
    """Minimise the distance from the inputs ``(B, D)`` over the feasible points of the box.

    Args:
        constraints: The rows of each problem.
        inputs: float32 or float64 ``(B, D)`` in bounds.
        norm: "linf", "l2" or "l1".
        bounds: The box.
        generator: A CPU generator, for the scaling.
        best: Distances ``(B,)``; a problem ends once it provably cannot beat its own.
        scaling: That of similar constraints; estimated by default.
        points: Where to start, ``(B, D)`` in bounds; the inputs by default. In l2 they follow from the multipliers.
        multipliers: Where to start, ``(B, M)`` of at least 0 for the unscaled rows; zeros by default.
        iterations: The most iterations, each one product with the matrix and one with its transpose.
        tolerance: A problem is solved when its point violates no (scaled) row by more than this share of its distance,
            and the distance and the dual bound differ by no more than it.
        margin: The relative margin of a proof, so that rounding cannot forge one.
        in_time: Ends the iteration when it returns False.

    Example:
        >>> from robust_ext.attacks.linear_region.solver.problem import DenseConstraints
        >>> rows = DenseConstraints(torch.tensor([[[3.0, 4.0]]]), torch.tensor([[-2.5]]), torch.tensor([False]))
        >>> found = solve(rows, torch.zeros(1, 2), norm="l2", bounds=(0, 1), generator=torch.Generator())
        >>> Status(int(found.status[0])).name, round(float(found.bound[0]), 2)
        ('SOLVED', 0.5)
    """
    count = constraints.decision.numel()
    bounds = _check_box(inputs, norm, bounds)
    best = inputs.new_full((len(inputs),), torch.inf) if best is None else best.to(inputs)
    _check_starts(inputs, bounds, count, best=best, points=points, multipliers=multipliers)
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
    if scaling is None:
        scaling = estimate_scaling(constraints, inputs, generator=generator)
    values = constraints.forward(inputs) * scaling.rows
    problem = ScaledProblem(constraints, scaling, inputs, values, bounds, norm, margin)
    begin = None if multipliers is None else multipliers / scaling.rows
    method = AcceleratedDual(problem, begin) if norm == "l2" else PrimalDual(problem, points, begin)
    active = torch.arange(len(best), device=best.device)
    for number in range(1, iterations + 1):
        method.step()
        last = number == iterations or (in_time is not None and not in_time())
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
        # Solved problems leave the batch.
        active = active[going]
        method.select(going)
    found.bound[found.status == Status.INFEASIBLE] = torch.inf
    found.multipliers.mul_(scaling.rows)
    return found


def _verdict(progress: Progress, bound: Tensor, best: Tensor, tolerance: float, margin: float) -> Tensor:
    """Return the status of each problem, ``CAP`` for those that continue."""
    slack = tolerance * progress.distance
    solved = (progress.violation <= slack) & ((progress.distance - bound).abs() <= slack)
    verdict = torch.full_like(bound, int(Status.CAP), dtype=torch.int64)
    verdict[solved] = int(Status.SOLVED)
    verdict[bound > best * (1 + margin)] = int(Status.NO_IMPROVEMENT)
    verdict[progress.infeasible] = int(Status.INFEASIBLE)
    return verdict


def _check_box(inputs: Tensor, norm: str, bounds: tuple[float, float]) -> tuple[float, float]:
    check_choice("norm", norm, NORMS)
    low, high = (check_number("bounds", value) for value in bounds)
    if low >= high:
        raise InvalidArgumentError("bounds", bounds, "a pair whose first number is below its second")
    if inputs.dim() != 2 or inputs.dtype not in (torch.float32, torch.float64):
        got = f"{inputs.dtype} of shape {tuple(inputs.shape)}"
        raise InvalidArgumentError("inputs", got, "float32 or float64 of shape (B, D)")
    return low, high


def _check_starts(inputs: Tensor, bounds: tuple[float, float], rows: int, **starts: Tensor | None) -> None:
    shapes = {"best": inputs.shape[:1], "points": inputs.shape, "multipliers": (len(inputs), rows)}
    for name, value in starts.items():
        if value is not None and tuple(value.shape) != tuple(shapes[name]):
            raise InvalidArgumentError(name, f"shape {tuple(value.shape)}", f"shape {tuple(shapes[name])}")
    low, high = bounds
    for name, value in {"inputs": inputs, "points": starts["points"]}.items():
        if value is not None and not bool(((value >= low) & (value <= high)).all()):
            raise InvalidArgumentError(name, "values outside the bounds, or NaN", f"values in [{low:g}, {high:g}]")
    multipliers = starts["multipliers"]
    if multipliers is not None and not bool((multipliers >= 0).all()):
        raise InvalidArgumentError("multipliers", "negative values, or NaN", "values of at least 0")
