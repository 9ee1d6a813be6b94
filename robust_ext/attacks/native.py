"""Shared parts of this project's attacks; their Foolbox and ART classes are thin shells around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from robust_ext.attacks.base import Attack
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


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The rows to attack and how; the fields are the arguments of :meth:`NativeAttack.search`."""

    target: Target
    inputs: Tensor
    labels: Tensor
    threat_model: ThreatModel
    generator: torch.Generator
    targeted: bool = False
    watch: Watch | None = None


class NativeAttack(Settings, Attack):
    """An attack of this project, declared once: its settings are fields, each made by :func:`setting`.

    A subclass is a :func:`robust_ext.core.settings.settings_class` with ``name`` and ``traits`` and one method,
    :meth:`candidates`, or :meth:`search` itself. Where name or traits depend on settings, its ``__post_init__`` sets
    them. The Foolbox and ART classes, the command line's names and the documentation are made from the declaration.

    Attributes:
        aims: Whether it can aim at a class.
        stops_at_epsilon: Of attacks for the smallest perturbation: whether a row is finished within epsilon.
        takes_starting_points: Whether it also begins at the target's starting points, where there are some.
    """

    aims: ClassVar[bool] = True
    stops_at_epsilon: ClassVar[bool] = False
    takes_starting_points: ClassVar[bool] = False

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
        batch = Batch(
            target=target,
            inputs=inputs,
            labels=labels,
            threat_model=threat_model,
            generator=generator,
            targeted=targeted,
            watch=watch,
        )
        return self.candidates(batch)

    def candidates(self, batch: Batch) -> Tensor:
        """One candidate for each input of the batch, ``(N, ...)``."""
        raise NotImplementedError(f"{type(self).__name__} has to define candidates or search")
