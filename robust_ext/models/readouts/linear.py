"""Linear readouts: the position along one direction in feature space."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from robust_ext.core.settings import setting, settings_class
from robust_ext.models.readouts.base import Readout
from robust_ext.models.readouts.solver import fit_directions


class Linear(Readout):
    """``score = (features - anchor) . weight`` with unit ``weight`` ``(B, F)``.

    ``anchor`` ``(B, F)`` is where the closest planted point lies along the direction from the clean sample: the readout
    holds its position along the direction, and no more of it.
    """

    axes: ClassVar[tuple[str, ...]] = ("F",)

    @abstractmethod
    def directions(self, features: Tensor, planted: Tensor) -> Tensor:
        """Unit directions, float64 ``(B, F)``, from inner to planted points; ``features`` ``(B, n, F)``."""

    def fit(self, features: Tensor, planted: Tensor) -> dict[str, Tensor]:
        """``weight`` and ``anchor``, which is the clean sample until :meth:`anchored`; ``features`` ``(B, n, F)``."""
        return {"weight": self.directions(features, planted), "anchor": features[:, 0].double()}

    def score(self, features: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """The position along the direction, from the anchor."""
        return ((features.double() - parameters["anchor"]) * parameters["weight"]).sum(1)

    def scores(self, features: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """The same of the features ``(B, n, F)`` of B problems, as a product of matrices."""
        return positions(features, parameters["weight"], parameters["anchor"])

    def anchored(self, parameters: dict[str, Tensor], edge: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The anchor at the closest planted point, whose score is 0 then."""
        weight = parameters["weight"]
        return {**parameters, "anchor": parameters["anchor"] + edge[:, None] * weight}, edge * 0


@settings_class
class Logistic(Linear):
    """Logistic regression (section 3.1 and appendix A.2)."""

    C: float = setting(
        default=10.0,
        help="Weight of the losses, see :func:`robust_ext.models.readouts.fit_directions`; raised for the "
        "problems that it keeps from being separated.",
        above=0,
    )

    def directions(self, features: Tensor, planted: Tensor) -> Tensor:
        """Those of logistic regression."""
        return separating_directions(features, planted, C=self.C)


@settings_class
class MaxMargin(Linear):
    """The maximum margin."""

    def directions(self, features: Tensor, planted: Tensor) -> Tensor:
        """Those of the maximum margin."""
        return fit_directions(features, planted, kind="max-margin").weight


def positions(features: Tensor, weight: Tensor, anchor: Tensor) -> Tensor:
    """Positions of features ``(B, n, F)`` along directions ``(B, F)``, float64 ``(B, n)``, from anchors ``(B, F)``."""
    return ((features.double() - anchor[:, None]) @ weight[:, :, None]).squeeze(2)


def separating_directions(features: Tensor, planted: Tensor, *, C: float, draws: int = 1) -> Tensor:
    """Directions ``(B, F)``; where the penalty keeps one from separating what can be separated, it is lowered.

    Every ``draws`` rows in turn belong to one point, whose position is their mean.
    """
    points, planted = planted, planted.repeat_interleave(draws)
    direction = fit_directions(features, planted, C=C).weight
    for factor in (1e3, 1e6):
        along = positions(features, direction, features[:, 0].double()).view(len(features), -1, draws).mean(2)
        mixed = along[:, points].min(1).values <= along[:, ~points].max(1).values
        if not bool(mixed.any()):
            break
        direction[mixed] = fit_directions(features[mixed], planted, C=C * factor).weight
    return direction


def unit_positions(along: Tensor, planted: Tensor) -> tuple[Tensor, Tensor]:
    """What to subtract from positions ``(B, n)`` and then to divide them by, float64 ``(B,)`` each.

    After that the closest planted point is at 0 and the closest inner one at -1. Where these overlap, the divisor is
    the standard deviation of all of them, or 1 where that is 0.
    """
    begin = along[:, planted].amin(1)
    gap = begin - along[:, ~planted].amax(1)
    spread = along.std(1, correction=0)
    return begin, torch.where(gap > 0, gap, torch.where(spread > 0, spread, torch.where(spread.isnan(), spread, 1.0)))


def fit_members(features: Tensor, planted: Tensor, *, C: float) -> dict[str, Tensor]:
    """One linear readout for each of K members with features ``(B, n, K, F)``, see :func:`member_positions`.

    Directions ``weight`` and origins ``anchor`` are ``(B, K, F)``, divisors ``unit`` ``(B, K)``.
    """
    problems, _, members, size = features.shape
    # (B K, n, F): every member of every problem is a problem of its own.
    rows = features.transpose(1, 2).flatten(0, 1)
    weight = separating_directions(rows, planted, C=C)
    first = rows[:, 0].double()
    begin, unit = unit_positions(positions(rows, weight, first), planted)
    found = {"weight": weight, "anchor": first + begin[:, None] * weight}
    shaped = {name: part.view(problems, members, size) for name, part in found.items()}
    return {**shaped, "unit": unit.view(problems, members)}


def member_positions(features: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """Positions ``(M, K)`` of the features ``(M, K, F)`` of members, see :func:`unit_positions`."""
    along = ((features.double() - parameters["anchor"]) * parameters["weight"]).sum(2)
    return along / parameters["unit"]
