"""ROC figures of scores: exact with ties, with bootstrap intervals; and averages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from robust_ext.core.random import derive_seed
from robust_ext.core.statistics import proportion_interval

Interval = tuple[float, float]
Floats = NDArray[np.float64]
Counts = NDArray[np.int32]

_CONFIDENCE = 0.95
# Counts of samples in resamples that are looked at together: what a processor keeps close.
_AT_ONCE = 2**17


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
    """Numbers of the curve of scores, float64 ``(N,)``, NaN without one; higher means more adversarial.

    A threshold g flags scores of at least g. FPR at 95% TPR takes the highest g that flags ``ceil(.95 M)`` of the M
    positives; TPR at 5% FPR the lowest g that flags at most ``floor(.05 N)`` of the N natural samples.

    Intervals (none with 0 resamples) are quantiles over resamples of whole samples, each with both of its scores, the
    same ones for the same seed and N; resamples in which one class is missing are left out. Where all resamples agree
    on 0 or on 1, as with a perfect detector, the interval is the exact one for the size of the smaller class.
    """
    samples = len(natural)
    curve = _Curve(natural, positives)
    everything = curve.numbers(np.ones((samples, 1), dtype=np.int32))
    intervals: list[Interval | None] = [None, None, None]
    if len(everything) and resamples:
        counts, step = _resampled(samples, resamples, seed), max(1, _AT_ONCE // max(samples, 1))
        drawn = [curve.numbers(counts[:, place : place + step]) for place in range(0, resamples, step)]
        trials = min(curve.naturals, curve.positives)
        intervals = [_interval(column, trials=trials) for column in np.concatenate(drawn).T]
    auroc, fpr, tpr = everything[0].tolist() if len(everything) else (None, None, None)
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


@lru_cache(maxsize=1)
def _resampled(samples: int, resamples: int, seed: int) -> Counts:
    """Count each sample in each resample, ``(samples, resamples)``; the curves of a result share it."""
    draw = np.random.default_rng(derive_seed(seed, "mead", "resamples"))
    counts = np.empty((samples, resamples), dtype=np.int32)
    for column in counts.T:
        column[:] = np.bincount(draw.integers(samples, size=samples), minlength=samples)
    return counts


class _Curve:
    """Scores in order, so that resamples need no sorting."""

    def __init__(self, natural: Floats, positives: Floats) -> None:
        # Sorting puts NaN last.
        self._natural, self._positive = np.argsort(natural), np.argsort(positives)
        self.naturals, self.positives = (int((~np.isnan(scores)).sum()) for scores in (natural, positives))
        self._natural, self._positive = self._natural[: self.naturals], self._positive[: self.positives]
        clean, attacked = natural[self._natural], positives[self._positive]
        # For each positive, how many natural scores lie below it, and how many not above it.
        self._below, self._not_above = (np.searchsorted(clean, attacked, side=side) for side in ("left", "right"))
        # For each natural score, how many positives do not lie above it.
        self._missed = np.searchsorted(attacked, clean, side="right")

    def numbers(self, counts: Counts) -> Floats:
        """AUROC, FPR at 95% TPR and TPR at 5% FPR of resamples, ``(R, 3)``, without those in which a class is missing.

        Counts are int32 ``(N, R)``: how often each resample holds each sample.
        """
        natural, positive = (
            np.concatenate([np.zeros((1, counts.shape[1]), dtype=np.int32), counts[order].cumsum(0, dtype=np.int32)])
            for order in (self._natural, self._positive)
        )
        complete = (natural[-1] > 0) & (positive[-1] > 0)
        if not complete.all():
            natural, positive, counts = natural[:, complete], positive[:, complete], counts[:, complete]
        every, total, resamples = natural[-1], positive[-1], np.arange(natural.shape[1])
        if not len(resamples):
            return np.empty((0, 3))
        # Whole numbers, and so exact: twice the pairs in the right order, ties counting once.
        pairs = natural[self._below] + natural[self._not_above]
        ordered = np.einsum("mr,mr->r", counts[self._positive], pairs, dtype=np.int64, casting="safe")
        # The highest positive from which on there are 95% of them.
        lowest = (positive <= total - -(-95 * total // 100)).sum(0) - 1
        flagged = every - natural[self._below[lowest], resamples]
        # The highest natural score from which on there are more than 5% of them: thresholds lie above it.
        highest = (natural < every - 5 * every // 100).sum(0) - 1
        caught = total - positive[self._missed[highest], resamples]
        return np.stack([ordered / (2 * every.astype(np.int64) * total), flagged / every, caught / total], axis=1)


def _interval(values: Floats, *, trials: int) -> Interval | None:
    if len(values) == 0:
        return None
    tail = (1 - _CONFIDENCE) / 2
    low, high = (float(value) for value in np.quantile(values, [tail, 1 - tail]))
    if low == high and low in (0.0, 1.0):
        return proportion_interval(round(low) * trials, trials, confidence=_CONFIDENCE)
    return low, high
