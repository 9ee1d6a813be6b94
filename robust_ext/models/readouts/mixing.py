"""The readout of a classifier that averages softmaxes over mixes of its input with others."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.nn.functional import logsigmoid

from robust_ext.core.settings import setting, settings_class
from robust_ext.models.readouts.base import Fitted, Readout
from robust_ext.models.readouts.linear import positions, separating_directions, unit_positions


@settings_class
class Mixing(Readout):
    """One linear readout for the features of all mixes, whose softmaxes are averaged, as of Pang et al. 2020.

    It is fitted on the features of all mixes of all points. Of each mix of a row the readout gives a position, of which
    the mean over mixes is -1 at the closest inner and 0 at the closest planted point, and the probability
    ``sigmoid(steepness (position + 1/2))`` of class 1. The score is the logit of the mean probability, divided by the
    steepness; a row is class 1 exactly where it is above the threshold.
    """

    axes: ClassVar[tuple[str, ...]] = ("mixes", "F")

    C: float = setting(default=10.0, help="Weight of the losses in logistic regression.", above=0)
    steepness: float = setting(default=4.0, help="Steepness of the softmax that is averaged.", above=0)

    def fit(self, features: Tensor, planted: Tensor) -> dict[str, Tensor]:
        """``weight`` and ``anchor`` ``(B, F)``, and the divisor ``unit`` ``(B,)``, of features ``(B, n, mixes, F)``."""
        problems, points, mixes, size = features.shape
        rows = features.reshape(problems, points * mixes, size)
        weight = separating_directions(rows, planted, C=self.C, draws=mixes)
        first = features[:, 0].double().mean(1)
        along = positions(rows, weight, first).view(problems, points, mixes).mean(2)
        begin, unit = unit_positions(along, planted)
        return {"weight": weight, "anchor": first + begin[:, None] * weight, "unit": unit}

    def score(self, features: Tensor, parameters: Fitted) -> Tensor:
        """The logit of the mean probability, from logarithms, which do not saturate."""
        away = features.double() - parameters["anchor"][:, None]
        along = (away * parameters["weight"][:, None]).sum(2) / parameters["unit"][:, None]
        steep = self.steepness * (along + 0.5)
        return (logsigmoid(steep).logsumexp(1) - logsigmoid(-steep).logsumexp(1)) / self.steepness
