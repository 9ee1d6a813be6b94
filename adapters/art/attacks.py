"""This project's own attacks as ART attacks."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from robust_ext.adapters.art.aware import JointLoss, OrthogonalPGD, SelectivePGD
from robust_ext.adapters.art.black_box import RayS, Square
from robust_ext.adapters.art.library import art
from robust_ext.adapters.art.linear_region import LinearRegion
from robust_ext.adapters.art.matching import FeatureMatching, LogitMatching
from robust_ext.adapters.art.native import NativeEvasionAttack
from robust_ext.adapters.art.objectives import ObjectiveLoss, ObjectivePGD, objective_estimator
from robust_ext.attacks import apgd, random_search

__all__ = [
    "APGD",
    "FeatureMatching",
    "JointLoss",
    "LinearRegion",
    "LogitMatching",
    "ObjectiveLoss",
    "ObjectivePGD",
    "OrthogonalPGD",
    "RandomSearch",
    "RayS",
    "SelectivePGD",
    "Square",
    "objective_estimator",
]


class APGD(NativeEvasionAttack):
    """APGD, see :class:`robust_ext.attacks.apgd.APGD`.

    Unlike ART's ``AutoProjectedGradientDescent`` it treats each sample on its own, keeps the best point it saw, and
    works on two classes.

    Args:
        estimator: A ``PyTorchClassifier`` with ``clip_values``.
        norm: ``np.inf``, ``"inf"``, 2 or 1.
        eps: At least 0, in units of the inputs.
        steps: Gradients a run takes; ART's other attacks say ``max_iter``.
        restarts: Runs from starts of their own; ART's other attacks say ``num_random_init``.
        loss: ``"ce"``, ``"margin"``, ``"dlr"`` or ``"targeted-dlr"``.
        target_classes: How many classes ``"targeted-dlr"`` aims at, one after another.
        rho: Share of steps that must raise the loss for the step size to stay, in [0, 1] (linf, l2).
        momentum: Weight of the new step against the movement before it, in (0, 1] (linf, l2).
        start: ``"random"`` or ``"input"``.
        stop_early: Whether samples are left out of the queries once they are solved.
        targeted: Whether to aim at the labels.
        batch_size: How many samples are attacked together.
        seed: Of all draws, the same in every call; None: what ``np.random.seed`` makes of them.
        summary_writer: As in all of ART; updated after each step.
        verbose: Whether to show a progress bar.
    """

    attack_params: ClassVar[list[str]] = [
        *NativeEvasionAttack.attack_params,
        "steps",
        "restarts",
        "loss",
        "target_classes",
        "rho",
        "momentum",
        "start",
        "stop_early",
    ]

    def __init__(
        self,
        estimator: Any,
        *,
        norm: float | str = np.inf,
        eps: float = 0.3,
        steps: int = 100,
        restarts: int = 1,
        loss: str = "ce",
        target_classes: int = 9,
        rho: float = 0.75,
        momentum: float = 0.75,
        start: str = "random",
        stop_early: bool = False,
        targeted: bool = False,
        batch_size: int = 32,
        seed: int | None = None,
        summary_writer: Any = False,
        verbose: bool = True,
    ) -> None:
        super().__init__(
            estimator,
            norm=norm,
            eps=eps,
            targeted=targeted,
            batch_size=batch_size,
            seed=seed,
            summary_writer=summary_writer,
            verbose=verbose,
        )
        self.steps = steps
        self.restarts = restarts
        self.loss = loss
        self.target_classes = target_classes
        self.rho = rho
        self.momentum = momentum
        self.start = start
        self.stop_early = stop_early
        self._check_params()

    def native(self) -> apgd.APGD:
        """APGD with these settings."""
        return apgd.APGD(
            steps=self.steps,
            restarts=self.restarts,
            loss=self.loss,
            target_classes=self.target_classes,
            rho=self.rho,
            momentum=self.momentum,
            start=self.start,
            stop_early=self.stop_early,
        )


class RandomSearch(NativeEvasionAttack):
    """Random points in the ball, see :class:`robust_ext.attacks.random_search.RandomSearch`.

    Args:
        estimator: A ``PyTorchClassifier`` with ``clip_values``.
        norm: ``np.inf``, ``"inf"``, 2 or 1.
        eps: At least 0, in units of the inputs.
        points: Most points drawn for a sample.
        outer: Where every other point is drawn: ``"corners"`` or ``"surface"``.
        outer_share: Share of these points, in [0, 1].
        targeted: Whether to aim at the labels.
        batch_size: How many samples are attacked together.
        seed: Of all draws, the same in every call; None: what ``np.random.seed`` makes of them.
        summary_writer: As in all of ART; updated after each step.
        verbose: Whether to show a progress bar.
    """

    attack_params: ClassVar[list[str]] = [*NativeEvasionAttack.attack_params, "points", "outer", "outer_share"]
    _estimator_requirements: Any = (art.estimators.BaseEstimator, art.estimators.classification.ClassifierMixin)

    def __init__(
        self,
        estimator: Any,
        *,
        norm: float | str = np.inf,
        eps: float = 0.3,
        points: int = 400,
        outer: str = "corners",
        outer_share: float = 0.5,
        targeted: bool = False,
        batch_size: int = 32,
        seed: int | None = None,
        summary_writer: Any = False,
        verbose: bool = True,
    ) -> None:
        super().__init__(
            estimator,
            norm=norm,
            eps=eps,
            targeted=targeted,
            batch_size=batch_size,
            seed=seed,
            summary_writer=summary_writer,
            verbose=verbose,
        )
        self.points = points
        self.outer = outer
        self.outer_share = outer_share
        self._check_params()

    def native(self) -> random_search.RandomSearch:
        """Random search with these settings."""
        return random_search.RandomSearch(points=self.points, outer=self.outer, outer_share=self.outer_share)
