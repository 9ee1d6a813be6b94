"""The best of the points that an attack queries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.attacks._common.objectives import OBJECTIVES
from robust_ext.attacks._common.rows import hits, over_rows
from robust_ext.core.criteria import MISCLASSIFICATION, Criterion
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel


class BestPoints:
    """Keeps one point a row: an adversarial one before one that is not, and of two alike the one of higher loss.

    Of two that are equally good the first stays. Points whose logits are not finite have a loss of ``-inf`` and, unless
    the search aims, count as adversarial: any other adversarial point goes before them. ``points`` are the inputs at
    first, with ``loss`` ``-inf``; ``solved`` is whether they are adversarial by ``goal``.
    """

    def __init__(self, inputs: Tensor, labels: Tensor, *, loss: str, goal: Criterion) -> None:
        self._loss = OBJECTIVES[loss].of_kind(goal)
        self._labels, self._goal = labels, goal
        self.points = inputs.clone()
        self.loss = inputs.new_full((len(inputs),), -torch.inf)
        self.solved = torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)

    def update(self, points: Tensor, logits: Tensor, *, closed: Tensor | None = None) -> Tensor:
        """Take over what is better, except in ``closed`` rows ``(N,)``; the loss ``(N,)``, ``-inf`` if no number."""
        finite = torch.isfinite(logits).all(1)
        loss = self._loss(logits, self._labels).to(self.loss.dtype).where(finite, -torch.inf)
        self._keep(points, loss, hits(logits, self._labels, self._goal), closed)
        return loss

    def take(self, points: Tensor, logits: Tensor, loss: Tensor) -> None:
        """Take over what is better by another loss ``(N,)``."""
        loss = loss.where(torch.isfinite(logits).all(1), -torch.inf)
        self._keep(points, loss, hits(logits, self._labels, self._goal), None)

    def merge(self, other: BestPoints) -> None:
        """Take over what is better among the points of another search for the same rows."""
        self._keep(other.points, other.loss, other.solved, None)

    def _keep(self, points: Tensor, loss: Tensor, solved: Tensor, closed: Tensor | None) -> None:
        better = (solved & ~self.solved) | ((solved == self.solved) & (loss > self.loss))
        if closed is not None:
            better &= ~closed
        self.points = torch.where(over_rows(better, points), points, self.points)
        self.loss = torch.where(better, loss, self.loss)
        self.solved = torch.where(better, solved, self.solved)


class HighestLoss:
    """The point of highest loss of each row."""

    def __init__(self, points: Tensor) -> None:
        self.points = points.clone()
        self.loss = points.new_full((len(points),), -torch.inf)

    def update(self, points: Tensor, loss: Tensor) -> Tensor:
        """Take over the points of higher loss; which those are, bool ``(N,)``."""
        better = loss > self.loss
        torch.where(better[:, None], points, self.points, out=self.points)
        torch.where(better, loss, self.loss, out=self.loss)
        return better


class BestQueried:
    """Keeps for each input ``(N, ...)`` the point in bounds and ball of highest margin, above 0, that a module saw.

    A batch of N points is in the order of the inputs; a point of any other belongs to the input that it is nearest to.
    """

    def __init__(
        self, inputs: Tensor, labels: Tensor, threat_model: ThreatModel, goal: Criterion = MISCLASSIFICATION
    ) -> None:
        self._inputs, self._labels, self._threat_model, self._goal = inputs, labels, threat_model, goal
        self._points = inputs.clone()
        self._margin = inputs.new_zeros(len(inputs))

    def note(self, _module: nn.Module, args: tuple[Any, ...], logits: Any) -> None:
        """Look at the logits ``(M, K)`` of points ``(M, ...)``: a forward hook."""
        points = args[0] if args else None
        if not isinstance(points, Tensor) or not isinstance(logits, Tensor):
            return
        points, logits = points.detach(), logits.detach()
        if points.shape[1:] != self._inputs.shape[1:] or len(logits) != len(points):
            return
        if len(points) == len(self._inputs):
            self._keep(torch.arange(len(points), device=points.device), points, logits)
            return
        rows = torch.cdist(points.flatten(1), self._inputs.flatten(1)).argmin(1)
        for one in range(len(points)):
            # One at a time: several may belong to one row.
            self._keep(rows[one : one + 1], points[one : one + 1], logits[one : one + 1])

    def _keep(self, rows: Tensor, points: Tensor, logits: Tensor) -> None:
        model = self._threat_model
        low, high = model.box(self._inputs[rows]) if model.restricted else model.bounds
        inside = ((points >= low) & (points <= high)).flatten(1).all(1)
        inside &= model.contains(points, self._inputs[rows])
        gained = self._goal.margin(logits, self._labels[rows]).to(self._margin.dtype)
        better = inside & (gained > self._margin[rows])
        self._points[rows] = torch.where(over_rows(better, points), points, self._points[rows])
        self._margin[rows] = torch.where(better, gained, self._margin[rows])

    def or_else(self, candidates: Tensor) -> Tensor:
        """The best points, and the candidates ``(N, ...)`` in rows without one."""
        if candidates.shape != self._points.shape:
            return candidates
        return torch.where(over_rows(self._margin > 0, candidates), self._points.to(candidates), candidates)


@contextmanager
def best_queried(target: Target, inputs: Tensor, labels: Tensor, threat_model: ThreatModel) -> Iterator[BestQueried]:
    """Watch what is sent to a target's module meanwhile."""
    best = BestQueried(inputs, labels, threat_model, target.criterion)
    handle = target.module.register_forward_hook(best.note)
    try:
        yield best
    finally:
        handle.remove()
