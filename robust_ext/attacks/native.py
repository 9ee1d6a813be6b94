"""Shared parts of this project's attacks; their Foolbox and ART classes are thin shells around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import ClassVar, TypedDict

import torch
from torch import Tensor
from typing_extensions import Required

from robust_ext.attacks.base import Attack
from robust_ext.attacks.limited import View, search_limited
from robust_ext.core.criteria import Criterion, aimed
from robust_ext.core.errors import AttackRefusedError
from robust_ext.core.random import stream
from robust_ext.core.settings import Settings
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel


@dataclass(frozen=True)
class Step:
    """A report of an attack after a step.

    Args:
        number: Of the step, from 0; runs on over restarts.
        total: How many steps there will be.
        points: Where the rows are, ``(N, ...)``.
        loss: What the attack maximises there, ``(N,)``.
        gradient: Of that loss, ``(N, ...)``; None for attacks without gradients.
    """

    number: int
    total: int
    points: Tensor
    loss: Tensor
    gradient: Tensor | None = None


Watch = Callable[[Step], None]


class SearchOptions(TypedDict, total=False):
    """The keywords of :meth:`NativeAttack.search`."""

    threat_model: Required[ThreatModel]
    generator: torch.Generator
    targeted: bool
    watch: Watch | None


@dataclass(frozen=True)
class Batch:
    """The rows to attack and how; the fields are the arguments of :meth:`NativeAttack.search`."""

    target: Target
    inputs: Tensor
    labels: Tensor
    threat_model: ThreatModel
    generator: torch.Generator = field(default_factory=partial(stream, 0))  # That of seed 0 when left out.
    targeted: bool = False
    watch: Watch | None = None

    def __post_init__(self) -> None:
        if self.target.criterion.aims:
            object.__setattr__(self, "targeted", True)

    @property
    def goal(self) -> Criterion:
        """When a point is adversarial."""
        return aimed(self.target.criterion) if self.targeted else self.target.criterion

    def show(self, number: int, total: int, points: Tensor, loss: Tensor, gradient: Tensor | None = None) -> None:
        """Report a :class:`Step`."""
        if self.watch is not None:
            self.watch(Step(number, total, points, loss, gradient))


class NativeAttack(Settings, Attack):
    """An attack of this project, declared once: its settings are fields, each made by :func:`setting`.

    A subclass is a :func:`robust_ext.core.settings.settings_class` with ``name`` and ``traits`` and one method,
    :meth:`candidates`, or :meth:`search` itself. Where name or traits depend on settings, its ``__post_init__`` sets
    them. The Foolbox and ART classes, the command line's names and the documentation are made from the declaration.

    Attributes:
        aims: Whether it can aim at a class.
        ranks: Whether it can maximise the margin of any criterion, see :mod:`robust_ext.core.criteria`.
        stops_at_epsilon: Of attacks for the smallest perturbation: whether a row is finished within epsilon.
        takes_starting_points: Whether it also begins at the target's starting points, where there are some.
    """

    aims: ClassVar[bool] = True
    ranks: ClassVar[bool] = False
    stops_at_epsilon: ClassVar[bool] = False
    takes_starting_points: ClassVar[bool] = False
    limits_entries = True

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
        """Return one candidate for each input; see :meth:`Attack.search`.

        Args:
            target: What may be queried.
            inputs: float32 ``(N, *target.input_shape)`` in bounds; not changed.
            labels: int64 ``(N,)``: the true classes, or the classes to aim at.
            threat_model: The norm, epsilon and bounds to respect.
            generator: CPU generator, the only source of randomness.
            targeted: Whether a candidate should be classified as its label instead of as anything else.
            watch: Called after each step.

        Raises:
            InvalidArgumentError: Inputs or labels are not as described.
        """
        if threat_model.plain:
            return self.candidates(Batch(target, inputs, labels, threat_model, generator, targeted, watch))
        attack = self
        if self.traits.batching == "any" and any(one.name == "stop_early" for one in fields(self)):
            # A view identifies rows by their order.
            attack = replace(self, stop_early=False)

        def search(target: Target, inputs: Tensor, labels: Tensor, scalar: ThreatModel) -> Tensor:
            seen = watch if watch is None else _inside(watch, target)
            return attack.candidates(Batch(target, inputs, labels, scalar, generator, targeted, seen))

        return search_limited(search, attack, target, inputs, labels, threat_model=threat_model, targeted=targeted)

    def pursues(self, criterion: Criterion) -> bool:
        """See :meth:`Attack.pursues`."""
        if criterion.ranks and not self.ranks:
            other = "robust_ext:APGD, robust_ext:BoundarySearch or robust_ext:Square"
            raise AttackRefusedError(f"{self.name}: cannot search for points where {criterion.words}; choose {other}")
        reason = cannot_aim(self) if criterion.aims else None
        if reason is not None:
            raise AttackRefusedError(f"{self.name}: {reason}; choose robust_ext:APGD, or misclassification")
        return True

    def candidates(self, batch: Batch) -> Tensor:
        """One candidate for each input of the batch, ``(N, ...)``."""
        raise NotImplementedError(f"{type(self).__name__} has to define candidates or search")


def cannot_aim(attack: NativeAttack) -> str | None:
    """Return why an attack with its settings cannot be targeted; None where it can."""
    objective = getattr(attack, "objective", "ace")
    if objective != "ace":
        return f"{objective!r} looks at no labels to aim at; only 'ace' does"
    return None if attack.aims else "it cannot aim at a class"


def _inside(watch: Watch, target: Target) -> Watch:
    """Report points of a view as inputs."""
    view = target.module
    return watch if not isinstance(view, View) else lambda step: watch(replace(step, points=view.leave(step.points)))
