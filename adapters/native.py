"""This project's own attacks on a module, as the classes for Foolbox and for ART run them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.attacks.native import NativeAttack, Watch
from robust_ext.core.target import Target, frozen
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_inputs, check_labels
from robust_ext.models.defended import Defended
from robust_ext.models.padded import PaddedClasses


def search_module(
    attack: NativeAttack,
    module: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    threat_model: ThreatModel,
    generator: torch.Generator,
    targeted: bool = False,
    watch: Watch | None = None,
    defended: Defended | None = None,
    references: Tensor | None = None,
) -> Tensor:
    """Run an attack of this project, and leave the module as it was.

    The module is asked once for the clean inputs, to learn how many classes there are. It is attacked in the mode it
    is in; where it has too few classes for the attack it is padded.

    Args:
        attack: The attack.
        module: From inputs ``(N, ...)`` to logits ``(N, K)``.
        inputs: Floating point ``(N, ...)`` in the bounds; not changed. The module gets this dtype.
        labels: Integers ``(N,)`` below K: true classes, or the classes to aim at.
        threat_model: The norm, epsilon and bounds.
        generator: CPU generator, the attack's only source of randomness.
        targeted: Whether to aim at the labels.
        watch: Called after each step.
        defended: The module, which is its ``classifier``, together with a detector; left as it was too.
        references: Points to imitate, ``(N, R, ...)``, see :func:`robust_ext.adapters.aware.check_references`.

    Returns:
        Candidates ``(N, ...)`` in the dtype of the inputs.

    Raises:
        AttackRefusedError: The attack does not work for this norm, or without a detector or references.
        InvalidArgumentError: Inputs or labels are not as stated.
    """
    attack.check(threat_model=threat_model, detector=defended is not None)
    dtype = inputs.dtype
    x = check_inputs("inputs", inputs, bounds=threat_model.bounds).clone()
    subject = module if dtype == torch.float32 else _OfType(module, dtype)
    with frozen(module if defended is None else defended):
        with torch.no_grad():
            classes = subject(x).shape[1]
        y = check_labels("labels", labels, samples=len(x), classes=classes).to(x.device)
        target = Target(
            module=subject,
            bounds=threat_model.bounds,
            classes=classes,
            input_shape=tuple(x.shape[1:]),
            device=x.device,
            defended=defended,
            references=references,
        )
        if classes < attack.traits.minimum_classes:
            classes = attack.traits.minimum_classes
            target = replace(target, module=PaddedClasses(subject, classes=classes), classes=classes)
        candidates = attack.search(
            target,
            x,
            y,
            threat_model=threat_model,
            generator=generator,
            targeted=targeted,
            watch=watch,
        )
    return candidates.to(dtype).clamp_(*threat_model.bounds)


class _OfType(nn.Module):
    """A module of another floating point type, for attacks that work in float32."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = module
        self.dtype = dtype
        self.training = module.training

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.module(x.to(self.dtype))
        return logits.float()


class Started(NativeAttack):
    """An attack that begins at the starting points of its target, given those of a batch.

    Args:
        attack: The attack.
        points: What it is given; None for none.
    """

    def __init__(self, attack: Any, points: Tensor | None) -> None:
        self.name, self.traits = attack.name, attack.traits
        self._attack, self._points = attack, points

    def search(self, *args: Any, **ways: Any) -> Tensor:
        """See :meth:`NativeAttack.search`."""
        target, *others = args
        found: Tensor = self._attack.search(replace(target, starting_points=self._points), *others, **ways)
        return found
