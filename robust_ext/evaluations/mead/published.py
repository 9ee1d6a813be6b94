"""The metric as the paper's public code computes it, to compare with the paper's tables; not what the paper defines.

It differs from :mod:`robust_ext.evaluations.mead.metric` in three ways. Each makes detectors look worse, by amounts
that depend on the detector's scale of scores:

1. Each attack has thresholds of its own: 200 equal steps from the lowest to the highest score of the natural samples
   and of the attack's results together, whether they succeed or not. Threshold k of one attack is taken for threshold k
   of another, so one decision of the metric is made at different scores.
2. A natural sample counts as flagged at threshold k where it lies above threshold k of any attack.
3. Only scores strictly above a threshold are flagged, and the lowest threshold is the lowest score: the curve does not
   reach (1, 1), and the area beyond its last point is left out. False and true positive rates are sorted apart from
   each other; the area is by trapezoids, and the FPR at 95% TPR is interpolated, or the curve's last where it ends
   before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.validation import check_integer
from robust_ext.evaluations.mead.metric import Bools
from robust_ext.evaluations.mead.roc import Floats


@dataclass(frozen=True, kw_only=True)
class PublishedCurve:
    """The curve, from the lowest thresholds to the highest."""

    fpr: Floats  # Share of natural samples flagged, (thresholds,)
    tpr: Floats  # Share of positives flagged, (thresholds,)
    auroc: float  # Area under it
    fpr_at_95_tpr: float  # FPR at 95% TPR

    def to_dict(self) -> dict[str, object]:
        """The two numbers, for JSON."""
        return {"auroc": self.auroc, "fpr_at_95_tpr": self.fpr_at_95_tpr}


def published_curve(natural: Floats, scores: Floats, success: Bools, *, thresholds: int = 200) -> PublishedCurve | None:
    """Compute the curve and its numbers as the public code does; higher scores mean more adversarial.

    Natural scores are float64 ``(N,)``, or ``(L, N)`` where they were taken again for each arm; scores (of successful
    and failed results) and success are ``(L, N)``; each arm has as many thresholds, at least 2. None without
    positives, and where a score is not finite. InvalidArgumentError where shapes do not fit.
    """
    check_integer("thresholds", thresholds, minimum=2)
    if scores.ndim != 2 or success.shape != scores.shape:
        raise InvalidArgumentError("success", f"shape {success.shape}", f"the shape of the scores, {scores.shape}")
    if natural.shape not in (scores.shape, scores.shape[1:]):
        expected = f"shape {scores.shape[1:]} or {scores.shape}"
        raise InvalidArgumentError("natural", f"shape {natural.shape}", expected)
    natural = np.broadcast_to(natural, scores.shape)
    possible = success.any(0)
    if not possible.any() or not (np.isfinite(natural).all() and np.isfinite(scores).all()):
        return None
    lowest = np.minimum(natural.min(1), scores.min(1))
    highest = np.maximum(natural.max(1), scores.max(1))
    fpr, tpr = np.empty(thresholds), np.empty(thresholds)
    for number, of_arms in enumerate(np.linspace(lowest, highest, thresholds)):
        fpr[number] = (natural > of_arms[:, None]).any(0).mean()
        missed = (success & ~(scores > of_arms[:, None])).any(0)
        tpr[number] = (possible & ~missed).sum() / possible.sum()
    x, y = np.sort(fpr), np.sort(tpr)
    area = float(((x[1:] - x[:-1]) * (y[1:] + y[:-1]) / 2).sum())
    return PublishedCurve(fpr=fpr, tpr=tpr, auroc=area, fpr_at_95_tpr=float(np.interp(0.95, y, x)))
