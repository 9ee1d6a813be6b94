"""APGD: projected gradient ascent that sets its own step size, for linf, l2 and l1.

Sources: Croce and Hein, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
attacks" (2020), section 3 and algorithm 1, for linf and l2; Croce and Hein, "Mind the box: l1-APGD for sparse
adversarial attacks on image classifiers" (2021), for l1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from robust_ext.attacks._common.apgd_steps import HalvingSteps, SparseSteps
from robust_ext.attacks._common.best import HighestLoss
from robust_ext.attacks._common.objectives import OBJECTIVES
from robust_ext.attacks._common.rows import (
    NO_GRADIENTS,
    STARTS,
    check_batch,
    given_start,
    gradient_of,
    hits,
    query,
    random_start,
    row_streams,
)
from robust_ext.attacks.base import AttackTraits
from robust_ext.attacks.native import Batch, NativeAttack, SearchOptions
from robust_ext.core.cost import Cost
from robust_ext.core.errors import AttackError, InvalidArgumentError, warn
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.target import PassCounter, Target
from robust_ext.core.threat import ThreatModel

Rows = Tensor | slice
# From the logits of some rows, and which rows they are, to their losses.
RowLoss = Callable[[Tensor, Rows], Tensor]
_ALL = slice(None)


@dataclass(frozen=True, kw_only=True)
class ApgdResult:
    """The candidates that APGD found.

    Args:
        candidates: Of each row, the adversarial point of highest loss among all that were tried; without one, a
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


