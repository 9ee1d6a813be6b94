"""Accelerated projected gradient on the dual of the l2 problem.

Source: Croce, Rauber and Hein (2019), section 4.1, equations 15 to 18. With the box eliminated, the dual is
``q(y) = min_z .5 ||z - x0||^2 - y . (C z + d)`` for ``y >= 0``, reached at ``z = clip(x0 + C^T y)``, and its gradient
is ``-(C z + d)``. The momentum is Nesterov's with restarts where the step turns against it (O'Donoghue and Candes,
"Adaptive restart for accelerated gradient schemes", 2015).

A step of 1 / ||C||^2 is needlessly short once few rows push: the curvature that counts is that of their matrix. So the
step grows, down to a fraction of the squared norm, until the curvature that is measured along the way forbids it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.solver.problem import Progress, ScaledProblem, dot, square

# Curvatures as fractions of ||C||^2: where a step may end up, and how fast; both from problems of a small convnet.
_LEAST_CURVATURE = 0.3
_SHRINK = 0.9
# The measured curvature tends to that of the steepest direction as soon as the step is too long for it.
_ALARM = 0.5
_RAISE = 1.5


class AcceleratedDual:
    """The iteration for a batch of problems, from multipliers ``(B, M)`` of at least 0; zeros by default."""

    interval = 1

    def __init__(self, problem: ScaledProblem, multipliers: Tensor | None) -> None:
        self._problem = problem
        self._multipliers = torch.zeros_like(problem.values) if multipliers is None else multipliers
        self._ahead = self._multipliers
        self._age = problem.values.new_zeros(len(problem.values), 1)
        # The estimate of the norm is on average a little too low.
        self._most = problem.scaling.norm.square().mul_(1.1).clamp_min_(1e-12).unsqueeze(1)
        self._curvature = self._most
        self._before: tuple[Tensor, Tensor] | None = None
        self._now: tuple[Tensor, Tensor, Tensor, Tensor]

    def step(self) -> None:
        """Take one product with the matrix and one with its transpose."""
        ahead = self._ahead
        force = self._problem.adjoint(ahead)
        low, high = self._problem.bounds
        points = (self._problem.inputs + force).clamp_(low, high)
        values = self._problem.forward(points)
        self._now = ahead, force, points, values
        self._adapt(ahead, force)
        following = torch.addcdiv(ahead, values, self._curvature, value=-1).clamp_min_(0)
        move = following - self._multipliers
        against = dot(ahead - following, move) > 0
        self._age = torch.where(against, 0, self._age + 1)
        self._multipliers = following
        self._ahead = move.mul_(self._age / (self._age + 3)).add_(following).clamp_min_(0)

    def _adapt(self, ahead: Tensor, force: Tensor) -> None:
        if self._before is not None:
            moved, turned = ahead - self._before[0], force - self._before[1]
            measured = square(turned) / square(moved).clamp_min_(torch.finfo(moved.dtype).tiny)
            self._most = torch.maximum(self._most, measured)
            raised = torch.minimum(torch.maximum(self._curvature * _RAISE, measured), self._most)
            lowered = torch.maximum(self._curvature * _SHRINK, self._most * _LEAST_CURVATURE)
            self._curvature = torch.where(measured > _ALARM * self._curvature, raised, lowered)
        self._before = ahead, force

    def progress(self) -> Progress:
        """Return the point and the bounds at the start of the last step."""
        ahead, force, points, values = self._now
        reward = self._problem.reward(ahead)
        bound, infeasible = self._problem.proofs(force, reward)
        offsets = points - self._problem.inputs
        squares = square(offsets).squeeze(1)
        dual = squares / 2 + (reward - dot(force, offsets).squeeze(1))
        bound = torch.maximum(bound, dual.clamp_min(0).mul_(2).sqrt_())
        return Progress(points, squares.sqrt_(), values.amin(1).clamp_max_(0).neg_(), bound, infeasible, ahead)

    def select(self, rows: Tensor) -> None:
        """Continue with the problems with these indices, int64 ``(R,)``."""
        self._problem = self._problem.select(rows)
        self._multipliers, self._ahead = self._multipliers[rows], self._ahead[rows]
        self._age, self._most, self._curvature = self._age[rows], self._most[rows], self._curvature[rows]
        if self._before is not None:
            self._before = self._before[0][rows], self._before[1][rows]
