"""Orthogonal and selective PGD: one of classifier and detector is attacked at a time.

Source: Bryniarski, Hingun, Pachuca, Wang, Carlini, "Evading Adversarial Example Detection Defenses with Orthogonal
Projected Gradient Descent" (2021), sections 4.1 (selective) and 4.2 (orthogonal).
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from robust_ext.attacks._common.best_tracker import Queries, Task
from robust_ext.attacks._common.detector_aware import AwareAttack, check_flag
from robust_ext.attacks._common.detector_aware_steps import STARTS, STEPS, start_of, step_along
from robust_ext.attacks._common.objectives import cross_entropy, margin, towards
from robust_ext.attacks.base import AttackTraits
from robust_ext.attacks.native import Step
from robust_ext.core.threat import NORMS
from robust_ext.core.validation import check_choice, check_integer, check_number

LOSSES = {"margin": margin, "ce": cross_entropy}
# What is left of a float32 gradient below this share of its length is rounding, and no direction.
_PARALLEL = 1e-6
# Below this share of the gradient a row has gone as far as it can without the other of the two.
_STUCK = 0.1
# Points closer to the surface of a ball than this share of epsilon lie on it.
_SURFACE = 1e-5
# Rounds in which values that would be pushed across a limit are taken out, before the rest is left to the projection.
_ROUNDS = 4


class _Alternating(AwareAttack):
    """Steps up the classifier's loss where a row is not misclassified, and down the detector's score where it is."""

    _norms: tuple[str, ...] = NORMS

    def __init__(
        self,
        *,
        steps: int = 1000,
        step_size: float = 0.1,
        restarts: int = 1,
        loss: str = "margin",
        confidence: float = 0.0,
        step: str = "l2",
        decay: bool = True,
        start: str = "random",
        samples: int = 1,
    ) -> None:
        self.steps = check_integer("steps", steps, minimum=1)
        self.step_size = check_number("step_size", step_size, minimum=0, open_minimum=True)
        self.restarts = check_integer("restarts", restarts, minimum=1)
        self.loss = check_choice("loss", loss, LOSSES)
        self.confidence = check_number("confidence", confidence, minimum=0)
        self.step = check_choice("step", step, STEPS)
        self.decay = check_flag("decay", decay)
        self.start = check_choice("start", start, STARTS)
        self.samples = check_integer("samples", samples, minimum=1)
        self.name = type(self).__name__
        self.settings = {
            "steps": self.steps,
            "step_size": self.step_size,
            "restarts": self.restarts,
            "loss": self.loss,
            "confidence": self.confidence,
            "step": self.step,
            "decay": self.decay,
            "start": self.start,
            "samples": self.samples,
        }
        self.traits = AttackTraits(
            batching="full",
            detector=True,
            failure="best",
            seeds="generator",
            norms=("linf",) if step == "sign" else self._norms,
        )

    @abstractmethod
    def direction(self, gradient: Tensor, other: Tensor, *, above: Tensor, below: Tensor, normal: Tensor) -> Tensor:
        """Where to go, ``(N, D)``.

        Args:
            gradient: Of what is to rise, ``(N, D)``.
            other: Gradient of what is not attacked now, ``(N, D)``.
            above: Values that cannot rise, bool ``(N, D)``.
            below: Values that cannot fall, bool ``(N, D)``.
            normal: Where the ball ends, ``(N, D)``; zeros inside it.
        """

    def solve(self, task: Task) -> Tensor:
        """See :meth:`AwareAttack.solve`."""
        loss = towards(LOSSES[self.loss]) if task.targeted else LOSSES[self.loss]
        queries = Queries(task, name=self.name, samples=self.samples)
        total = self.restarts * self.steps
        for restart in range(self.restarts):
            points = start_of(task, start=self.start, restart=restart)
            for number in range(self.steps):
                answer, value, of_loss, of_excess = queries.differentiate(points, loss)
                done = answer.misclassified & (answer.margin >= self.confidence)
                shape = (-1, *[1] * (points.dim() - 1))
                up = torch.where(done.view(shape), -of_excess, of_loss)
                other = torch.where(done.view(shape), of_loss, of_excess)
                above, below, normal = _limits(task, points)
                way = self.direction(up.flatten(1), other.flatten(1), above=above, below=below, normal=normal)
                way = way.view(points.shape)
                if task.watch is not None:
                    shown = torch.where(done, -answer.excess, value)
                    at = restart * self.steps + number
                    task.watch(Step(number=at, total=total, points=points, loss=shown, gradient=way))
                size = self.step_size * (1 - number / self.steps if self.decay else 1)
                points = step_along(task, points, way, size=size, kind=self.step)
            queries.judge(points)
        return queries.result()


class SelectivePGD(_Alternating):
    """Follows the classifier's gradient where a row is not misclassified, and the detector's where it is (section 4.1).

    A step that is aimed at the detector never raises its score, to first order: the published code climbs there, by a
    sign. What is kept is the misclassified point of lowest excess, a success if there was one; the one of highest
    margin where none was misclassified. Each step sends every row forward once and back twice for each of the
    ``samples``; the end of each run takes one more forward pass for each.

    Targets need a detector with gradients. For targeted attacks the labels are the classes to aim at.

    Args:
        steps: In each run, at least 1.
        step_size: Relative to epsilon: Euclidean, and for linf times the root of the number of values, or with
            ``step="sign"`` in each value.
        restarts: Runs from starts of their own.
        loss: Of the classifier: ``"margin"`` or ``"ce"``.
        confidence: Margin in logits from which a row counts as misclassified here.
        step: ``"l2"``, the gradient divided by its length (the paper's), or ``"sign"``, for linf only.
        decay: Whether the step size falls to zero over a run, linearly, so that rows settle; the paper's is constant.
        start: ``"random"`` or ``"input"``.
        samples: Calls of classifier and detector whose answers and gradients are averaged, for random ones.

    Raises:
        InvalidArgumentError: A setting is not accepted.

    Example:
        >>> SelectivePGD(steps=50)
        SelectivePGD(SelectivePGD)
    """

    def direction(self, gradient: Tensor, other: Tensor, *, above: Tensor, below: Tensor, normal: Tensor) -> Tensor:
        """The gradient itself."""
        return gradient


class OrthogonalPGD(_Alternating):
    """Selective PGD along the part of each gradient that leaves the other of the two as it is (section 4.2).

    Where a row is not misclassified it follows the classifier's gradient less its component along the detector's, and
    where it is, the detector's less its component along the classifier's. Values that would be pushed across the bounds
    (or out of an linf ball) are taken out of both first, and so is what would leave an l2 ball: the projection would
    bring the component back. Where less than a tenth is left, as the two gradients are all but parallel there, the step
    is the selective one. With ``step="sign"`` the signs are taken afterwards, and are orthogonal to nothing; the paper
    steps along the gradient.

    For linf and l2: the surface of an l1 ball has edges almost everywhere that steps end, and projections onto it bring
    components back; selective PGD does better there. Arguments, costs and what is kept are those of
    :class:`SelectivePGD`.

    Example:
        >>> OrthogonalPGD(steps=50, confidence=0.05)
        OrthogonalPGD(OrthogonalPGD)
    """

    _norms = ("linf", "l2")

    def direction(self, gradient: Tensor, other: Tensor, *, above: Tensor, below: Tensor, normal: Tensor) -> Tensor:
        """The gradient less its component along the other, over the values that can move."""
        free = torch.ones_like(above)
        for _ in range(_ROUNDS):
            way = _along_surface(gradient * free, other * free, normal * free)
            free &= ~((above & (way > 0)) | (below & (way < 0)))
        way = _along_surface(gradient * free, other * free, normal * free)
        stuck = way.norm(dim=1, keepdim=True) <= _STUCK * gradient.norm(dim=1, keepdim=True)
        return torch.where(stuck, gradient, way)


def without_component(gradient: Tensor, other: Tensor) -> Tensor:
    """Rows less their components along other rows; zeros where the two are parallel.

    Args:
        gradient: ``(N, D)``.
        other: ``(N, D)``; rows of zeros have no direction, and take nothing away.

    Returns:
        ``(N, D)``; what is left along ``other`` is a rounding of float32.
    """
    longest = other.double().abs().amax(1, keepdim=True)
    scaled = other.double() / longest.where(longest > 0, 1)
    square = scaled.square().sum(1, keepdim=True)
    size = gradient.double().abs().amax(1, keepdim=True)
    whole = gradient.double() / size.where(size > 0, 1)
    left = whole
    # Twice: the first pass leaves the rounding of what it takes away, large beside what is left of near parallels.
    for _ in range(2):
        left = left - scaled * ((left * scaled).sum(1, keepdim=True) / square.where(square > 0, 1))
    parallel = left.norm(dim=1, keepdim=True) <= _PARALLEL * whole.norm(dim=1, keepdim=True)
    return left.masked_fill(parallel, 0).to(gradient.dtype)


def _along_surface(gradient: Tensor, other: Tensor, normal: Tensor) -> Tensor:
    """The gradient without its component along the other, nor one that would leave the ball."""
    way = without_component(gradient, other)
    outward = (way * normal).sum(1, keepdim=True) > 0
    return torch.where(outward, without_component(way, without_component(normal, other)), way)


def _limits(task: Task, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which values cannot rise and which cannot fall, bool ``(N, D)``, and the normal of an l2 ball's surface."""
    low, high = task.threat_model.bounds
    lowest, highest = torch.full_like(points, low), torch.full_like(points, high)
    epsilon, offset = task.threat_model.epsilon, (points - task.inputs).flatten(1)
    normal = torch.zeros_like(offset)
    if task.threat_model.norm == "linf":
        lowest, highest = (task.inputs - epsilon).clamp_min(low), (task.inputs + epsilon).clamp_max(high)
    elif task.threat_model.norm == "l2":
        outside = task.threat_model.distance(points, task.inputs) >= (1 - _SURFACE) * epsilon
        normal = offset * outside[:, None]
    return (points >= highest).flatten(1), (points <= lowest).flatten(1), normal