@settings_class
class APGD(NativeAttack):
    """Goes up from each row's start by steps that are halved where they no longer raise the loss.

    All rows are attacked in one batch, each on its own. A run of S steps sends each row forward S + 1 times and back S
    times; choosing the classes that targeted losses aim at takes one forward pass more. Steps for linf never wait for a
    GPU, those for l2 and l1 do. Unlike the papers' code, gradients and losses that are no numbers are taken for zero
    and for no improvement, and the projections are exact, see :mod:`robust_ext.attacks._common.rows`.

    Each row draws one seed from the generator, in order, and all its starts from that seed: the first row starts where
    it would start alone, and no row's starts depend on the rows after it. :meth:`run` returns more than candidates.

    Example:
        >>> APGD(steps=50, loss="dlr").name
        'APGD-DLR'
    """

    name = "APGD-CE"
    ranks = True
    takes_starting_points: ClassVar[bool] = True
    traits = AttackTraits(batching="full", failure="best", seeds="generator")

    steps: int = setting(default=100, help="Gradients a run takes, at least 1.", minimum=1, trial=20, art="max_iter")
    restarts: int = setting(
        default=1, help="Runs from starts of their own, at least 1.", minimum=1, art="num_random_init"
    )
    loss: str = setting(
        default="ce",
        help='Maximised loss: ``"ce"``, ``"margin"``, ``"dlr"`` (needs 3 classes), ``"targeted-dlr"`` (needs 4) or '
        '``"targeted-margin"``. An untargeted attack with a targeted loss makes one run for each of the '
        "``target_classes`` most likely other classes, at the input or at the points it begins at with ``warm``.",
        choices=tuple(OBJECTIVES),
    )
    target_classes: int = setting(
        default=9, help="How many classes a targeted loss aims at, one after another.", minimum=1
    )
    rho: float = setting(
        default=0.75,
        help="Share of steps that must raise the loss for the step size to stay (linf, l2).",
        minimum=0,
        maximum=1,
    )
    momentum: float = setting(
        default=0.75,
        help="Weight of the new step against the movement before it; 1 is none (linf, l2).",
        above=0,
        maximum=1,
    )
    start: str = setting(
        default="random",
        help='``"random"``: uniform in the ball, clipped to the bounds. ``"input"``: the input itself in the first '
        "run, random in the restarts.",
        choices=STARTS,
        foolbox="random_start",
    )
    warm: bool = setting(
        default=False,
        help="Whether the first run begins at the first starting points, projected onto the ball, where the target has "
        "some.",
    )
    stop_early: bool = setting(
        default=False,
        help="Whether rows are left out of the queries once they are solved. No row's result depends on the others "
        "either way, but queries are then no longer the full batch.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("name", f"APGD-{self.loss.upper()}")
        batching, classes = "any" if self.stop_early else "full", OBJECTIVES[self.loss].minimum_classes
        self._set("traits", replace(type(self).traits, batching=batching, minimum_classes=classes))

    def cost(self, threat_model: ThreatModel, *, classes: int) -> Cost:
        """See :meth:`Attack.cost`."""
        aims = OBJECTIVES[self.loss].aims
        runs = self.restarts * (min(self.target_classes, classes - 1) if aims else 1)
        return Cost(runs * (self.steps + 1) + aims, runs * self.steps)

    def run(self, target: Target, inputs: Tensor, labels: Tensor, **options: Unpack[SearchOptions]) -> ApgdResult:
        """Return candidates and more, on the inputs' device; arguments are those of :meth:`NativeAttack.search`.

        ``watch`` is called after each evaluation of the points: ``steps`` times with gradients and once without in each
        run.

        Raises:
            InvalidArgumentError: Inputs or labels are not as described, or the target has too few classes for the loss.
            AttackError: The target gives no gradients.
        """
        return self._run(Batch(target, inputs, labels, **options))

    def candidates(self, batch: Batch) -> Tensor:
        """Return the candidates of :meth:`run`."""
        return self._run(batch).candidates

    def _run(self, batch: Batch) -> ApgdResult:
        target, threat_model, objective = batch.target, batch.threat_model, OBJECTIVES[self.loss]
        if target.classes < objective.minimum_classes:
            expected = (
                f"a target of at least {objective.minimum_classes} classes for it (this one has {target.classes}); "
                "choose loss='margin', or pad the target, see robust_ext.models.wrapping"
            )
            raise InvalidArgumentError("loss", repr(self.loss), expected)
        inputs, labels = check_batch(target, batch.inputs, batch.labels, threat_model)
        streams = row_streams(len(inputs), batch.generator)
        aimed = objective.aims and not (batch.targeted or batch.goal.ranks)
        runs = min(self.target_classes, target.classes - 1) if aimed else 1
        total = runs * self.restarts * (self.steps + 1)
        ascent = _Ascent(replace(batch, inputs=inputs, labels=labels), self.stop_early, total)
        if len(inputs) == 0:
            return ascent.result()
        given = given_start(target, inputs, threat_model) if self.warm else None
        losses = self._losses(ascent, inputs if given is None else given, runs if aimed else 0)
        rule: Callable[..., HalvingSteps | SparseSteps] = SparseSteps
        if threat_model.norm != "l1":
            rule = partial(HalvingSteps, rho=self.rho, momentum=self.momentum)
        for restart in range(self.restarts):
            for loss in losses:
                start = None
                if restart == 0:
                    start = inputs if given is None and self.start == "input" else given
                if start is None:
                    start = random_start(inputs, threat_model, streams)
                steps = rule(inputs.flatten(1), threat_model, steps=self.steps)
                ascent.run(start, loss, steps, steps=self.steps)
        result = ascent.result()
        if bool(result.no_gradient.any()):
            flat = "" if self.loss.endswith("margin") else "robust_ext:APGD(loss='margin') or "
            advice = f"try {flat}robust_ext:Square, which needs no gradient"
            warn(f"APGD: the gradient of some rows was zero at some point; {advice}")
        return result

    def _losses(self, ascent: _Ascent, ranked_at: Tensor, count: int) -> list[RowLoss]:
        """Return the loss of each run of a restart: one for each of ``count`` classes to aim at, or for none."""
        objective, labels = OBJECTIVES[self.loss], ascent.batch.labels
        aimed = objective.aimed if count else None
        if aimed is None:
            loss = objective.of_kind(ascent.batch.goal)
            return [lambda logits, rows: loss(logits, labels[rows])]
        others = ascent.logits(ranked_at).scatter(1, labels[:, None], -torch.inf)
        ranked = others.nan_to_num(nan=-torch.inf, neginf=-torch.inf).topk(count, 1).indices
        return [partial(_aimed, aimed, labels, classes) for classes in ranked.unbind(1)]


def _aimed(loss: Callable[..., Tensor], labels: Tensor, classes: Tensor, logits: Tensor, rows: Rows) -> Tensor:
    return loss(logits, labels[rows], classes[rows])


class _Ascent:
    """Runs on one batch, and what they have found together; ``total`` evaluations of the points are shown."""

    def __init__(self, batch: Batch, stop_early: bool, total: int) -> None:
        self.batch, self._stop_early, self._total, self._number = batch, stop_early, total, 0
        self._passes, flat = PassCounter(), batch.inputs.flatten(1)
        self._tried, self._hits = HighestLoss(flat), HighestLoss(flat)
        self._no_gradient = torch.zeros(len(flat), dtype=torch.bool, device=flat.device)

    def run(self, start: Tensor, loss: RowLoss, rule: HalvingSteps | SparseSteps, *, steps: int) -> None:
        """Go up from ``start`` ``(N, ...)`` by ``rule``: ``steps`` gradients, and one evaluation of the last point."""
        points = start.flatten(1)
        top, best_gradient = HighestLoss(points), torch.zeros_like(points)
        value = top.loss
        for number in range(steps + 1):
            rows = self._unsolved()
            if rows is None:
                break
            value, gradient, found = self._evaluate(points, loss, rows, before=value, differentiate=number < steps)
            better = top.update(points, value)
            # Where the loss of a hit is no number, any other hit is better.
            self._hits.update(points, value.nan_to_num(nan=torch.finfo(value.dtype).min).where(found, -torch.inf))
            if number == steps:
                break
            torch.where(better[:, None], gradient, best_gradient, out=best_gradient)
            back = rule.review(number, value, top.points, top.loss)
            if back is not None:
                points = torch.where(back[:, None], top.points, points)
                gradient = torch.where(back[:, None], best_gradient, gradient)
            points = rule.move(points, gradient)
        self._tried.update(top.points, top.loss)

    def logits(self, points: Tensor) -> Tensor:
        """Return the target's logits at ``(N, ...)``, without a gradient."""
        self._passes.forward += len(points)
        return query(self.batch.target, points)

    def result(self) -> ApgdResult:
        """Return the candidates found so far."""
        found, shape = self._hits.loss > -torch.inf, self.batch.inputs.shape
        return ApgdResult(
            candidates=torch.where(found[:, None], self._hits.points, self._tried.points).view(shape),
            best_points=self._tried.points.view(shape),
            found=found,
            losses=self._tried.loss,
            no_gradient=self._no_gradient,
            passes=self._passes,
        )

    def _unsolved(self) -> Rows | None:
        """Return the rows to query; None where nothing is left to do."""
        rows = (self._hits.loss == -torch.inf).nonzero().squeeze(1) if self._stop_early else _ALL
        return None if isinstance(rows, Tensor) and len(rows) == 0 else rows

    def _evaluate(
        self, points: Tensor, loss: RowLoss, rows: Rows, *, before: Tensor, differentiate: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return losses, gradients and which points are adversarial; rows left out keep their loss and lie still."""
        batch, shape = self.batch, self.batch.inputs.shape
        queried = points[rows].view(-1, *shape[1:])
        if differentiate:
            with torch.enable_grad():
                queried = queried.detach().requires_grad_(True)
                logits = batch.target.module(queried)
                value = loss(logits, rows)
                gradient = gradient_of(value, queried, AttackError(f"APGD: the target {NO_GRADIENTS}")).flatten(1)
            self._no_gradient[rows] = self._no_gradient[rows] | (gradient.abs().amax(1) == 0)
            logits, value = logits.detach(), value.detach()
            self._passes.forward += len(queried)
            self._passes.backward += len(queried)
        else:
            logits = self.logits(queried)
            value, gradient = loss(logits, rows), torch.zeros_like(points[rows])
        # Logits that are not finite have no loss, and are a hit that gives way to any other.
        found = hits(logits, batch.labels[rows], batch.goal)
        value = value.to(before.dtype).where(torch.isfinite(logits).all(1), torch.nan)
        if isinstance(rows, Tensor):
            value, gradient = before.index_put((rows,), value), torch.zeros_like(points).index_put((rows,), gradient)
            found = torch.zeros_like(self._no_gradient).index_put((rows,), found)
        shown = gradient.view(shape) if differentiate else None
        batch.show(self._number, self._total, points.view(shape), value, shown)
        self._number += 1
        return value, gradient, found
