"""Gradient ascent on the objectives of MEAD with steps of one size: PGD, BIM and FGSM as detectors are judged by.

Source: Granese et al., "MEAD: A Multi-Armed Approach for Evaluation of Adversarial Examples Detectors" (2022), sections
2.2 and 3. Where APGD looks for misclassified points as well as it can, these are the plain climbs of the paper, which
differ in where they end, and so in what a detector sees.
"""

from __future__ import annotations

import torch
from torch import Tensor

from robust_ext.attacks._common.apgd_steps import unit
from robust_ext.attacks._common.divergences import find_divergence
from robust_ext.attacks._common.projections import project
from robust_ext.attacks.base import AttackTraits, draw_seed
from robust_ext.attacks.native import NativeAttack, Step, Watch
from robust_ext.core.errors import AttackError, AttackRefusedError, InvalidArgumentError
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_choice, check_integer, check_number

ALGORITHMS = ("pgd", "bim", "fgsm")
STARTS = ("random", "input")
PROJECTIONS = ("nearest", "scaled")

# The paper's, for inputs in [0, 1].
_STEP_SIZES = {"linf": 0.01, "l2": 0.1, "l1": 4.0}


class ObjectivePGD(NativeAttack):
    """Climbs an objective by steps of one size, kept in ball and bounds, and returns where it ends.

    Steps are along the sign of the gradient for linf, and along the gradient divided by its own norm for l2 and l1. For
    l1 the gradient is thus spread over all values, as in Foolbox 3.3.4 and in ART before 1.9; newer versions of ART
    move few values at a time. A row without a gradient stays.

    Every step sends the whole batch, in row order, forward and back once. ``"kl"`` and ``"fisher-rao"`` take one more
    forward pass, for the inputs; ``best=True`` one more, for where the climb ends.

    Each row draws one seed from the generator, in order, and its start from that seed. For targeted attacks, which only
    ``"ace"`` has a meaning for, the labels are the classes to aim at, and the objective is lowered.

    Args:
        objective: ``"ace"``, ``"kl"``, ``"gini"`` or ``"fisher-rao"``.
        algorithm: What the settings below are where they are left out. ``"pgd"``: 100 steps from a random start.
            ``"bim"``: ``int(320 epsilon)`` steps, at least 1, from the input. ``"fgsm"``: one step of epsilon from the
            input.
        steps: At least 1.
        step_size: In the units of the inputs, above 0. Left out, for PGD and BIM: .01 for linf, .1 for l2 and 4 for
            l1. These, and the steps of BIM, are for bounds (0, 1), and follow the width of others.
        start: ``"random"``, uniform in the ball and clipped to the bounds, or ``"input"``. Left out, ``"kl"`` and
            ``"fisher-rao"`` start at random with every algorithm: they have no gradient at the input.
        best: Whether to return the misclassified point of highest objective instead of the last point, where there is
            one. In the paper it is the last.
        projection: How a step that leaves the ball is taken back. ``"nearest"``: to the nearest point in ball and
            bounds, which in l1 makes perturbations sparse, and the attack stronger. ``"scaled"``: the perturbation is
            scaled down to epsilon and the point then clipped to the bounds, as in Foolbox. For linf they are the same.

    Raises:
        InvalidArgumentError: A setting is not accepted.

    Example:
        >>> ObjectivePGD(objective="kl", algorithm="bim").name
        'BIM-KL'
    """

    def __init__(
        self,
        *,
        objective: str = "ace",
        algorithm: str = "pgd",
        steps: int | None = None,
        step_size: float | None = None,
        start: str | None = None,
        best: bool = False,
        projection: str = "nearest",
    ) -> None:
        self.objective, self._divergence = objective, find_divergence(objective)
        self.algorithm = check_choice("algorithm", algorithm, ALGORITHMS)
        self.steps = None if steps is None else check_integer("steps", steps, minimum=1)
        if algorithm == "fgsm" and self.steps not in (None, 1):
            raise InvalidArgumentError("steps", steps, "1, or nothing, for FGSM; choose 'pgd' or 'bim' for more")
        self.step_size = (
            None if step_size is None else check_number("step_size", step_size, minimum=0, open_minimum=True)
        )
        own = "random" if algorithm == "pgd" or self._divergence.compares else "input"
        self.start = own if start is None else check_choice("start", start, STARTS)
        if not isinstance(best, bool):
            raise InvalidArgumentError("best", best, "True or False")
        self.best = best
        self.projection = check_choice("projection", projection, PROJECTIONS)
        self.name = f"{algorithm}-{objective}".upper()
        self.traits = AttackTraits(
            batching="full",
            failure="best" if best else "last",
            seeds="generator" if self.start == "random" else "none",
        )

    @property
    def description(self) -> str:
        """All settings."""
        names = ("objective", "algorithm", "steps", "step_size", "start", "best", "projection")
        return "ObjectivePGD(" + ", ".join(f"{name}={getattr(self, name)!r}" for name in names) + ")"

    def steps_for(self, threat_model: ThreatModel) -> int:
        """How many steps it takes."""
        if self.steps is not None:
            return self.steps
        number: int = {
            "pgd": 100,
            "bim": max(int(threat_model.epsilon / threat_model.width * 256 * 1.25), 1),
            "fgsm": 1,
        }[self.algorithm]
        return number

    def step_size_for(self, threat_model: ThreatModel) -> float:
        """How large they are, in the units of the inputs."""
        if self.step_size is not None:
            return self.step_size
        if self.algorithm == "fgsm":
            return threat_model.epsilon
        return _STEP_SIZES[threat_model.norm] * threat_model.width

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
        """Return one candidate for each input, see :meth:`NativeAttack.search`.

        Raises:
            AttackRefusedError: It is targeted, and the objective does not look at labels.
            AttackError: The target gives no gradients.
        """
        if targeted and self.objective != "ace":
            raise AttackRefusedError(
                f"{self.name}: its objective knows no labels to aim at; choose objective='ace', or do not aim"
            )
        seeds = [draw_seed(generator) for _ in range(len(inputs))] if self.start == "random" else []
        if len(inputs) == 0:
            return inputs.clone()
        points = _random_start(inputs, threat_model, seeds) if seeds else inputs.clone()
        natural = _ask(target, inputs) if self._divergence.compares else inputs.new_empty(0)
        sign = -1 if targeted else 1
        total, size = self.steps_for(threat_model), self.step_size_for(threat_model)
        back = project if self.projection == "nearest" else _scale
        best = _Best(points, labels, targeted=targeted)
        for number in range(total):
            points = points.detach().requires_grad_(True)
            with torch.enable_grad():
                logits = target.module(points)
                value = sign * self._divergence.value(logits, natural, labels)
                gradient = _gradient(value, points, name=self.name)
            points, value = points.detach(), value.detach()
            if watch is not None:
                watch(Step(number=number, total=total, points=points, loss=value, gradient=gradient))
            if self.best:
                best.update(points, value, logits.detach())
            moved = points + size * _direction(gradient, threat_model.norm)
            points = back(moved, inputs, threat_model)
        if not self.best:
            return points
        logits = _ask(target, points)
        best.update(points, sign * self._divergence.value(logits, natural, labels), logits)
        return best.or_else(points)


