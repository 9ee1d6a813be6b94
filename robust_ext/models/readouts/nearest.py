"""The readout by nearest neighbours: how far features are from inner points, and how far from planted ones."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from robust_ext.core.settings import setting, settings_class
from robust_ext.models.readouts.base import Fitted, Readout


@settings_class
class Nearest(Readout):
    """The mean squared distance from the k nearest inner points minus that from the nearest planted one.

    Planted points are drawn far from each other, so that one alone stands for its class. A row is class 1 exactly where
    that difference is above the threshold; with k of 1 and a threshold of 0 it is the class of the nearest point.
    Distances are squared, so that the boundary is made of planes and what lies behind the planted point is class 1 too.

    The readout holds the features of all points, also the planted ones', and shows them to attacks, as such a
    classifier shows its training data.
    """

    axes: ClassVar[tuple[str, ...]] = ("F",)

    k: int = setting(
        default=5, help="Number of inner points, or all where there are fewer.", minimum=1, maximum=1_000_000
    )

    def fit(self, features: Tensor, planted: Tensor) -> dict[str, Tensor]:
        """``inner`` ``(B, n_0, F)`` and ``planted`` ``(B, n_1, F)``, of features ``(B, n, F)``."""
        rows = features.double()
        return {"inner": rows[:, ~planted], "planted": rows[:, planted]}

    def score(self, features: Tensor, parameters: Fitted) -> Tensor:
        """The difference of mean squared distances."""
        return self._difference(features[:, None], parameters).squeeze(1)

    def scores(self, features: Tensor, parameters: Fitted) -> Tensor:
        """The same of the features ``(B, n, F)`` of B problems, one problem at a time."""
        rows = [slice(row, row + 1) for row in range(len(features))]
        found = [self._difference(features[row], {name: p[row] for name, p in parameters.items()}) for row in rows]
        return torch.cat(found) if found else features.new_zeros(features.shape[:2], dtype=torch.float64)

    def _difference(self, features: Tensor, parameters: Fitted) -> Tensor:
        rows = features.double()
        return _distance(rows, parameters["inner"], self.k) - _distance(rows, parameters["planted"], 1)


def _distance(rows: Tensor, points: Tensor, k: int) -> Tensor:
    """Mean squared distance of rows ``(B, m, F)`` from the k nearest points ``(B, n, F)``, or all, ``(B, m)``."""
    with torch.no_grad():
        far = torch.cdist(rows, points, compute_mode="donot_use_mm_for_euclid_dist")
        nearest = far.topk(min(k, points.shape[1]), dim=2, largest=False).indices
    chosen = points.gather(1, nearest.flatten(1)[:, :, None].expand(-1, -1, points.shape[2]))
    return (rows[:, :, None] - chosen.view(*nearest.shape, -1)).square().sum(3).mean(2)
