"""The steps of APGD: with momentum and halved sizes for linf and l2, sparse ones for l1."""

from __future__ import annotations

import torch
from torch import Tensor

from robust_ext.attacks._common.rows import l2_normalize, project
from robust_ext.core.threat import ThreatModel


def checkpoints(steps: int) -> list[int]:
    """Numbers of the points at which the step size is reviewed (Croce and Hein 2020, section 3.1).

    Example:
        >>> checkpoints(100)
        [22, 41, 57, 70, 80, 87, 93, 99]
    """
    # Hundredths, as integers: 0.22 and its successors have no exact floats, and are rounded up.
    before, at, found = 0, 22, []
    while at < 100:
        found.append(-(-at * steps // 100))
        before, at = at, at + max(at - before - 3, 6)
    return sorted(set(found))


class HalvingSteps:
    """Algorithm 1 of Croce and Hein (2020): momentum, and steps of 2 epsilon that are halved at checkpoints.

    A row's step is halved, and the row goes back to its best point, where too few of the steps since the last
    checkpoint raised the loss (condition 1), or where its step was not halved at the last checkpoint and its best loss
    has not risen since (condition 2). The gradient at the best point is kept by the caller, so that going back there
    costs no pass; the paper evaluates it again. ``momentum`` is the paper's alpha: the weight of the new step, against
    1 - alpha for the movement before. Steps are along the gradient's sign (linf) or the normalised gradient (l2).
    """

    def __init__(self, inputs: Tensor, threat_model: ThreatModel, *, steps: int, rho: float, momentum: float) -> None:
        self._inputs, self._threat_model = inputs, threat_model
        self._rho, self._momentum = rho, momentum
        self._checkpoints = checkpoints(steps)
        self._size = inputs.new_full((len(inputs), 1), 2 * threat_model.epsilon)
        self._before: Tensor | None = None
        self._last_checkpoint = 0
        self._rises = inputs.new_zeros(len(inputs))
        self._halved = torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)
        self._last_loss = self._last_best = inputs.new_zeros(len(inputs))

    def review(self, number: int, loss: Tensor, best_points: Tensor, best_loss: Tensor) -> Tensor | None:
        """Take note of the loss ``(N,)`` at a point; at checkpoints, which rows should go back to their best point.

        Points are numbered from 0; the best are those of highest loss so far, ``(N, D)``.
        """
        if number == 0:
            self._last_best = best_loss.clone()
        else:
            self._rises += loss > self._last_loss
        self._last_loss = loss
        if number not in self._checkpoints:
            return None
        few = self._rises < self._rho * (number - self._last_checkpoint)
        stuck = ~self._halved & (best_loss <= self._last_best)
        halved = few | stuck
        self._size = torch.where(halved[:, None], self._size / 2, self._size)
        self._last_loss = torch.where(halved, best_loss, loss)
        self._halved, self._last_best, self._last_checkpoint = halved, best_loss.clone(), number
        self._rises.zero_()
        return halved

    def move(self, points: Tensor, gradient: Tensor) -> Tensor:
        """The next points ``(N, D)``."""
        direction = gradient.sign() if self._threat_model.norm == "linf" else l2_normalize(gradient)
        moved = self._project(direction.mul_(self._size).add_(points))
        if self._before is not None:
            # x + a (z - x) + (1 - a) (x - before)
            moved.mul_(self._momentum).add_(points, alpha=2 - 2 * self._momentum)
            moved = self._project(moved.sub_(self._before, alpha=1 - self._momentum))
        self._before = points
        return moved

    def _project(self, points: Tensor) -> Tensor:
        return project(points, self._inputs, self._threat_model)


class SparseSteps:
    """Algorithm 1 of Croce and Hein (2021), for l1: steps along the largest entries of the gradient alone.

    At first the largest fifth moves, by equal amounts that add up to epsilon; every 4% of the steps their number
    becomes that of the values that differ at the best point, divided by 1.5. Where that number fell by less than 5%
    the step is divided by 1.5, down to epsilon / 10; elsewhere it is epsilon again and the row goes back to its best
    point. Left out is the paper's schedule of larger epsilons that shrink during the attack.

    Different from the paper: values that lie at a bound and are pushed across it get no part of the step's length, and
    where all of the largest entries are such, more are taken until one can move. Without this the largest entries block
    the others once they have reached their bounds, and even on a linear classifier the optimum may not be reached.
    """

    def __init__(self, inputs: Tensor, threat_model: ThreatModel, *, steps: int) -> None:
        self._inputs, self._threat_model = inputs, threat_model
        self._interval = max(steps // 25, 1)
        values = inputs.shape[1]
        self._size = inputs.new_full((len(inputs), 1), threat_model.epsilon)
        self._changed = inputs.new_full((len(inputs), 1), values)
        self._most_kept = max(values // 5, 1)
        self._kept = torch.full((len(inputs), 1), self._most_kept, device=inputs.device)

    def review(self, number: int, loss: Tensor, best_points: Tensor, best_loss: Tensor) -> Tensor | None:
        """See :meth:`HalvingSteps.review`."""
        if number == 0 or number % self._interval:
            return None
        epsilon = self._threat_model.epsilon
        # Rounding leaves specks where the projection should leave nothing; a speck would keep its entry among the kept.
        moved = (best_points - self._inputs).abs_() > 1e-6 * epsilon
        changed = moved.sum(1, keepdim=True, dtype=self._changed.dtype)
        sparser = changed < 0.95 * self._changed
        self._size = torch.where(sparser, epsilon, (self._size / 1.5).clamp_min(epsilon / 10))
        self._kept = (changed / 1.5).to(torch.int64).clamp_min(1)
        self._most_kept = int(self._kept.max())
        self._changed = changed
        return sparser.squeeze(1)

    def move(self, points: Tensor, gradient: Tensor) -> Tensor:
        """The next points ``(N, D)``."""
        low, high = self._threat_model.bounds
        strength = gradient.abs()
        edge = torch.where(gradient > 0, high, low)
        # Rounding may keep a value just off its bound.
        free = ((edge - points).abs_() > 1e-6 * max(abs(low), abs(high))) & (strength > 0)
        least = strength.topk(self._most_kept, 1).values.gather(1, self._kept - 1)
        least = torch.minimum(least, (strength * free).amax(1, keepdim=True))
        chosen = (strength >= least) & (strength > 0)
        moving = (chosen & free).sum(1, keepdim=True).clamp_min(1)
        chosen = gradient.sign().mul_(chosen).mul_(self._size / moving)
        return project(chosen.add_(points), self._inputs, self._threat_model)
