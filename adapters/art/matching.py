"""Feature and logit matching as ART attacks on classifiers with a detector."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from robust_ext.adapters.art.aware import ImitatingEvasionAttack
from robust_ext.attacks import feature_matching, logit_matching
from robust_ext.attacks.feature_matching import Features


class FeatureMatching(ImitatingEvasionAttack):
    """Feature matching, see :class:`robust_ext.attacks.feature_matching.FeatureMatching`.

    Args:
        estimator: A ``DefendedPyTorchClassifier``.
        norm: ``np.inf``, ``"inf"``, 2 or 1.
        eps: At least 0, in units of the inputs.
        features: Names of layers of the detector's classifier, a callable from inputs to ``(N, F)``, or None.
        distance: ``"l2"`` (squared), ``"linf"`` or ``"cosine"``.
        reference: The ``"nearest"`` of the references in features, or the ``"mean"`` of their features.
        weight: Of the classifier's term, at least 0.
        confidence: Margin in logits above which that term is content.
        steps: In each run, at least 1.
        step_size: Relative to ``eps``.
        restarts: Runs from starts of their own.
        start: ``"random"`` or ``"input"``.
        samples: Calls that are averaged, for random detectors and features.
        check_every: How often points are judged, in steps.
        targeted: Whether to aim at the labels.
        batch_size: How many samples are attacked together.
        seed: Of all draws, the same in every call; None: what ``np.random.seed`` makes of them.
        summary_writer: As in all of ART; updated after each step.
        verbose: Whether to show a progress bar.
    """

    core = feature_matching.FeatureMatching
    attack_params: ClassVar[list[str]] = [
        *ImitatingEvasionAttack.attack_params,
        "features",
        "distance",
        "reference",
        "weight",
        "confidence",
        "steps",
        "step_size",
        "restarts",
        "start",
        "samples",
        "check_every",
    ]

    def __init__(
        self,
        estimator: Any,
        *,
        norm: float | str = np.inf,
        eps: float = 0.3,
        features: Features = None,
        distance: str = "l2",
        reference: str = "nearest",
        weight: float = 1.0,
        confidence: float = 0.0,
        steps: int = 500,
        step_size: float = 0.04,
        restarts: int = 1,
        start: str = "random",
        samples: int = 1,
        check_every: int = 1,
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
        self.features = features
        self.distance = distance
        self.reference = reference
        self.weight = weight
        self.confidence = confidence
        self.steps = steps
        self.step_size = step_size
        self.restarts = restarts
        self.start = start
        self.samples = samples
        self.check_every = check_every
        self._check_params()


class LogitMatching(ImitatingEvasionAttack):
    """Logit matching, see :class:`robust_ext.attacks.logit_matching.LogitMatching`.

    Args:
        estimator: A ``DefendedPyTorchClassifier``.
        norm: ``np.inf``, ``"inf"``, 2 or 1.
        eps: At least 0, in units of the inputs.
        logits: Whose are matched: ``"classifier"``, the network of the ``"detector"``, or ``"both"``.
        reference: The ``"nearest"`` of the references in logits, or the ``"mean"`` of their logits.
        margin_weight: At least 0.
        confidence: Margin in logits above which that term is content.
        samples: Noisy copies of a point, at least 1.
        noise: ``"normal"``, ``"uniform"`` or ``"sign"``.
        level: Of the noise, relative to the width of the bounds; 0 for none.
        steps: In each run, at least 1.
        step_size: Relative to ``eps``.
        restarts: Runs from starts of their own.
        start: ``"random"`` or ``"input"``.
        check_every: How often points are judged, in steps.
        targeted: Whether to aim at the labels.
        batch_size: How many samples are attacked together.
        seed: Of all draws, the same in every call; None: what ``np.random.seed`` makes of them.
        summary_writer: As in all of ART; updated after each step.
        verbose: Whether to show a progress bar.
    """

    core = logit_matching.LogitMatching
    attack_params: ClassVar[list[str]] = [
        *ImitatingEvasionAttack.attack_params,
        "logits",
        "reference",
        "margin_weight",
        "confidence",
        "samples",
        "noise",
        "level",
        "steps",
        "step_size",
        "restarts",
        "start",
        "check_every",
    ]

    def __init__(
        self,
        estimator: Any,
        *,
        norm: float | str = np.inf,
        eps: float = 0.3,
        logits: str = "both",
        reference: str = "nearest",
        margin_weight: float = 0.5,
        confidence: float = 1.0,
        samples: int = 20,
        noise: str = "normal",
        level: float = 30 / 255,
        steps: int = 100,
        step_size: float = 0.01,
        restarts: int = 1,
        start: str = "random",
        check_every: int = 10,
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
        self.logits = logits
        self.reference = reference
        self.margin_weight = margin_weight
        self.confidence = confidence
        self.samples = samples
        self.noise = noise
        self.level = level
        self.steps = steps
        self.step_size = step_size
        self.restarts = restarts
        self.start = start
        self.check_every = check_every
        self._check_params()
