"""Robust accuracy from the smallest perturbation that is known of each sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robust_ext.core.statistics import proportion_interval

Floats = NDArray[np.float64]


def curve(smallest: Floats, epsilons: Sequence[float], *, slack: Sequence[float]) -> list[dict[str, Any]]:
    """Robust accuracy at each budget: the share of samples without a known perturbation of at most that size.

    ``smallest`` ``(N,)`` is 0 for samples that are misclassified as they are, infinity where no perturbation is known;
    ``slack`` is what each budget may be exceeded by, for rounding.

    Example:
        >>> rows = curve(np.array([0.0, 0.2, np.inf, 0.4]), [0.1, 0.3], slack=[0.0, 0.0])
        >>> [row["robust_accuracy"] for row in rows]
        [0.75, 0.5]
    """
    rows = []
    for epsilon, more in zip(epsilons, slack, strict=True):
        robust = int((smallest > epsilon + more).sum())
        found = proportion_interval(robust, len(smallest))
        rows.append(
            {
                "epsilon": epsilon,
                "robust_accuracy": robust / len(smallest) if len(smallest) else None,
                "interval": None if found is None else list(found),
            }
        )
    return rows


def differences(curves: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, float | None]]:
    """How far each curve lies above the lowest of all at the same budget: mean and maximum over budgets.

    Source: Croce, Rauber, Hein, "Scaling up the Randomized Gradient-Free Adversarial Attack Reveals Overestimation of
    Robustness Using Established Attacks" (2019), section 5.1 and table 1.
    """
    values = np.array([[row["robust_accuracy"] for row in rows] for rows in curves], dtype=np.float64)
    if not values.size:
        return [{"mean": None, "maximum": None} for _ in curves]
    above = values - values.min(0)
    return [{"mean": float(row.mean()), "maximum": float(row.max())} for row in above]
