"""ART's detectors of evasion attacks as detectors."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robust_ext.adapters.art.library import art
from robust_ext.adapters.art.model import without_new_hooks
from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.detectors.scored import ScoreDetector

_WATCHING = ("classifier", "target_model")


class ArtDetector(ScoreDetector):
    """A fitted ART ``EvasionDetector``; it works in numpy, so no gradient flows.

    The score is made of what the detector reports, shifted so that ART's own decision is a score above 0, which is the
    threshold until :meth:`calibrate` sets another: the detector network's output for "adversarial" minus that for
    "clean" (``BinaryInputDetector``, ``BinaryActivationDetector``), the score of the best subset beyond that of all
    background data (``SubsetScanningDetector``), or how far the similarity to neighbours lies below its threshold
    (``BeyondDetectorPyTorch``, whose scores are random, as it draws augmentations). Of any other report the decision is
    taken: 0.5 or -0.5.
    """

    def __init__(self, classifier: nn.Module, detector: Any) -> None:
        beyond = type(detector).__name__ == "BeyondDetectorPyTorch"
        super().__init__(
            classifier, self._query, name=f"ART {type(detector).__name__}", differentiable=False, random=beyond
        )
        self.detector = detector
        self.threshold = torch.zeros(())

    def _query(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_zeros(0)
        watched = getattr(getattr(self.detector, "classifier", None), "model", None)
        # ART leaves a hook behind for each look at a layer.
        with without_new_hooks(watched) if isinstance(watched, nn.Module) else nullcontext():
            try:
                report, decided = self.detector.detect(x.float().cpu().numpy())
            except ValueError as error:
                raise ModelError(
                    f"{self.name}: raised {error}; fit it first, and query it with inputs like those it was fitted to"
                ) from error
        decisions = np.asarray(decided).reshape(-1).astype(bool)
        scores = _scores(self.detector, report, decisions)
        if scores.shape != (len(x),) or not np.all(np.isnan(scores) | ((scores > 0) == decisions)):
            raise ModelError(
                f"{self.name}: its report and its decisions contradict each other; hand over a callable x -> (N,) that "
                "makes the score of what it reports"
            )
        return torch.from_numpy(np.ascontiguousarray(scores)).to(x.device)


def adapt_detector(detector: Any, classifier: nn.Module) -> ArtDetector | None:
    """Wrap an ART detector; None for anything else; InvalidArgumentError where it watches another network."""
    evasion = importlib.import_module("art.defences.detector.evasion")
    if not isinstance(detector, evasion.EvasionDetector):
        return None
    for name in _WATCHING:
        watched = getattr(detector, name, None)
        network = watched.model if isinstance(watched, art.estimators.BaseEstimator) else watched
        if isinstance(network, nn.Module) and not any(part is network for part in classifier.modules()):
            raise InvalidArgumentError(
                "detector",
                f"ART's {type(detector).__name__} beside another network, {type(network).__name__}",
                "one made with an ART classifier of this network",
            )
    return ArtDetector(classifier, detector)


def _scores(detector: Any, report: Any, decisions: Any) -> Any:
    """Return scores above 0 where ART decides for adversarial."""
    if isinstance(report, dict) and "predictions" in report:
        outputs = np.asarray(report["predictions"])
        if outputs.ndim == 2 and outputs.shape[1] >= 2:
            return outputs[:, 1:].max(1) - outputs[:, 0]
    if isinstance(report, dict) and "scores" in report and hasattr(detector, "bgd_scores"):
        return np.asarray(report["scores"], dtype=np.float64) - detector.bgd_scores.max()
    if isinstance(report, np.ndarray) and type(detector).__name__ == "BeyondDetectorPyTorch":
        return detector.threshold - report
    return decisions.astype(np.float32) - np.float32(0.5)
