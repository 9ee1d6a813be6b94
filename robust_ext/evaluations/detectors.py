"""Detectors that evaluations are given: made ready for one classifier, calibrated, and identified."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.core.validation import check_inputs
from robust_ext.detectors.base import Detector
from robust_ext.detectors.calibration import Calibration
from robust_ext.engine.identity import model_digest
from robust_ext.registry.detector import as_detector


@dataclass(frozen=True, kw_only=True)
class NamedDetector:
    """A detector that is judged.

    Args:
        name: Of the detector.
        detector: Beside the classifier.
        digest: Its fingerprint, see :func:`detector_digest`.
    """

    name: str
    detector: Detector
    digest: str

    @property
    def calibrated(self) -> bool:
        """Whether it has a threshold, which attacks that are adaptive to it need."""
        return has_threshold(self.detector)


def detector_digest(detector: Detector) -> str:
    """Fingerprint of a detector: its weights, threshold and settings, and those of its classifier."""
    text = model_digest(detector) + repr(sorted(detector.settings.items()))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def has_threshold(detector: Detector) -> bool:
    """Whether a detector has a threshold."""
    return not bool(detector.threshold.isnan().any())


def calibrate_detector(
    detector: Detector,
    data: Tensor,
    *,
    false_positive_rate: float,
    bounds: tuple[float, float],
    seed: int,
) -> Calibration:
    """Give a detector its threshold; what a random one draws depends on the seed alone.

    Args:
        detector: Without a threshold.
        data: Clean inputs ``(M, ...)``.
        false_positive_rate: Share of them that it may detect.
        bounds: Of inputs.
        seed: Of the draws, here and in every run that goes on.
    """
    clean = check_inputs("detector_data", data, bounds=bounds)
    with seeded_globals(derive_seed(seed, "detector calibration")):
        return detector.calibrate(clean, false_positive_rate=false_positive_rate)


def as_detectors(
    detectors: object,
    module: nn.Module,
    inputs: Tensor,
    *,
    data: Tensor | None,
    false_positive_rate: float,
    bounds: tuple[float, float],
    seed: int,
) -> list[NamedDetector]:
    """Detectors by name, with a threshold where there are clean inputs to calibrate them on.

    Args:
        detectors: One, a list, or a dict by name, each anything :func:`as_detector` takes.
        module: The classifier they are beside.
        inputs: Some inputs, to see whether they are.
        data: Clean inputs to calibrate on, or None.
        false_positive_rate: Share of them that a detector may detect.
        bounds: Of inputs.
        seed: Of random detectors' draws.

    Raises:
        InvalidArgumentError: There is none, or two have one name.
    """
    named: list[tuple[str | None, object]]
    if isinstance(detectors, Mapping):
        named = [(str(name), one) for name, one in detectors.items()]
    else:
        named = [(None, one) for one in (detectors if isinstance(detectors, (list, tuple)) else [detectors])]
    if not named:
        raise InvalidArgumentError("detectors", detectors, "at least one detector")
    found: dict[str, NamedDetector] = {}
    for label, one in named:
        detector = as_detector(one, module, inputs=inputs[:4])
        name = label or str(getattr(detector, "name", type(detector).__name__))
        if name in found:
            raise InvalidArgumentError("detectors", f"several called {name}", "a dict of detectors by different names")
        if data is not None and not has_threshold(detector):
            calibrate_detector(detector, data, false_positive_rate=false_positive_rate, bounds=bounds, seed=seed)
        found[name] = NamedDetector(name=name, detector=detector, digest=detector_digest(detector))
    return list(found.values())
