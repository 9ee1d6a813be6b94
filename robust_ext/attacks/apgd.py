"""APGD: projected gradient ascent that sets its own step size, for linf, l2 and l1.

Sources: Croce and Hein, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
attacks" (2020), section 3 and algorithm 1, for linf and l2; Croce and Hein, "Mind the box: l1-APGD for sparse
adversarial attacks on image classifiers" (2021), for l1.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from robust_ext.attacks._common.apgd_ascent import ApgdResult, Ascent, RowLoss, Rows
from robust_ext.attacks._common.apgd_steps import steps_for
from robust_ext.attacks._common.objectives import Objective, aimed_dlr, find_objective
from robust_ext.attacks.base import AttackTraits, draw_seed
from robust_ext.attacks.native import NativeAttack, Watch
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_choice, check_inputs, check_integer, check_labels, check_number

logger = logging.getLogger(__name__)

STARTS = ("random", "input")


@dataclass(frozen=True, kw_only=True)
class ApgdSettings:
    """Settings of APGD; the defaults are the papers'.

    Args:
        steps: Gradients a run takes, at least 1.
        restarts: Runs from starts of their own, at least 1.
        loss: What is maximised: ``"ce"``, ``"margin"``, ``"dlr"`` (needs 3 classes) or ``"targeted-dlr"`` (needs 4),
            see :mod:`~._common.objectives`. An untargeted attack with ``"targeted-dlr"`` makes one run for
            each of the ``target_classes`` most likely other classes at the input.
        target_classes: How many classes ``"targeted-dlr"`` aims at, one after another.
        rho: Share of steps that must raise the loss for the step size to stay, in [0, 1] (linf, l2).
        momentum: Weight of the new step against the movement before it, in (0, 1]; 1 is none (linf, l2).
        start: ``"random"``: uniform in the ball, clipped to the bounds. ``"input"``: the input itself in the first
            run, random in the restarts.
        stop_early: Whether rows are left out of the queries once they are solved. No row's result depends on the
            others either way, but queries are then no longer the full batch.
    """

    steps: int = 100
    restarts: int = 1
    loss: str = "ce"
    target_classes: int = 9
    rho: float = 0.75
    momentum: float = 0.75
    start: str = "random"
    stop_early: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "restarts", "target_classes"):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), minimum=1))
        find_objective(self.loss)
        check_choice("start", self.start, STARTS)
        object.__setattr__(self, "rho", check_number("rho", self.rho, minimum=0, maximum=1))
        momentum = check_number("momentum", self.momentum, minimum=0, maximum=1, open_minimum=True)
        object.__setattr__(self, "momentum", momentum)
        if not isinstance(self.stop_early, bool):
            raise InvalidArgumentError("stop_early", self.stop_early, "True or False")


def apgd(
    target: Target,
    inputs: Tensor,
    labels: Tensor,
    *,
    threat_model: ThreatModel,
    generator: torch.Generator,
    settings: ApgdSettings | None = None,
    targeted: bool = False,
    watch: Watch | None = None,
) -> ApgdResult:
    """Attack every row on its own, all in one batch.

    A run of S steps sends each row forward S + 1 times and back S times; choosing the classes that ``"targeted-dlr"``
    aims at takes one forward pass more. Steps for linf never wait for a GPU, those for l2 and l1 do. Unlike the papers'
    code, gradients and losses that are no numbers are taken for zero and for no improvement, and the projections are
    exact, see :mod:`robust_ext.attacks._common.projections`.

    Args:
        target: What may be queried; its parameters get no gradients.
        inputs: Floating point ``(N, ...)`` in the threat model's bounds, taken as float32; not changed.
        labels: int64 ``(N,)``: the true classes, or the classes to aim at.
        threat_model: The norm, epsilon and bounds.
        generator: CPU generator. Each row draws one seed from it, in order, and all its starts from that seed: the
            first row starts where it would start alone, and no row's starts depend on the rows after it.
        settings: The defaults when left out.
        targeted: Whether rows should be classified as their label instead of as anything else.
        watch: Called after each evaluation of the points: ``steps`` times with gradients and once without in each run.

    Returns:
        Candidates and more, on the inputs' device; tensors of no rows for no inputs.

    Raises:
        InvalidArgumentError: Inputs or labels are not as described, or the target has too few classes for the loss.
        AttackError: The target gives no gradients.
    """
    chosen = ApgdSettings() if settings is None else settings
    objective = find_objective(chosen.loss)
    if target.classes < objective.minimum_classes:
        expected = (
            f"a target of at least {objective.minimum_classes} classes for it (this one has {target.classes}); choose "
            "loss='margin', or pad the target, see robust_ext.models.padded"
        )
        raise InvalidArgumentError("loss", repr(chosen.loss), expected)
    inputs = check_inputs("inputs", inputs, bounds=threat_model.bounds)
    labels = check_labels("labels", labels, samples=len(inputs), classes=target.classes).to(inputs.device)
    streams = [torch.Generator().manual_seed(draw_seed(generator)) for _ in range(len(inputs))]
    runs = min(chosen.target_classes, target.classes - 1) if objective.aims and not targeted else 1
    ascent = Ascent(
        target,
        inputs,
        labels,
        targeted=targeted,
        stop_early=chosen.stop_early,
        watch=watch,
        total=runs * chosen.restarts * (chosen.steps + 1),
    )
    if len(inputs) == 0:
        return ascent.result()
    losses = _losses(objective, ascent, targeted=targeted, count=runs)
    for restart in range(chosen.restarts):
        for loss in losses:
            given = restart == 0 and chosen.start == "input"
            start = inputs if given else _random_start(inputs, threat_model, streams)
            rule = steps_for(
                inputs.flatten(1), threat_model, steps=chosen.steps, rho=chosen.rho, momentum=chosen.momentum
            )
            ascent.run(start, loss, rule, steps=chosen.steps)
    result = ascent.result()
    stuck = int(result.no_gradient.sum())
    if stuck:
        logger.warning(
            "APGD: %d of %d rows had a gradient of zeros at some point; where they do, try loss='margin', or an attack "
            "without gradients",
            stuck,
            len(inputs),
        )
    return result


def _losses(objective: Objective, ascent: Ascent, *, targeted: bool, count: int) -> list[RowLoss]:
    """The loss of each run of a restart, as a function of the logits of some rows and of which rows they are."""
    labels = ascent.labels
    if targeted or not objective.aims:
        loss = objective.targeted if targeted else objective.untargeted
        return [lambda logits, rows: loss(logits, labels[rows])]
    others = ascent.logits(ascent.inputs).scatter(1, labels[:, None], -torch.inf)
    ranked = others.nan_to_num(nan=-torch.inf, neginf=-torch.inf).topk(count, 1).indices
    return [partial(_aimed, labels, classes) for classes in ranked.unbind(1)]


def _aimed(labels: Tensor, classes: Tensor, logits: Tensor, rows: Rows) -> Tensor:
    return aimed_dlr(logits, labels[rows], classes[rows])


def _random_start(inputs: Tensor, threat_model: ThreatModel, streams: list[torch.Generator]) -> Tensor:
    drawn = [threat_model.sample_inner(row, 1, generator=stream) for row, stream in zip(inputs, streams, strict=True)]
    return torch.cat(drawn)


class APGD(NativeAttack):
    """APGD as an attack; see :func:`apgd`, which says more about what it found, and :class:`ApgdSettings`.

    Example:
        >>> APGD(steps=50, loss="dlr")
        APGD(APGD-DLR)
    """

    def __init__(
        self,
        *,
        steps: int = 100,
        restarts: int = 1,
        loss: str = "ce",
        target_classes: int = 9,
        rho: float = 0.75,
        momentum: float = 0.75,
        start: str = "random",
        stop_early: bool = False,
    ) -> None:
        self.settings = ApgdSettings(
            steps=steps,
            restarts=restarts,
            loss=loss,
            target_classes=target_classes,
            rho=rho,
            momentum=momentum,
            start=start,
            stop_early=stop_early,
        )
        self.name = f"APGD-{loss.upper()}"
        self.traits = AttackTraits(
            batching="any" if stop_early else "full",
            minimum_classes=find_objective(loss).minimum_classes,
            failure="best",
            seeds="generator",
        )

    @property
    def description(self) -> str:
        """All settings."""
        return "APGD(" + ", ".join(f"{key}={value!r}" for key, value in asdict(self.settings).items()) + ")"

    def search(
        self,
        target: Target,
        inputs: Tensor,
        labels: Tensor,
        *,
        threat_model: ThreatModel,
        generator: torch.Generator,
        targeted: bool = False,
        watch: Watch | None = None,
    ) -> Tensor:
        """Return the candidates of :func:`apgd`, see :meth:`NativeAttack.search`."""
        return apgd(
            target,
            inputs,
            labels,
            threat_model=threat_model,
            generator=generator,
            settings=self.settings,
            targeted=targeted,
            watch=watch,
        ).candidates
