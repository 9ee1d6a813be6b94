"""Gradient ascent on the objectives of MEAD with steps of one size: PGD, BIM and FGSM as detectors are judged by.

Source: Granese et al., "MEAD: A Multi-Armed Approach for Evaluation of Adversarial Examples Detectors" (2022), sections
2.2 and 3. Where APGD looks for misclassified points as well as it can, these are the plain ascents of the paper, which
differ in where they end, and so in what a detector sees.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from robust_ext.attacks._common.best import BestPoints
from robust_ext.attacks._common.objectives import DIVERGENCES, OBJECTIVES
from robust_ext.attacks._common.rows import (
    NO_GRADIENTS,
    STARTS,
    gradient_of,
    l2_normalize,
    over_rows,
    project,
    query,
    random_start,
    row_streams,
)
from robust_ext.attacks.base import AttackTraits
from robust_ext.attacks.native import Batch, NativeAttack
from robust_ext.core.cost import Cost
from robust_ext.core.criteria import Criterion
from robust_ext.core.errors import AttackError, AttackRefusedError, InvalidArgumentError
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.threat import ThreatModel

ALGORITHMS = ("pgd", "bim", "fgsm")
PROJECTIONS = ("nearest", "scaled")

# The paper's, for inputs in [0, 1].
_STEP_SIZES = {"linf": 0.01, "l2": 0.1, "l1": 4.0}


@settings_class
class ObjectivePGD(NativeAttack):
    """Ascends an objective by steps of one size, kept in ball and bounds, and returns where it ends.

    Steps are along the sign of the gradient for linf, and along the gradient divided by its own norm for l2 and l1. For
    l1 the gradient is thus spread over all values, as in Foolbox 3.3.4 and in ART before 1.9; newer versions of ART
    move few values at a time. A row without a gradient stays.

    Every step sends the whole batch, in row order, forward and back once. ``"kl"`` and ``"fisher-rao"`` take one more
    forward pass, for the inputs; ``best=True`` one more, for where the ascent ends.

    Each row draws one seed from the generator, in order, and its start from that seed. For targeted attacks, which only
    ``"ace"`` has a meaning for, the labels are the classes to aim at, and the objective is lowered.

    Example:
        >>> ObjectivePGD(objective="kl", algorithm="bim").name
        'BIM-KL'
    """

    name = "PGD-ACE"
    ranks = True
    traits = AttackTraits(batching="full", failure="last", seeds="generator")

    objective: str = setting(
        default="ace", help='``"ace"``, ``"kl"``, ``"gini"`` or ``"fisher-rao"``.', choices=tuple(DIVERGENCES)
    )
    algorithm: str = setting(
        default="pgd",
        help='Defaults of the settings below. ``"pgd"``: 100 steps from a random start. '
        '``"bim"``: ``int(320 epsilon)`` steps, at least 1, from the input. ``"fgsm"``: one step of epsilon from '
        "the input.",
        choices=ALGORITHMS,
    )
    steps: int | None = setting(default=None, help="Number of steps.", minimum=1, trial=20, art="max_iter")
    step_size: float | None = setting(
        default=None,
        help="In the units of the inputs. Left out, for PGD and BIM: .01 for linf, .1 for l2 and 4 for l1. These, and "
        "the steps of BIM, are for bounds (0, 1), and follow the width of others.",
        above=0,
        foolbox="abs_stepsize",
        art="eps_step",
    )
    rel_step_size: float | None = setting(
        default=None,
        help="Step size relative to epsilon; ``step_size`` goes before it.",
        above=0,
        foolbox="rel_stepsize",
    )
    start: str | None = setting(
        default=None,
        help='``"random"``, uniform in the ball and clipped to the bounds, or ``"input"``. Left out, ``"kl"`` and '
        '``"fisher-rao"`` start at random with every algorithm: they have no gradient at the input.',
        choices=STARTS,
        foolbox="random_start",
    )
    best: bool = setting(
        default=False,
        help="Whether to return the misclassified point of highest objective instead of the last point, where there "
        "is one. In the paper it is the last.",
    )
    projection: str = setting(
        default="nearest",
        help='How a step that leaves the ball is taken back. ``"nearest"``: to the nearest point in ball and bounds, '
        'which in l1 makes perturbations sparse, and the attack stronger. ``"scaled"``: the perturbation is '
        "scaled down to epsilon and the point then clipped to the bounds, as in Foolbox. For linf they are the "
        "same.",
        choices=PROJECTIONS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.algorithm == "fgsm" and self.steps not in (None, 1):
            raise InvalidArgumentError("steps", self.steps, "1, or nothing, for FGSM; choose 'pgd' or 'bim' for more")
        self._set("name", f"{self.algorithm}-{self.objective}".upper())
        seeds = "generator" if self.starts_at_random else "none"
        self._set("traits", replace(type(self).traits, failure="best" if self.best else "last", seeds=seeds))

    @property
    def starts_at_random(self) -> bool:
        """True if it starts at random points of the ball."""
        if self.start is not None:
            return self.start == "random"
        return self.algorithm == "pgd" or DIVERGENCES[self.objective].compares

    def steps_for(self, threat_model: ThreatModel) -> int:
        """Return the number of steps."""
        if self.steps is not None:
            return self.steps
        number: int = {
            "pgd": 100,
            "bim": max(int(threat_model.epsilon / threat_model.width * 256 * 1.25), 1),
            "fgsm": 1,
        }[self.algorithm]
        return number

    def step_size_for(self, threat_model: ThreatModel) -> float:
        """Return the step size, in the units of the inputs."""
        if self.step_size is not None:
            return self.step_size
        if self.rel_step_size is not None:
            return self.rel_step_size * threat_model.epsilon
        if self.algorithm == "fgsm":
            return threat_model.epsilon
        return _STEP_SIZES[threat_model.norm] * threat_model.width

    def cost(self, threat_model: ThreatModel, *, classes: int) -> Cost:
        """See :meth:`Attack.cost`."""
        steps = self.steps_for(threat_model)
        return Cost(steps + DIVERGENCES[self.objective].compares + self.best, steps)

    def candidates(self, batch: Batch) -> Tensor:
        """See :meth:`NativeAttack.candidates`; an AttackRefusedError where only ``"ace"`` can aim.

        An AttackError where the target gives no gradients.
        """
        target, inputs, labels, threat_model = batch.target, batch.inputs, batch.labels, batch.threat_model
        if batch.targeted and self.objective != "ace":
            raise AttackRefusedError(
                f"{self.name}: its objective does not depend on labels; choose objective='ace', or do not aim"
            )
        streams = row_streams(len(inputs), batch.generator) if self.starts_at_random else []
        if len(inputs) == 0:
            return inputs.clone()
        objective, missing = DIVERGENCES[self.objective], AttackError(f"{self.name}: the target {NO_GRADIENTS}")
        points = random_start(inputs, threat_model, streams) if streams else inputs.clone()
        natural = query(target, inputs) if objective.compares else inputs.new_empty(0)
        back = project if self.projection == "nearest" else _scale
        total, size = self.steps_for(threat_model), self.step_size_for(threat_model)
        best = BestPoints(points, labels, loss="ce", goal=batch.goal)
        for number in range(total):
            points = points.detach().requires_grad_(True)
            with torch.enable_grad():
                logits = target.module(points)
                value = self._value(batch.goal, logits, natural, labels)
                gradient = gradient_of(value, points, missing)
            points, value = points.detach(), value.detach()
            batch.show(number, total, points, value, gradient)
            if self.best:
                best.take(points, logits.detach(), value)
            moved = points + size * _direction(gradient, threat_model.norm)
            points = back(moved, inputs, threat_model)
        if not self.best:
            return points
        logits = query(target, points)
        best.take(points, logits, self._value(batch.goal, logits, natural, labels))
        return torch.where(over_rows(best.solved, points), best.points, points)

    def pursues(self, criterion: Criterion) -> bool:
        """See :meth:`Attack.pursues`; only ``"ace"`` gives way to the margin of a criterion."""
        return super().pursues(criterion) and (not criterion.ranks or self.objective == "ace")

    def _value(self, goal: Criterion, logits: Tensor, natural: Tensor, labels: Tensor) -> Tensor:
        """Return the ascended objective at points with these logits, ``(N,)``."""
        if self.objective == "ace":
            return OBJECTIVES["ce"].of_kind(goal)(logits, labels)
        return DIVERGENCES[self.objective].value(logits, natural, labels)


def _direction(gradient: Tensor, norm: str) -> Tensor:
    """The gradient as a step of length 1 in the norm (for linf, of 1 in each value); zeros stay."""
    if norm == "linf":
        return gradient.sign()
    # No longer than 1 in l2 first, where an l1 norm neither overflows nor underflows.
    flat = l2_normalize(gradient.flatten(1))
    if norm == "l1":
        flat = flat / flat.abs().sum(1, keepdim=True).clamp_min(torch.finfo(flat.dtype).tiny)
    return flat.view(gradient.shape)


def _scale(points: Tensor, inputs: Tensor, threat_model: ThreatModel) -> Tensor:
    """Points in the ball on the lines to their inputs, clipped to the bounds."""
    if threat_model.norm == "linf":
        return project(points, inputs, threat_model)
    offsets = points - inputs
    length = torch.linalg.vector_norm(offsets.flatten(1), ord=2 if threat_model.norm == "l2" else 1, dim=1)
    factor = threat_model.epsilon / length.clamp_min(threat_model.epsilon)
    return (inputs + over_rows(factor, points) * offsets).clamp(*threat_model.bounds)
