"""How well scores tell positives from natural samples: exact with ties, with bootstrap intervals; and averages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from robust_ext.core.random import derive_seed
from robust_ext.core.statistics import proportion_interval

Interval = tuple[float, float]
Floats = NDArray[np.float64]

_CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Detection:
    """Numbers of one curve; those without both positives and natural samples are None."""

    auroc: float | None  # Probability that a positive scores higher than a natural sample, a tie counting half
    auroc_interval: Interval | None
    fpr_at_95_tpr: float | None  # Share of natural samples flagged where at least 95% of the positives are
    fpr_at_95_tpr_interval: Interval | None
    tpr_at_5_fpr: float | None  # Share of positives flagged where at most 5% of the natural samples are
    tpr_at_5_fpr_interval: Interval | None
    positives: int  # Samples that have a positive
    naturals: int  # Samples that have a natural score
    coverage: float | None  # positives over samples; None without samples
    unscored: int  # Scores that are no numbers: of natural samples, and of successful arms. They are left out

    def to_dict(self) -> dict[str, object]:
        """The fields, for JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


def detect(natural: Floats, positives: Floats, *, resamples: int, seed: int, unscored: int = 0) -> Detection:
    """Numbers of the curve of scores, float64 ``(N,)``, NaN where there is none; higher means more adversarial.

    A threshold g flags scores of at least g. FPR at 95% TPR takes the highest g that flags ``ceil(.95 M)`` of the M
    positives; TPR at 5% FPR the lowest g that flags at most ``floor(.05 N)`` of the N natural samples.

    Intervals (none with 0 resamples) are quantiles over resamples of whole samples, each with both of its scores, the
    same ones for the same seed and N; resamples in which one class is missing are left out. Where all resamples agree
    on 0 or on 1, as with a perfect detector, the interval is the exact one of so many trials as the smaller class has.
    """
    samples = len(natural)
    curve = _Curve(natural, positives)
    everything = curve.numbers(np.arange(samples))
    intervals: list[Interval | None] = [None, None, None]
    if everything is not None and resamples:
        draw = np.random.default_rng(derive_seed(seed, "mead", "resamples"))
        drawn = [curve.numbers(draw.integers(samples, size=samples)) for _ in range(resamples)]
        kept = np.array([numbers for numbers in drawn if numbers is not None]).reshape(-1, 3)
        trials = min(curve.naturals, curve.positives)
        intervals = [_interval(column, trials=trials) for column in kept.T]
    auroc, fpr, tpr = everything or (None, None, None)
    return Detection(
        auroc=auroc,
        auroc_interval=intervals[0],
        fpr_at_95_tpr=fpr,
        fpr_at_95_tpr_interval=intervals[1],
        tpr_at_5_fpr=tpr,
        tpr_at_5_fpr_interval=intervals[2],
        positives=curve.positives,
        naturals=curve.naturals,
        coverage=curve.positives / samples if samples else None,
        unscored=unscored,
    )


def curve_at(natural: Floats, positives: Floats, rates: Floats) -> Floats:
    """The largest shares of positives that are flagged where at most these rates of natural samples are, ``(R,)``.

    Scores are float64 ``(N,)`` and ``(M,)``; those that are NaN are left out. NaN without positives or natural samples.
    """
    natural, positives = natural[~np.isnan(natural)], positives[~np.isnan(positives)]
    if not (len(natural) and len(positives)):
        return np.full(len(rates), np.nan)
    highest_first = np.sort(natural)[::-1]
    flagged = (rates * len(natural) + 1e-9).astype(np.int64)
    # A threshold just above the first natural score that must not be flagged.
    limits = np.append(highest_first, -np.inf)[np.minimum(flagged, len(natural))]
    ordered = np.sort(positives)
    shares: Floats = 1 - np.searchsorted(ordered, limits, side="right") / len(ordered)
    return np.where(flagged >= len(natural), 1.0, shares)


@dataclass(frozen=True, kw_only=True)
class Average:
    """Unweighted means; None without rows that have a value."""

    auroc: float | None  # Mean of the rows' AUROC
    fpr_at_95_tpr: float | None  # Mean of the rows' FPR at 95% TPR
    tpr_at_5_fpr: float | None  # Mean of the rows' TPR at 5% FPR
    rows: int  # How many rows the means are over
    skipped: int  # How many rows have no value, as no attack succeeded

    def to_dict(self) -> dict[str, object]:
        """The fields, for JSON."""
        return dict(vars(self))


def average(rows: Sequence[Detection | Average]) -> Average:
    """Average rows, or averages of groups, each with the same weight, however many positives it has.

    Source: Granese et al., "MEAD" (2022), tables 1 to 3: the rows of a norm are averaged, and in table 3 the averages
    of the four groups (l1, l2, linf, no norm).
    """
    numbers = [
        (row.auroc, row.fpr_at_95_tpr, row.tpr_at_5_fpr)
        for row in rows
        if row.auroc is not None and row.fpr_at_95_tpr is not None and row.tpr_at_5_fpr is not None
    ]
    skipped = len(rows) - len(numbers)
    if not numbers:
        return Average(auroc=None, fpr_at_95_tpr=None, tpr_at_5_fpr=None, rows=0, skipped=skipped)
    auroc, fpr, tpr = (sum(column) / len(numbers) for column in zip(*numbers, strict=True))
    return Average(auroc=auroc, fpr_at_95_tpr=fpr, tpr_at_5_fpr=tpr, rows=len(numbers), skipped=skipped)


class _Curve:
    """Scores as places among all distinct ones, so that resamples need no sorting."""

    def __init__(self, natural: Floats, positives: Floats) -> None:
        scores = np.stack([natural, positives])
        missing = np.isnan(scores)
        distinct = np.unique(scores[~missing])
        self._places = np.where(missing, len(distinct), np.searchsorted(distinct, scores))
        self._distinct = len(distinct)
        self.naturals, self.positives = (int(count) for count in (~missing).sum(1))

    def numbers(self, rows: NDArray[np.int64]) -> tuple[float, float, float] | None:
        """AUROC, FPR at 95% TPR and TPR at 5% FPR of these samples; None where a class is missing."""
        # Counts of all scores from each place on. They are whole numbers, and so exact.
        natural, positive = (
            np.bincount(places, minlength=self._distinct + 1)[: self._distinct][::-1].cumsum()[::-1]
            for places in self._places[:, rows]
        )
        count, total = (int(counts[0]) if len(counts) else 0 for counts in (natural, positive))
        if not (count and total):
            return None
        above, hits = (np.append(counts[1:], 0) for counts in (natural, positive))
        # Twice the pairs in the right order, ties counting once: natural samples below, and not above.
        ordered = int(((positive - hits) * (2 * count - natural - above)).sum())
        last = int((positive >= -(-95 * total // 100)).sum()) - 1
        first = int((natural > 5 * count // 100).sum())
        caught = int(positive[first]) if first < self._distinct else 0
        return ordered / (2 * count * total), int(natural[last]) / count, caught / total


def _interval(values: Floats, *, trials: int) -> Interval | None:
    if len(values) == 0:
        return None
    tail = (1 - _CONFIDENCE) / 2
    low, high = (float(value) for value in np.quantile(values, [tail, 1 - tail]))
    if low == high and low in (0.0, 1.0):
        return proportion_interval(round(low) * trials, trials, confidence=_CONFIDENCE)
    return low, high
