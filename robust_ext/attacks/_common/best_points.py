"""The best point of each row that a search without gradients has queried."""

from __future__ import annotations

import torch
from torch import Tensor

from robust_ext.attacks._common.objectives import OBJECTIVES
from robust_ext.attacks._common.rows import broken, over_rows


class BestPoints:
    """Keeps one point a row: a misclassified one before one that is not, and of two alike the one of higher loss.

    Of two that are equally good the first stays. Points whose logits are not finite have a loss of ``-inf`` and, unless
    the search aims, count as misclassified: any other misclassified point goes before them. ``points`` are the inputs
    at first, with ``loss`` ``-inf``; ``solved`` is whether they are misclassified, or hit their aim.
    """

    def __init__(self, inputs: Tensor, labels: Tensor, *, loss: str, targeted: bool) -> None:
        self._loss = OBJECTIVES[loss].of_kind(targeted=targeted)
        self._labels, self._targeted = labels, targeted
        self.points = inputs.clone()
        self.loss = inputs.new_full((len(inputs),), -torch.inf)
        self.solved = torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)

    def update(self, points: Tensor, logits: Tensor, *, closed: Tensor | None = None) -> Tensor:
        """Take over what is better, except in ``closed`` rows ``(N,)``; the loss ``(N,)``, ``-inf`` if no number."""
        finite = torch.isfinite(logits).all(1)
        loss = self._loss(logits, self._labels).to(self.loss.dtype).where(finite, -torch.inf)
        solved = (logits.argmax(1) == self._labels) == self._targeted
        solved = torch.where(finite, solved, broken(logits, targeted=self._targeted))
        self._take(points, loss, solved, closed)
        return loss

    def merge(self, other: BestPoints) -> None:
        """Take over what is better among the points of another search for the same rows."""
        self._take(other.points, other.loss, other.solved, None)

    def _take(self, points: Tensor, loss: Tensor, solved: Tensor, closed: Tensor | None) -> None:
        better = (solved & ~self.solved) | ((solved == self.solved) & (loss > self.loss))
        if closed is not None:
            better &= ~closed
        self.points = torch.where(over_rows(better, points), points, self.points)
        self.loss = torch.where(better, loss, self.loss)
        self.solved = torch.where(better, solved, self.solved)
