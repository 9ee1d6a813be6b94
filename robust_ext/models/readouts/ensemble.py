"""The readout of an ensemble: one linear readout a member, and the vote."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from robust_ext.core.settings import setting, settings_class
from robust_ext.models.readouts.base import Fitted, Readout
from robust_ext.models.readouts.linear import fit_members, member_positions


@settings_class
class Ensemble(Readout):
    """One linear readout for each member of an ensemble, as in the public code's test of EMPIR.

    A row is class 1 exactly where more than half of the members' positions are above the threshold: the score is their
    median, of an even number of members the lower one. A member's position is 0 at the planted point that is closest to
    inner ones and -1 at the closest inner point.
    """

    axes: ClassVar[tuple[str, ...]] = ("members", "F")

    C: float = setting(default=10.0, help="Weight of the losses in logistic regression.", above=0)
    combine: str = setting(
        default="vote",
        help='``"vote"``: the majority decides, and the logits are the mean of those of the members that agree with '
        'it. ``"mean"``: the mean of the members\' positions decides, and the logits are the mean of all.',
        choices=("vote", "mean"),
    )

    def fit(self, features: Tensor, planted: Tensor) -> dict[str, Tensor]:
        """Fit to features ``(B, n, members, F)``; see :func:`~robust_ext.models.readouts.linear.fit_members`."""
        return fit_members(features, planted, C=self.C)

    def score(self, features: Tensor, parameters: Fitted) -> Tensor:
        """The median or the mean of the members' positions."""
        along = member_positions(features, parameters)
        return along.mean(1) if self.combine == "mean" else along.median(1).values

    def logits(self, features: Tensor, parameters: Fitted, threshold: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        """The mean of the logits of members that agree with the vote, or of all."""
        along = member_positions(features, parameters) - threshold[:, None]
        if self.combine == "mean":
            signed = scale * along.mean(1)
        else:
            votes = along > 0
            won = 2 * votes.sum(1, keepdim=True) > along.shape[1]
            signed = scale * torch.where(votes == won, along, 0.0).sum(1) / (votes == won).sum(1)
        return torch.stack([offset - signed, offset + signed], 1)