class _Best:
    """The misclassified point of highest value of each row."""

    def __init__(self, points: Tensor, labels: Tensor, *, targeted: bool) -> None:
        self._points, self._labels, self._targeted = points, labels, targeted
        self._value = points.new_full((len(points),), -torch.inf)

    def update(self, points: Tensor, value: Tensor, logits: Tensor) -> None:
        """Take over the points that are better; answers that are not finite decide nothing."""
        wanted = (logits.argmax(1) == self._labels) == self._targeted
        better = wanted & torch.isfinite(logits).all(1) & (value > self._value)
        self._points = torch.where(_over(better, points), points, self._points)
        self._value = torch.where(better, value, self._value)

    def or_else(self, points: Tensor) -> Tensor:
        """The best points, and these where there is none."""
        return torch.where(_over(self._value > -torch.inf, points), self._points, points)


def _random_start(inputs: Tensor, threat_model: ThreatModel, seeds: list[int]) -> Tensor:
    streams = (torch.Generator().manual_seed(seed) for seed in seeds)
    drawn = [threat_model.sample_inner(row, 1, generator=stream) for row, stream in zip(inputs, streams, strict=True)]
    return torch.cat(drawn)


def _ask(target: Target, points: Tensor) -> Tensor:
    with torch.no_grad():
        # A copy, as a module may work on its input in place.
        logits: Tensor = target.module(points.clone())
    return logits


def _gradient(value: Tensor, points: Tensor, *, name: str) -> Tensor:
    gradient = None
    if value.requires_grad:
        (gradient,) = torch.autograd.grad(value.sum(), points, allow_unused=True)
    if gradient is None:
        raise AttackError(
            f"{name}: the target gives no gradients; attack it through a differentiable approximation (BPDA), or "
            "choose an attack without gradients"
        )
    return gradient.nan_to_num(nan=0.0)


def _direction(gradient: Tensor, norm: str) -> Tensor:
    """The gradient as a step of length 1 in the norm (for linf, of 1 in each value); zeros stay."""
    if norm == "linf":
        return gradient.sign()
    # No longer than 1 in l2 first, where an l1 norm neither overflows nor underflows.
    flat = unit(gradient.flatten(1))
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
    return (inputs + _over(factor, points) * offsets).clamp(*threat_model.bounds)


def _over(values: Tensor, points: Tensor) -> Tensor:
    """Values ``(N,)`` in a shape that broadcasts over the points."""
    return values.view(-1, *[1] * (points.dim() - 1))
