"""Targets, criteria and starting points in a form that Foolbox's attacks do not fail on.

An attack that starts at adversarial points raises for the whole batch as soon as one sample has no start, and some
divide by the distance between a start and its input, which is zero for a misclassified sample. Every query is the full
batch, so such a sample cannot be left out. It is excused instead: the attack gets a solvable problem in its place, to
leave a ball, and its result is not used.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.adapters.foolbox.library import foolbox

_MinimizationAttack: Any = foolbox.attacks.base.MinimizationAttack
_Misclassification: Any = foolbox.criteria.Misclassification
# EagerPy comes with Foolbox; its tensors are what attacks hand to criteria.
_as_eager = foolbox.models.base.ep.astensor
_where = foolbox.models.base.ep.where

# exp(80) times thousands of classes is still a float32.
_HIGHEST = 80.0
# So large a gradient makes the step of NewtonFool negligible; other attacks take the direction only.
_STEEP = 1e6


class LowLogits(nn.Module):
    """Logits ``(N, K)``, shifted sample by sample so that none is above 80; where none is, they are left as they are.

    GenAttack takes the exponential of logits as they come, which overflows above 88.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.training = module, module.training

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(N, K)``."""
        logits: Tensor = self.module(x)
        return logits - (logits.amax(1, keepdim=True) - _HIGHEST).clamp_min(0)


class NeverFlat(nn.Module):
    """A module whose gradient at the input vanishes in no sample, for attacks that divide by its size.

    A sample whose gradient vanishes gets a large one in all values alike; others are left as they are. It has vanished
    where its size to the (even) ``power`` is zero, in its own type.
    """

    def __init__(self, module: nn.Module, *, power: int) -> None:
        super().__init__()
        self.module, self.power, self.training = module, power, module.training

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(N, K)``."""
        if x.requires_grad:
            # A hook on the caller's own tensor would stay on it.
            x = x.view_as(x)
            x.register_hook(self._steepen)  # type: ignore[no-untyped-call]
        out: Tensor = self.module(x)
        return out

    def _steepen(self, gradient: Tensor) -> Tensor:
        size = gradient.flatten(1).square().sum(1) ** (self.power // 2)
        vanished = (size == 0).view(-1, *[1] * (gradient.dim() - 1))
        return torch.where(vanished, _STEEP, gradient)


class Misclassified(_Misclassification):  # type: ignore[misc]
    """Foolbox's criterion, but for the samples in ``excused``, which only have to leave a ball around their input.

    ``excused``, bool ``(N,)``, are the samples whose result is not to be used; ``unstarted`` those of them for which no
    start was found.
    """

    def __init__(self, labels: Any, *, inputs: Any, bounds: tuple[float, float]) -> None:
        super().__init__(labels)
        self.inputs = _as_eager(inputs)
        low, high = bounds
        # The corner of the box farthest from the input, at least half the width away in every value.
        lower = self.inputs < (low + high) / 2
        self.corner = _where(lower, self.inputs.full_like(high), self.inputs.full_like(low))
        self.radius = (high - low) / 4 * math.prod(self.inputs.shape[1:]) ** 0.5
        self.excused = self.labels != self.labels
        self.unstarted = self.excused

    def __call__(self, perturbed: Any, outputs: Any) -> Any:
        """Return a mask of adversarial ``perturbed`` ``(N, ...)``, bool ``(N,)``, of the argument's kind."""
        adversarial = super().__call__(perturbed, outputs)
        if not bool(self.excused.any()):
            return adversarial
        distance = (_as_eager(perturbed) - self.inputs).flatten(1).norms.l2(axis=1)
        judged = _where(self.excused, distance > self.radius, _as_eager(adversarial))
        return judged if adversarial is _as_eager(adversarial) else judged.raw


class Anything(_Misclassification):  # type: ignore[misc]
    """Foolbox's criterion, met by every point: what is adversarial is checked afterwards."""

    def __call__(self, perturbed: Any, outputs: Any) -> Any:
        """Return True for each sample, bool ``(N,)``, of the argument's kind."""
        wrong = super().__call__(perturbed, outputs)
        return wrong == wrong


class _Start(_MinimizationAttack):  # type: ignore[misc]
    """Another attack's starting points, with a start of their own for samples that have none or are wrong already."""

    distance = foolbox.distances.l2

    def __init__(self, attack: Any) -> None:
        self.attack = attack

    def run(self, model: Any, inputs: Any, criterion: Misclassified, **settings: Any) -> Any:
        points = _as_eager(self.attack.run(model, inputs, criterion, **settings))
        x = _as_eager(inputs)
        failed = _as_eager(criterion(points, model(points))).logical_not()
        # A start at the input is one that was adversarial already.
        trivial = (points == x).flatten(1).all(1)
        criterion.unstarted = criterion.unstarted.logical_or(failed)
        criterion.excused = criterion.excused.logical_or(failed).logical_or(trivial)
        excused = criterion.excused.reshape((-1, *[1] * (x.ndim - 1)))
        return _where(excused, criterion.corner, points)


def needs_start(attack: Any, start: tuple[str, Any] | None) -> bool:
    """Return whether an attack starts with another one, by default or by its settings."""
    return start is not None or getattr(attack, "init_attack", None) is not None


def with_start(attack: Any, start: tuple[str, Any] | None) -> Any:
    """Copy an attack, possibly repeated, so that it tolerates samples without a start; needs :class:`Misclassified`.

    ``start`` is class and settings of the attack it starts with by default.
    """
    changed = copy.copy(attack)
    if isinstance(attack, foolbox.attacks.base.Repeated):
        changed.attack = with_start(attack.attack, start)
        return changed
    first = attack.init_attack
    if first is None and start is not None:
        first = getattr(foolbox.attacks, start[0])(**start[1])
    changed.init_attack = _Start(first)
    return changed
