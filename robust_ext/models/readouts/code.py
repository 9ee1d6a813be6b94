"""The readout of an error-correcting output code: one linear readout a bit, and the decoder."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from robust_ext.core.settings import setting, settings_class
from robust_ext.models.readouts.base import Fitted, Readout
from robust_ext.models.readouts.linear import fit_members, member_positions

# What the decoder of Verma and Swami adds before it takes the logarithm.
_FLOOR = 1e-6


@settings_class
class Code(Readout):
    """One linear readout a bit, for codes as of Verma and Swami 2019: the planted class has all bits +1, the other -1.

    A bit is ``tanh(o)`` with ``o`` of ``steepness`` at the planted point that is closest to inner ones, and of
    ``-steepness`` at the closest inner point. A row is class 1 exactly where the sum of its bits, the correlation with
    the planted class's word, is above the threshold.
    """

    axes: ClassVar[tuple[str, ...]] = ("bits", "F")

    C: float = setting(default=10.0, help="Weight of the losses in logistic regression.", above=0)
    steepness: float = setting(
        default=1.0, help="Steepness of the tanh: at the planted point each bit is ``tanh(steepness)``.", above=0
    )
    decoder: str = setting(
        default="log",
        help='``"log"``: logits ``log(max(c, 0) + 1e-6)`` for the correlation c with each word, beyond the boundary, '
        'as of the published decoder, so that the logit of the word that loses is constant. ``"linear"``: c itself, '
        "in the range of the network's logits.",
        choices=("log", "linear"),
    )

    def fit(self, features: Tensor, planted: Tensor) -> dict[str, Tensor]:
        """Fit to features ``(B, n, bits, F)``; see :func:`~robust_ext.models.readouts.linear.fit_members`."""
        return fit_members(features, planted, C=self.C)

    def score(self, features: Tensor, parameters: Fitted) -> Tensor:
        """The sum of the bits."""
        return torch.tanh(self.steepness * (2 * member_positions(features, parameters) + 1)).sum(1)

    def logits(self, features: Tensor, parameters: Fitted, threshold: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        """Return the decoder's logits."""
        if self.decoder == "linear":
            return super().logits(features, parameters, threshold, scale, offset)
        beyond = self.score(features, parameters) - threshold
        return (torch.stack([-beyond, beyond], 1).clamp_min(0) + _FLOOR).log()
