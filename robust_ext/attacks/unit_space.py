"""Attacks whose settings are those of inputs in [0, 1], run where the bounds are others."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from robust_ext.attacks.base import Attack
from robust_ext.core.cost import Cost
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.models.normalized import Rescaled


class UnitSpace:
    """A target and a threat model stretched to the bounds [0, 1], and the way there and back.

    Where the bounds are (0, 1) already, or it is not ``needed``, all is left as it is, without a module around it.
    """

    def __init__(self, target: Target, threat_model: ThreatModel, *, needed: bool = True) -> None:
        self.bounds = threat_model.bounds
        self.target, self.threat_model = target, threat_model
        if needed and self.bounds != (0.0, 1.0):
            points = (target.starting_points, target.references)
            starts, references = (None if one is None else self._stretched(one) for one in points)
            module = Rescaled(target.module, self.bounds)
            self.target = replace(
                target, module=module, bounds=(0.0, 1.0), starting_points=starts, references=references
            )
            self.threat_model = ThreatModel(norm=threat_model.norm, epsilon=threat_model.epsilon / threat_model.width)

    def enter(self, x: Tensor) -> Tensor:
        """Points in the bounds, as points in [0, 1]."""
        if self.target.bounds == self.bounds:
            return x
        return self._stretched(x)

    def leave(self, candidates: Tensor, inputs: Tensor) -> Tensor:
        """Candidates in [0, 1] as candidates in the bounds; values that were not changed are exactly the inputs'."""
        if self.target.bounds == self.bounds:
            return candidates
        low, high = self.bounds
        moved = (candidates * (high - low) + low).clamp(low, high)
        return torch.where(candidates == self.enter(inputs), inputs, moved)

    def _stretched(self, x: Tensor) -> Tensor:
        low, high = self.bounds
        return ((x - low) / (high - low)).clamp_(0, 1)


class UnitSpaceAttack(Attack):
    """An attack on classifiers with settings for inputs in [0, 1], run in the target's bounds.

    Example:
        >>> from robust_ext.attacks.apgd import APGD
        >>> UnitSpaceAttack(APGD()).description
        "APGD(steps=100, ...), settings for inputs in [0, 1]"
    """

    def __init__(self, attack: Attack) -> None:
        self.attack, self.name, self.traits, self.code_text = attack, attack.name, attack.traits, attack.code_text

    @property
    def description(self) -> str:
        """The attack's, and what its settings are for."""
        return f"{self.attack.description}, settings for inputs in [0, 1]"

    def refusal(self, *, threat_model: ThreatModel, detector: bool = False) -> str | None:
        """The attack's."""
        return self.attack.refusal(threat_model=threat_model, detector=detector)

    def cost(self, threat_model: ThreatModel, *, classes: int) -> Cost | None:
        """The attack's."""
        epsilon = threat_model.epsilon / threat_model.width
        return self.attack.cost(ThreatModel(norm=threat_model.norm, epsilon=epsilon), classes=classes)

    def search(
        self,
        target: Target,
        inputs: Tensor,
        labels: Tensor,
        *,
        threat_model: ThreatModel,
        generator: torch.Generator,
    ) -> Tensor:
        """Run the attack on the stretched target, see :meth:`Attack.search`."""
        space = UnitSpace(target, threat_model)
        found = self.attack.search(
            space.target, space.enter(inputs), labels, threat_model=space.threat_model, generator=generator
        )
        return space.leave(found, inputs)
