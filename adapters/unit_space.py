"""Attacks that take inputs in [0, 1] for granted, run where the bounds are others."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.models.rescaled import Rescaled


class UnitSpace:
    """A target and a threat model stretched to the bounds [0, 1], and the way there and back.

    Where the bounds are (0, 1) already, or it is not ``needed``, all is left as it is, without a module around it.
    """

    def __init__(self, target: Target, threat_model: ThreatModel, *, needed: bool = True) -> None:
        self.bounds = threat_model.bounds
        self.target, self.threat_model = target, threat_model
        if needed and self.bounds != (0.0, 1.0):
            self.target = replace(target, module=Rescaled(target.module, self.bounds), bounds=(0.0, 1.0))
            self.threat_model = ThreatModel(norm=threat_model.norm, epsilon=threat_model.epsilon / threat_model.width)

    def enter(self, x: Tensor) -> Tensor:
        """Points in the bounds, as points in [0, 1]."""
        if self.target.bounds == self.bounds:
            return x
        low, high = self.bounds
        return ((x - low) / (high - low)).clamp_(0, 1)

    def leave(self, candidates: Tensor, inputs: Tensor) -> Tensor:
        """Candidates in [0, 1] as candidates in the bounds; values that were not changed are exactly the inputs'."""
        if self.target.bounds == self.bounds:
            return candidates
        low, high = self.bounds
        moved = (candidates * (high - low) + low).clamp(low, high)
        return torch.where(candidates == self.enter(inputs), inputs, moved)
