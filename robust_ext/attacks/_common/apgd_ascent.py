"""The ascent of a batch: queries, and the best points seen over all runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from robust_ext.attacks._common.apgd_steps import Steps
from robust_ext.attacks._common.rows import NO_GRADIENTS, broken, gradient_of, query
from robust_ext.attacks.native import Step, Watch
from robust_ext.core.errors import AttackError
from robust_ext.core.target import PassCounter, Target

Rows = Tensor | slice
RowLoss = Callable[[Tensor, Rows], Tensor]

_ALL = slice(None)


@dataclass(frozen=True, kw_only=True)
class ApgdResult:
    """What APGD found.

    Args:
        candidates: Of each row, the adversarial point of highest loss among all that were tried; where there is none, a
            point at which the logits are not finite, and else the point of highest loss.
        best_points: The point of highest loss. With cross-entropy that need not be adversarial where another is.
        found: Whether an adversarial point was seen, or one with logits that are not finite, bool ``(N,)``.
        losses: At the best points, ``(N,)``; -inf where no point has one.
        no_gradient: Whether the gradient of a row was zero, or no number, in every entry at any point, bool ``(N,)``.
        passes: Rows sent forward, and rows through which a gradient came back.
    """

    candidates: Tensor
    best_points: Tensor
    found: Tensor
    losses: Tensor
    no_gradient: Tensor
    passes: PassCounter


@dataclass
class Ascent:
    """Runs on one batch, and what they have found together; ``total`` evaluations of the points are watched.

    With ``stop_early`` solved rows are left out of the queries.
    """

    target: Target
    inputs: Tensor
    labels: Tensor
    targeted: bool
    stop_early: bool
    watch: Watch | None
    total: int

    def __post_init__(self) -> None:
        self._number, self._passes = 0, PassCounter()
        self._tried, self._hits = _Best(self.inputs.flatten(1)), _Best(self.inputs.flatten(1))
        self._no_gradient = torch.zeros(len(self.inputs), dtype=torch.bool, device=self.inputs.device)

    def run(self, start: Tensor, loss: RowLoss, rule: Steps, *, steps: int) -> None:
        """Go up from ``start`` ``(N, ...)`` by ``rule``: ``steps`` gradients, and one evaluation of the last point."""
        points = start.flatten(1)
        top = _Best(points)
        best_gradient = torch.zeros_like(points)
        value = top.loss
        for number in range(steps):
            rows = self._unsolved()
            if rows is None:
                break
            value, gradient, hits = self._evaluate(points, loss, rows, before=value)
            better = top.update(points, value)
            torch.where(better[:, None], gradient, best_gradient, out=best_gradient)
            self._hits.update(points, _worth(value, hits))
            back = rule.review(number, value, top.points, top.loss)
            if back is not None:
                points = torch.where(back[:, None], top.points, points)
                gradient = torch.where(back[:, None], best_gradient, gradient)
            points = rule.move(points, gradient)
        rows = self._unsolved()
        if rows is not None:
            value, _, hits = self._evaluate(points, loss, rows, before=value, differentiate=False)
            top.update(points, value)
            self._hits.update(points, _worth(value, hits))
        self._tried.update(top.points, top.loss)

    def logits(self, points: Tensor) -> Tensor:
        """The target's logits at ``(N, ...)``, without a gradient."""
        self._passes.forward += len(points)
        return query(self.target, points)

    def result(self) -> ApgdResult:
        """What has been found by now."""
        found = self._hits.loss > -torch.inf
        candidates = torch.where(found[:, None], self._hits.points, self._tried.points)
        return ApgdResult(
            candidates=candidates.view(self.inputs.shape),
            best_points=self._tried.points.view(self.inputs.shape),
            found=found,
            losses=self._tried.loss,
            no_gradient=self._no_gradient,
            passes=self._passes,
        )

    def _unsolved(self) -> Rows | None:
        """The rows to query; None where nothing is left to do."""
        if not self.stop_early:
            return _ALL
        rows = (self._hits.loss == -torch.inf).nonzero().squeeze(1)
        return rows if len(rows) else None

    def _evaluate(
        self, points: Tensor, loss: RowLoss, rows: Rows, *, before: Tensor, differentiate: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Losses, gradients and which points are adversarial; rows that are left out keep their loss and lie still."""
        queried = points[rows].view(-1, *self.inputs.shape[1:])
        if differentiate:
            with torch.enable_grad():
                queried = queried.detach().requires_grad_(True)
                logits = self.target.module(queried)
                value = loss(logits, rows)
                gradient = self._differentiate(value, queried, rows)
            logits, value = logits.detach(), value.detach()
            self._passes.forward += len(queried)
            self._passes.backward += len(queried)
        else:
            logits = self.logits(queried)
            value, gradient = loss(logits, rows), torch.zeros_like(points[rows])
        same, finite = logits.argmax(1) == self.labels[rows], torch.isfinite(logits).all(1)
        # Logits that are not finite have no loss, and are a hit that gives way to any other.
        hits = torch.where(finite, same == self.targeted, broken(logits, targeted=self.targeted))
        value = value.to(before.dtype).where(finite, torch.nan)
        if isinstance(rows, Tensor):
            value, gradient = before.index_put((rows,), value), torch.zeros_like(points).index_put((rows,), gradient)
            hits = torch.zeros_like(self._no_gradient).index_put((rows,), hits)
        self._show(points, value, gradient if differentiate else None)
        return value, gradient, hits

    def _differentiate(self, value: Tensor, queried: Tensor, rows: Rows) -> Tensor:
        missing = AttackError(f"APGD: the target {NO_GRADIENTS}")
        gradient = gradient_of(value, queried, missing).flatten(1)
        self._no_gradient[rows] = self._no_gradient[rows] | (gradient.abs().amax(1) == 0)
        return gradient

    def _show(self, points: Tensor, value: Tensor, gradient: Tensor | None) -> None:
        if self.watch is not None:
            shape = self.inputs.shape
            shown = None if gradient is None else gradient.view(shape)
            self.watch(Step(self._number, self.total, points.view(shape), value, shown))
        self._number += 1


def _worth(value: Tensor, hits: Tensor) -> Tensor:
    """The loss of hits, lower than that of any other where it is no number; -inf elsewhere."""
    return value.nan_to_num(nan=torch.finfo(value.dtype).min).where(hits, -torch.inf)


class _Best:
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
