"""Feature and logit matching as Foolbox attacks on models with a detector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from robust_ext.adapters.foolbox.aware import ImitatingFixedEpsilonAttack
from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.attacks.feature_matching import FeatureMatching, Features
from robust_ext.attacks.logit_matching import LogitMatching

_distances: Any = foolbox.distances


class BaseFeatureMatching(ImitatingFixedEpsilonAttack):
    """Feature matching, see :class:`robust_ext.attacks.feature_matching.FeatureMatching`; its subclasses have a norm.

    Args:
        features: Names of layers of the detector's classifier, a callable from inputs to ``(N, F)``, or None.
        feature_distance: ``"l2"`` (squared), ``"linf"`` or ``"cosine"``.
        reference: The ``"nearest"`` of the references in features, or the ``"mean"`` of their features.
        weight: Of the classifier's term, at least 0.
        confidence: Margin in logits above which that term is content.
        steps: In each run, at least 1.
        step_size: Relative to epsilon.
        restarts: Runs from starts of their own.
        start: ``"random"`` or ``"input"``.
        samples: Calls that are averaged, for random detectors and features.
        check_every: How often points are judged, in steps.
        seed: Of all draws, the same in every call; None: what ``torch.manual_seed`` makes of them.
    """

    core = FeatureMatching
    # Foolbox's attacks have a distance already.
    names: ClassVar[Mapping[str, str]] = {"distance": "feature_distance"}

    def __init__(
        self,
        *,
        features: Features = None,
        feature_distance: str = "l2",
        reference: str = "nearest",
        weight: float = 1.0,
        confidence: float = 0.0,
        steps: int = 500,
        step_size: float = 0.04,
        restarts: int = 1,
        start: str = "random",
        samples: int = 1,
        check_every: int = 1,
        seed: int | None = None,
    ) -> None:
        self.features = features
        self.feature_distance = feature_distance
        self.reference = reference
        self.weight = weight
        self.confidence = confidence
        self.steps = steps
        self.step_size = step_size
        self.restarts = restarts
        self.start = start
        self.samples = samples
        self.check_every = check_every
        self.seed = seed
        self._check()


class BaseLogitMatching(ImitatingFixedEpsilonAttack):
    """Logit matching, see :class:`robust_ext.attacks.logit_matching.LogitMatching`; its subclasses have a norm.

    Args:
        logits: Whose are matched: ``"classifier"``, the network of the ``"detector"``, or ``"both"``.
        reference: The ``"nearest"`` of the references in logits, or the ``"mean"`` of their logits.
        margin_weight: At least 0.
        confidence: Margin in logits above which that term is content.
        samples: Noisy copies of a point, at least 1.
        noise: ``"normal"``, ``"uniform"`` or ``"sign"``.
        level: Of the noise, relative to the width of the bounds; 0 for none.
        steps: In each run, at least 1.
        step_size: Relative to epsilon.
        restarts: Runs from starts of their own.
        start: ``"random"`` or ``"input"``.
        check_every: How often points are judged, in steps.
        seed: Of all draws, the same in every call; None: what ``torch.manual_seed`` makes of them.
    """

    core = LogitMatching

    def __init__(
        self,
        *,
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
        seed: int | None = None,
    ) -> None:
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
        self.seed = seed
        self._check()


class LinfFeatureMatchingAttack(BaseFeatureMatching):
    """Linf feature matching."""

    distance = _distances.linf


class L2FeatureMatchingAttack(BaseFeatureMatching):
    """L2 feature matching."""

    distance = _distances.l2


class L1FeatureMatchingAttack(BaseFeatureMatching):
    """L1 feature matching."""

    distance = _distances.l1


class LinfLogitMatchingAttack(BaseLogitMatching):
    """Linf logit matching."""

    distance = _distances.linf


class L2LogitMatchingAttack(BaseLogitMatching):
    """L2 logit matching."""

    distance = _distances.l2


class L1LogitMatchingAttack(BaseLogitMatching):
    """L1 logit matching."""

    distance = _distances.l1
