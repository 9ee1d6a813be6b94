"""The iterations of the solver, each for a batch of problems.

Sources: O'Donoghue and Candes, "Adaptive restart for accelerated gradient schemes" (2015), for the ascent of the l2
dual; Chambolle and Pock, "A first-order primal-dual algorithm for convex problems" (2011), for the iteration of the
linf and l1 problems, which are linear programs; Applegate et al., "Practical large-scale linear programming using
primal-dual hybrid gradient" (2021), sections 3.1 to 3.3, for averages, restarts, the choice of steps and the weight
between both sides. The norm and the box are one function here, with a proximal step of its own, and restarts follow
the gap between the distance and the dual bound.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from robust_ext.attacks._common.rows import selected
from robust_ext.attacks.linear_region.problem import ScaledProblem, dot, shrink, square


@dataclass(frozen=True)
class Progress:
    """The state of the problems: points ``(B, D)`` in the box, nearly feasible near the end, and rows of ``(B,)``.

    The violation is by how much a point misses the worst row, in units of distance; the bound lies below the distance
    of every feasible point; ``infeasible``: whether provably none exists. The multipliers are ``(B, M)``.
    """

    points: Tensor
    distance: Tensor
    violation: Tensor
    bound: Tensor
    infeasible: Tensor
    multipliers: Tensor


class Method(ABC):
    """An iteration; its progress is looked at every ``interval`` steps."""

    interval: int

    @abstractmethod
    def step(self) -> None:
        """Take one product with the matrix and one with its transpose."""

    @abstractmethod
    def progress(self) -> Progress:
        """Return the best state that is known."""

    def select(self, rows: Tensor) -> None:
        """Continue with the problems with these indices, int64 ``(R,)``."""
        for name, value in vars(self).items():
            setattr(self, name, selected(value, rows))


def _violation(values: Tensor) -> Tensor:
    return values.amin(1).clamp_max_(0).neg_()


# Curvatures as fractions of ||C||^2: where a step may end up, and how fast; both from problems of a small convnet.
_LEAST_CURVATURE = 0.3
_SHRINK = 0.9
# The measured curvature tends to that of the steepest direction as soon as the step is too long for it.
_ALARM = 0.5
_RAISE = 1.5


class AcceleratedDual(Method):
    """Accelerated ascent of the l2 dual, from multipliers ``(B, M)`` of at least 0; zeros by default."""

    interval = 1

    def __init__(self, problem: ScaledProblem, multipliers: Tensor | None) -> None:
        self._problem = problem
        self._multipliers = torch.zeros_like(problem.values) if multipliers is None else multipliers
        self._ahead = self._multipliers
        self._age = problem.values.new_zeros(len(problem.values), 1)
        # The estimate of the norm is on average a little too low.
        self._most = problem.size.square().mul_(1.1).clamp_min_(1e-12).unsqueeze(1)
        self._curvature = self._most
        # Multipliers and force at the start of the last step, and points and values there until they are looked at.
        self._before: tuple[Tensor, ...] = ()
        self._there: tuple[Tensor, ...] = ()

    def step(self) -> None:
        """See :class:`Method`."""
        ahead, before = self._ahead, self._before
        force = self._problem.adjoint(ahead)
        low, high = self._problem.bounds
        points = (self._problem.inputs + force).clamp_(low, high)
        values = self._problem.forward(points)
        self._before, self._there = (ahead, force), (points, values)
        if before:
            moved, turned = ahead - before[0], force - before[1]
            measured = square(turned) / square(moved).clamp_min_(torch.finfo(moved.dtype).tiny)
            self._most = torch.maximum(self._most, measured)
            raised = torch.minimum(torch.maximum(self._curvature * _RAISE, measured), self._most)
            lowered = torch.maximum(self._curvature * _SHRINK, self._most * _LEAST_CURVATURE)
            self._curvature = torch.where(measured > _ALARM * self._curvature, raised, lowered)
        following = torch.addcdiv(ahead, values, self._curvature, value=-1).clamp_min_(0)
        move = following - self._multipliers
        against = dot(ahead - following, move) > 0
        self._age = torch.where(against, 0, self._age + 1)
        self._multipliers = following
        self._ahead = move.mul_(self._age / (self._age + 3)).add_(following).clamp_min_(0)

    def progress(self) -> Progress:
        """Return the point and the bounds at the start of the last step."""
        (ahead, force), (points, values), self._there = self._before, self._there, ()
        reward = self._problem.reward(ahead)
        bound, infeasible = self._problem.proofs(force, reward)
        offsets = points - self._problem.inputs
        squares = square(offsets).squeeze(1)
        dual = squares / 2 + (reward - dot(force, offsets).squeeze(1))
        bound = torch.maximum(bound, dual.clamp_min(0).mul_(2).sqrt_())
        return Progress(points, squares.sqrt_(), _violation(values), bound, infeasible, ahead)


# Restart when the best merit has fallen to the first factor, or to the second and no longer falls, or when the last
# restart is this share of all iterations ago.
_ENOUGH, _NECESSARY, _LONG = 0.2, 0.8, 0.36
# Multiples of 1 / ||C|| which a step may not pass: the measured limit is infinite where nothing moves.
_LONGEST = 100.0


class PrimalDual(Method):
    """Primal-dual hybrid gradient, from points ``(B, D)`` in the box and multipliers ``(B, M)`` of at least 0.

    They are the inputs and zeros when left out.
    """

    interval = 4

    def __init__(self, problem: ScaledProblem, points: Tensor | None, multipliers: Tensor | None) -> None:
        self._problem = problem
        inputs, values = problem.inputs, problem.values
        # Offsets from the inputs, values of the rows, multipliers and their force; the last two and the first two
        # depend on each other linearly, so that averages cost no products.
        offsets = torch.zeros_like(inputs) if points is None else points - inputs
        values = values if points is None else problem.forward(points)
        force = torch.zeros_like(inputs) if multipliers is None else problem.adjoint(multipliers)
        multipliers = torch.zeros_like(values) if multipliers is None else multipliers
        self._point: tuple[Tensor, ...] = (offsets, values, multipliers, force)
        self._sums = tuple(torch.zeros_like(part) for part in self._point)
        self._start: tuple[Tensor, ...] = (offsets, multipliers)
        column = values.new_ones(len(values), 1)
        norm = problem.size.unsqueeze(1).clamp_min(1e-6)
        self._step, self._longest = 0.95 / norm, _LONGEST / norm
        self._weight = column / (problem.bounds[1] - problem.bounds[0])
        self._time, self._age, self._count = 0 * column, 0 * column, 0 * column
        self._merit, self._last = torch.inf * column, torch.inf * column

    def step(self) -> None:
        """See :class:`Method`; steps that are too long do not count."""
        problem, step, weight = self._problem, self._step, self._weight
        offsets, values, multipliers, force = self._point
        along = step / weight
        moved = shrink(problem.norm, torch.addcmul(offsets, along, force), problem.inputs, along, problem.bounds)
        reached = problem.forward(problem.inputs + moved)
        pushed = torch.sub(values, reached, alpha=2).mul_(step * weight).add_(multipliers).clamp_min_(0)
        following = (moved, reached, pushed, problem.adjoint(pushed))
        change, turn, drift = pushed - multipliers, reached - values, moved - offsets
        movement = (weight * square(drift) + square(change) / weight) / 2
        limit = movement / dot(change, turn).abs().clamp_min_(torch.finfo(step.dtype).tiny)
        taken = step <= limit
        self._count = self._count + 1
        shorter, longer = 1 - (self._count + 1) ** -0.3, 1 + (self._count + 1) ** -0.6
        self._step = torch.minimum(shorter * limit, longer * step).clamp_max_(self._longest)
        self._point = following if bool(taken.all()) else _where(taken, following, self._point)
        share = torch.where(taken, step, 0)
        for total, part in zip(self._sums, self._point, strict=True):
            total.addcmul_(part, share)
        self._time, self._age = self._time + share, self._age + taken

    def progress(self) -> Progress:
        """Return the better of the current point and the average, and restart from it when due."""
        pairs = zip(self._sums, self._point, strict=True)
        mean = tuple(torch.where(self._time > 0, total / self._time, part) for total, part in pairs)
        merit, bound, infeasible = self._merit_of(self._point)
        merit_mean, bound_mean, infeasible_mean = self._merit_of(mean)
        chosen = _where(merit_mean < merit, mean, self._point)
        self._restart(chosen, torch.minimum(merit, merit_mean))
        offsets, values, multipliers, _ = chosen
        points = (self._problem.inputs + offsets).clamp_(*self._problem.bounds)
        bound, infeasible = torch.maximum(bound, bound_mean), infeasible | infeasible_mean
        return Progress(points, self._distance(offsets), _violation(values), bound, infeasible, multipliers)

    def _merit_of(self, point: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Return merit ``(B, 1)``, dual bound ``(B,)`` and proof of infeasibility ``(B,)``."""
        offsets, values, multipliers, force = point
        bound, infeasible = self._problem.proofs(force, self._problem.reward(multipliers))
        missed = torch.linalg.vector_norm(values.clamp_max(0), dim=1)
        return ((self._distance(offsets) - bound).abs() + missed).unsqueeze(1), bound, infeasible

    def _distance(self, offsets: Tensor) -> Tensor:
        distance: Tensor = torch.linalg.vector_norm(offsets, ord=1 if self._problem.norm == "l1" else torch.inf, dim=1)
        return distance

    def _restart(self, chosen: tuple[Tensor, ...], merit: Tensor) -> None:
        self._merit = torch.where(self._merit.isinf(), merit, self._merit)
        due = (merit <= _ENOUGH * self._merit) | (self._age >= _LONG * self._count)
        due |= (merit <= _NECESSARY * self._merit) & (merit > self._last)
        self._last = torch.where(due, torch.inf, merit)
        if not bool(due.any()):
            return
        travels = chosen[0] - self._start[0], chosen[2] - self._start[1]
        far = [torch.linalg.vector_norm(travel, dim=1, keepdim=True) for travel in travels]
        moved = due & (far[0] > 1e-10) & (far[1] > 1e-10)
        # The geometric mean of the old weight and of the ratio of the distances travelled.
        self._weight = torch.where(moved, (far[1] / far[0] * self._weight).sqrt(), self._weight)
        self._point = _where(due, chosen, self._point)
        self._start = _where(due, (self._point[0], self._point[2]), self._start)
        self._sums = tuple(torch.where(due, 0, total) for total in self._sums)
        self._time, self._age = torch.where(due, 0, self._time), torch.where(due, 0, self._age)
        self._merit = torch.where(due, merit, self._merit)


def _where(chosen: Tensor, new: tuple[Tensor, ...], old: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.where(chosen, one, other) for one, other in zip(new, old, strict=True))
