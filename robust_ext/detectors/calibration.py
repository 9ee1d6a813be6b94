"""Thresholds: the lowest score above which at most a share of clean scores lies."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.statistics import proportion_interval


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The origin of a threshold.

    Args:
        false_positive_rate: The rate that was requested.
        achieved: Share of the calibration data that is detected; at most the requested rate.
        interval: Exact 95% interval of the true rate.
        samples: Size of the calibration data.
        per_class: Whether each predicted class has a threshold of its own.
    """

    false_positive_rate: float
    achieved: float
    interval: tuple[float, float]
    samples: int
    per_class: bool

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self)


def find_threshold(
    scores: Tensor, predicted: Tensor, *, classes: int | None, rate: float
) -> tuple[Tensor, Calibration]:
    """The threshold of clean scores ``(N,)``, ``()`` or one a predicted class ``(classes,)``, and its origin.

    InvalidArgumentError: there are too few scores to tell the share ``rate`` from none. ModelError: scores are NaN, or
    all the same.
    """
    if bool(scores.isnan().any()):
        raise ModelError(f"scored NaN on {int(scores.isnan().sum())} of {len(scores)} clean inputs")
    if len(scores) > 1 and bool((scores == scores[0]).all()):
        raise ModelError(
            f"scored all {len(scores)} clean inputs {float(scores[0]):.6g}, so that it detects either everything or "
            "nothing; look at its score"
        )

    def limit(own: Tensor, which: str = "") -> Tensor:
        detected = int(rate * len(own) + 1e-9)
        if detected < 1:
            expected = f"at least {-int(-1 // rate)} clean inputs{which}, of which one may be detected"
            raise InvalidArgumentError("false_positive_rate", f"{rate:g} with {len(own)} clean inputs{which}", expected)
        return own.sort(descending=True).values[min(detected, len(own) - 1)].clone()

    threshold = above = limit(scores) if classes is None else torch.empty(0)
    if classes is not None:
        threshold = torch.stack([limit(scores[predicted == one], f" of class {one}") for one in range(classes)])
        above = threshold[predicted]
    flagged = int((scores > above).sum())
    return threshold, Calibration(
        false_positive_rate=rate,
        achieved=flagged / len(scores),
        interval=proportion_interval(flagged, len(scores)) or (0.0, 1.0),
        samples=len(scores),
        per_class=classes is not None,
    )
