"""The readout of a classifier by prototypes: the nearer of two centres in feature space."""

from __future__ import annotations

import torch
from torch import Tensor

from robust_ext.core.settings import settings_class
from robust_ext.models.readouts.base import Fitted
from robust_ext.models.readouts.linear import Logistic


@settings_class
class Prototypes(Logistic):
    """The nearer of two centres, as of Pang et al. 2020 (MMC): logits are ``-||features - centre||^2`` a class.

    The first centre is the mean of the inner points; the second lies from it along the direction of logistic
    regression, so far that the boundary is half way. A row is class 1 exactly where its position along the direction is
    above the threshold, as with a linear readout; but logits also fall where features leave both centres, so that an
    attack which goes away from its own centre need not come nearer to the other. They are in units in which their
    difference is that of a linear readout.
    """

    def fit(self, features: Tensor, planted: Tensor) -> dict[str, Tensor]:
        """Fit a linear readout, and ``centre`` ``(B, F)`` of the inner points."""
        return {**super().fit(features, planted), "centre": features[:, ~planted].double().mean(1)}

    def logits(self, features: Tensor, parameters: Fitted, threshold: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        """Negative squared distances from the two centres."""
        centre = parameters["centre"]
        half = threshold - self.score(centre, parameters)
        half = half.clamp_min(torch.finfo(torch.float64).tiny)
        own = (features.double() - centre).square().sum(1)
        # The squared distance from centre + 2 half weight, without the rounding of a second sum of squares.
        other = own - 4 * half * (self.score(features, parameters) - threshold)
        return -(scale / (2 * half))[:, None] * torch.stack([own, other], 1)
