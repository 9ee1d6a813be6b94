"""APGD: projected gradient ascent that sets its own step size, for linf, l2 and l1.

Sources: Croce and Hein, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
attacks" (2020), section 3 and algorithm 1, for linf and l2; Croce and Hein, "Mind the box: l1-APGD for sparse
adversarial attacks on image classifiers" (2021), for l1.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from robust_ext.attacks._common.apgd_ascent import ApgdResult, Ascent, HalvingSteps, RowLoss, Rows, SparseSteps, Steps
from robust_ext.attacks._common.objectives import OBJECTIVES, aimed_dlr
from robust_ext.attacks._common.rows import STARTS, check_batch, random_start, row_streams
from robust_ext.attacks.base import AttackTraits
from robust_ext.attacks.native import NativeAttack, Watch
from robust_ext.core.cost import Cost
from robust_ext.core.errors import InvalidArgumentError, warn
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel


@settings_class
class APGD(NativeAttack):
    """Goes up from each row's start by steps that are halved where they no longer raise the loss.

    All rows are attacked in one batch, each on its own. A run of S steps sends each row forward S + 1 times and back S
    times; choosing the classes that ``"targeted-dlr"`` aims at takes one forward pass more. Steps for linf never wait
    for a GPU, those for l2 and l1 do. Unlike the papers' code, gradients and losses that are no numbers are taken for
    zero and for no improvement, and the projections are exact, see :mod:`robust_ext.attacks._common.rows`.

    Each row draws one seed from the generator, in order, and all its starts from that seed: the first row starts where
    it would start alone, and no row's starts depend on the rows after it. :meth:`run` returns more than candidates.

    Example:
        >>> APGD(steps=50, loss="dlr").name
        'APGD-DLR'
    """

    name = "APGD-CE"
    traits = AttackTraits(batching="full", failure="best", seeds="generator")

    steps: int = setting(default=100, help="Gradients a run takes, at least 1.", minimum=1, trial=20, art="max_iter")
    restarts: int = setting(
        default=1, help="Runs from starts of their own, at least 1.", minimum=1, art="num_random_init"
    )
    loss: str = setting(
        default="ce",
        help='What is maximised: ``"ce"``, ``"margin"``, ``"dlr"`` (needs 3 classes) or ``"targeted-dlr"`` (needs 4). '
        'An untargeted attack with ``"targeted-dlr"`` makes one run for each of the ``target_classes`` most '
        "likely other classes at the input.",
        choices=tuple(OBJECTIVES),
    )
    target_classes: int = setting(
        default=9, help='How many classes ``"targeted-dlr"`` aims at, one after another.', minimum=1
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

    def search(self, target: Target, inputs: Tensor, labels: Tensor, **options: Any) -> Tensor:
        """Return the candidates of :meth:`run`, see :meth:`NativeAttack.search`."""
        return self.run(target, inputs, labels, **options).candidates

    def run(
        self,
        target: Target,
        inputs: Tensor,
        labels: Tensor,
        *,
        threat_model: ThreatModel,
        generator: torch.Generator,
        targeted: bool = False,
        watch: Watch | None = None,
    ) -> ApgdResult:
        """Return candidates and more, on the inputs' device; arguments are those of :meth:`NativeAttack.search`.

        ``watch`` is called after each evaluation of the points: ``steps`` times with gradients and once without in each
        run.

        Raises:
            InvalidArgumentError: Inputs or labels are not as described, or the target has too few classes for the loss.
            AttackError: The target gives no gradients.
        """
        objective = OBJECTIVES[self.loss]
        if target.classes < objective.minimum_classes:
            expected = (
                f"a target of at least {objective.minimum_classes} classes for it (this one has {target.classes}); "
                "choose loss='margin', or pad the target, see robust_ext.models.normalized"
            )
            raise InvalidArgumentError("loss", repr(self.loss), expected)
        inputs, labels = check_batch(target, inputs, labels, threat_model)
        streams = row_streams(len(inputs), generator)
        runs = min(self.target_classes, target.classes - 1) if objective.aims and not targeted else 1
        ascent = Ascent(
            target,
            inputs,
            labels,
            targeted=targeted,
            stop_early=self.stop_early,
            watch=watch,
            total=runs * self.restarts * (self.steps + 1),
        )
        if len(inputs) == 0:
            return ascent.result()
        losses = self._losses(ascent, targeted=targeted, count=runs)
        for restart in range(self.restarts):
            for loss in losses:
                given = restart == 0 and self.start == "input"
                start = inputs if given else random_start(inputs, threat_model, streams)
                ascent.run(start, loss, self._rule(inputs.flatten(1), threat_model), steps=self.steps)
        result = ascent.result()
        if bool(result.no_gradient.any()):
            warn(
                "APGD: some rows had a gradient of zeros at some point; try loss='margin', or an attack without "
                "gradients"
            )
        return result

    def _rule(self, inputs: Tensor, threat_model: ThreatModel) -> Steps:
        if threat_model.norm == "l1":
            return SparseSteps(inputs, threat_model, steps=self.steps)
        return HalvingSteps(inputs, threat_model, steps=self.steps, rho=self.rho, momentum=self.momentum)

    def _losses(self, ascent: Ascent, *, targeted: bool, count: int) -> list[RowLoss]:
        """The loss of each run of a restart, as a function of the logits of some rows and of which rows they are."""
        objective, labels = OBJECTIVES[self.loss], ascent.labels
        if targeted or not objective.aims:
            loss = objective.of_kind(targeted=targeted)
            return [lambda logits, rows: loss(logits, labels[rows])]
        others = ascent.logits(ascent.inputs).scatter(1, labels[:, None], -torch.inf)
        ranked = others.nan_to_num(nan=-torch.inf, neginf=-torch.inf).topk(count, 1).indices
        return [partial(_aimed, labels, classes) for classes in ranked.unbind(1)]


def _aimed(labels: Tensor, classes: Tensor, logits: Tensor, rows: Rows) -> Tensor:
    return aimed_dlr(logits, labels[rows], classes[rows])
