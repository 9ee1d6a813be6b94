"""This project's own attacks as Foolbox attacks, named and shortened as Foolbox does."""

from __future__ import annotations

from typing import Any

from robust_ext.adapters.foolbox.aware import (
    L1JointLossAttack,
    L1SelectivePGDAttack,
    L2JointLossAttack,
    L2OrthogonalPGDAttack,
    L2SelectivePGDAttack,
    LinfJointLossAttack,
    LinfOrthogonalPGDAttack,
    LinfSelectivePGDAttack,
)
from robust_ext.adapters.foolbox.black_box import (
    BaseSquareAttack,
    L1SquareAttack,
    L2SquareAttack,
    LinfRaySAttack,
    LinfSquareAttack,
    NativeMinimizationAttack,
)
from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.adapters.foolbox.linear_region import (
    BaseLinearRegionAttack,
    L1LinearRegionAttack,
    L2LinearRegionAttack,
    LinfLinearRegionAttack,
)
from robust_ext.adapters.foolbox.matching import (
    L1FeatureMatchingAttack,
    L1LogitMatchingAttack,
    L2FeatureMatchingAttack,
    L2LogitMatchingAttack,
    LinfFeatureMatchingAttack,
    LinfLogitMatchingAttack,
)
from robust_ext.adapters.foolbox.native import NativeFixedEpsilonAttack
from robust_ext.adapters.foolbox.objectives import (
    BaseObjectivePGD,
    L1ObjectivePGD,
    L1ObjectivePGDAttack,
    L2ObjectivePGD,
    L2ObjectivePGDAttack,
    LinfObjectivePGD,
    LinfObjectivePGDAttack,
    WithObjective,
    with_objective,
)
from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.random_search import RandomSearch

__all__ = [
    "L1APGD",
    "L2APGD",
    "BaseAutoProjectedGradientDescent",
    "BaseLinearRegionAttack",
    "BaseObjectivePGD",
    "BaseRandomSearch",
    "BaseSquareAttack",
    "L1AutoProjectedGradientDescentAttack",
    "L1FeatureMatchingAttack",
    "L1JointLossAttack",
    "L1LinearRegionAttack",
    "L1LogitMatchingAttack",
    "L1ObjectivePGD",
    "L1ObjectivePGDAttack",
    "L1RandomSearchAttack",
    "L1SelectivePGDAttack",
    "L1SquareAttack",
    "L2AutoProjectedGradientDescentAttack",
    "L2FeatureMatchingAttack",
    "L2JointLossAttack",
    "L2LinearRegionAttack",
    "L2LogitMatchingAttack",
    "L2ObjectivePGD",
    "L2ObjectivePGDAttack",
    "L2OrthogonalPGDAttack",
    "L2RandomSearchAttack",
    "L2SelectivePGDAttack",
    "L2SquareAttack",
    "LinfAPGD",
    "LinfAutoProjectedGradientDescentAttack",
    "LinfFeatureMatchingAttack",
    "LinfJointLossAttack",
    "LinfLinearRegionAttack",
    "LinfLogitMatchingAttack",
    "LinfObjectivePGD",
    "LinfObjectivePGDAttack",
    "LinfOrthogonalPGDAttack",
    "LinfRandomSearchAttack",
    "LinfRaySAttack",
    "LinfSelectivePGDAttack",
    "LinfSquareAttack",
    "NativeMinimizationAttack",
    "WithObjective",
    "with_objective",
]

_distances: Any = foolbox.distances


class BaseAutoProjectedGradientDescent(NativeFixedEpsilonAttack):
    """APGD, see :class:`robust_ext.attacks.apgd.APGD`; its subclasses have a norm.

    Args:
        steps: Gradients a run takes.
        restarts: Runs from starts of their own.
        loss: ``"ce"``, ``"margin"``, ``"dlr"`` or ``"targeted-dlr"``.
        target_classes: How many classes ``"targeted-dlr"`` aims at, one after another.
        rho: Share of steps that must raise the loss for the step size to stay, in [0, 1] (linf, l2).
        momentum: Weight of the new step against the movement before it, in (0, 1] (linf, l2).
        start: ``"random"`` or ``"input"``.
        stop_early: Whether samples are left out of the queries once they are solved.
        seed: Of all draws, the same in every call; None: what ``torch.manual_seed`` makes of them.

    References:
        Croce and Hein, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
        attacks" (2020), for linf and l2; Croce and Hein, "Mind the box: l1-APGD for sparse adversarial attacks on image
        classifiers" (2021), for l1.
    """

    def __init__(
        self,
        *,
        steps: int = 100,
        restarts: int = 1,
        loss: str = "ce",
        target_classes: int = 9,
        rho: float = 0.75,
        momentum: float = 0.75,
        start: str = "random",
        stop_early: bool = False,
        seed: int | None = None,
    ) -> None:
        self.steps = steps
        self.restarts = restarts
        self.loss = loss
        self.target_classes = target_classes
        self.rho = rho
        self.momentum = momentum
        self.start = start
        self.stop_early = stop_early
        self.seed = seed
        self._check()

    def native(self) -> APGD:
        """APGD with these settings."""
        return APGD(
            steps=self.steps,
            restarts=self.restarts,
            loss=self.loss,
            target_classes=self.target_classes,
            rho=self.rho,
            momentum=self.momentum,
            start=self.start,
            stop_early=self.stop_early,
        )


class LinfAutoProjectedGradientDescentAttack(BaseAutoProjectedGradientDescent):
    """Linf APGD."""

    distance = _distances.linf


class L2AutoProjectedGradientDescentAttack(BaseAutoProjectedGradientDescent):
    """L2 APGD."""

    distance = _distances.l2


class L1AutoProjectedGradientDescentAttack(BaseAutoProjectedGradientDescent):
    """L1 APGD."""

    distance = _distances.l1


class BaseRandomSearch(NativeFixedEpsilonAttack):
    """Random points, see :class:`robust_ext.attacks.random_search.RandomSearch`; its subclasses have a norm.

    Args:
        points: Most points drawn for a sample.
        outer: Where every other point is drawn: ``"corners"`` or ``"surface"``.
        outer_share: Share of these points, in [0, 1].
        seed: Of all draws, the same in every call; None: what ``torch.manual_seed`` makes of them.
    """

    def __init__(
        self, *, points: int = 400, outer: str = "corners", outer_share: float = 0.5, seed: int | None = None
    ) -> None:
        self.points = points
        self.outer = outer
        self.outer_share = outer_share
        self.seed = seed
        self._check()

    def native(self) -> RandomSearch:
        """Random search with these settings."""
        return RandomSearch(points=self.points, outer=self.outer, outer_share=self.outer_share)


class LinfRandomSearchAttack(BaseRandomSearch):
    """Random search in the Linf ball."""

    distance = _distances.linf


class L2RandomSearchAttack(BaseRandomSearch):
    """Random search in the L2 ball."""

    distance = _distances.l2


class L1RandomSearchAttack(BaseRandomSearch):
    """Random search in the L1 ball."""

    distance = _distances.l1


LinfAPGD = LinfAutoProjectedGradientDescentAttack
L2APGD = L2AutoProjectedGradientDescentAttack
L1APGD = L1AutoProjectedGradientDescentAttack
