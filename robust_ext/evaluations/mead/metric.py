"""The multi-armed metric: a sample counts as detected only when every successful attack on it is detected.

Source: Granese et al., "MEAD: A Multi-Armed Approach for Evaluation of Adversarial Examples Detectors" (2022), section
4. Equation 7 there asks that all attacks succeed; here, as in the paper's text, figure 2 and remark, attacks that fail
are left out. At every threshold that is the curve of each sample's lowest score over the attacks that succeed on it.
Curves are exact with ties, and have bootstrap intervals.

Scores are float64, and higher ones mean more adversarial: of the samples as they are ``(N,)``, and of the results of
every arm ``(L, N)``, whose success is bool ``(L, N)``. Infinite scores are in order; NaN are left out, and counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from robust_ext.core.random import derive_seed
from robust_ext.core.statistics import proportion_interval

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Counts = NDArray[np.int32]

_CONFIDENCE = 0.95
# Counts of samples in resamples that are looked at together: what a processor keeps close.
_AT_ONCE = 2**17


class Detection(NamedTuple):
    """Numbers of one curve; those without both positives and natural samples are None."""

    auroc: float | None  # Probability that a positive scores higher than a natural sample, a tie counting half
    auroc_interval: list[float] | None
    fpr_at_95_tpr: float | None  # Share of natural samples flagged where at least 95% of the positives are
    fpr_at_95_tpr_interval: list[float] | None
    tpr_at_5_fpr: float | None  # Share of positives flagged where at most 5% of the natural samples are
    tpr_at_5_fpr_interval: list[float] | None
    positives: int  # Samples that have a positive
    naturals: int  # Samples that have a natural score
    coverage: float | None  # positives over samples; None without samples
    unscored: int  # Scores that are no numbers: of natural samples, and of successful arms. They are left out


def multi_armed(natural: Floats, scores: Floats, success: Bools, *, resamples: int = 0, seed: int = 0) -> Detection:
    """Numbers of a detector against all of these arms together, with bootstrap intervals.

    Example:
        >>> scores, success = np.array([[0.9, 0.8], [0.2, 0.1]]), np.array([[True, True], [True, False]])
        >>> multi_armed(np.array([0.3, 0.1]), scores, success).auroc
        0.75
    """
    unscored = int(np.isnan(natural).sum() + (np.isnan(scores) & success).sum())
    return detect(natural, worst_scores(scores, success), resamples=resamples, seed=seed, unscored=unscored)


def worst_scores(scores: Floats, success: Bools) -> Floats:
    """Each sample's lowest score over the arms that succeed, ``(N,)``; NaN where none does, or none has a score."""
    valid = success & ~np.isnan(scores)
    lowest: Floats = np.where(valid, scores, np.inf).min(0, initial=np.inf)
    return np.where(valid.any(0), lowest, np.nan)


def attribution(scores: Floats, success: Bools) -> Floats | None:
    """The share of positives in which each arm scored lowest, ``(L,)``; arms that tie share. None without positives."""
    lowest = success & (scores == worst_scores(scores, success))
    tied = lowest.sum(0)
    positives = int((tied > 0).sum())
    if positives == 0:
        return None
    shares: Floats = (lowest / np.maximum(tied, 1)).sum(1) / positives
    return shares


def detect(natural: Floats, positives: Floats, *, resamples: int, seed: int, unscored: int = 0) -> Detection:
    """Numbers of the curve of scores ``(N,)``, NaN without one.

    A threshold g flags scores of at least g. FPR at 95% TPR takes the highest g that flags ``ceil(.95 M)`` of the M
    positives; TPR at 5% FPR the lowest g that flags at most ``floor(.05 N)`` of the N natural samples.

    Intervals (none with 0 resamples) are quantiles over resamples of whole samples, each with both of its scores, the
    same ones for the same seed and N; resamples in which one class is missing are left out. Where all resamples agree
    on 0 or on 1, as with a perfect detector, the interval is the exact one for the size of the smaller class.
    """
    samples, curve = len(natural), _Curve(natural, positives)
    everything = curve.numbers(np.ones((samples, 1), dtype=np.int32))
    auroc, fpr, tpr = everything[0].tolist() if len(everything) else [None] * 3
    intervals: list[list[float] | None] = [None] * 3
    if len(everything) and resamples:
        counts, step = _resampled(samples, resamples, seed), max(1, _AT_ONCE // max(samples, 1))
        drawn = [curve.numbers(counts[:, place : place + step]) for place in range(0, resamples, step)]
        trials = min(curve.naturals, curve.positives)
        intervals = [_interval(column, trials=trials) for column in np.concatenate(drawn).T]
    return Detection(
        *(auroc, intervals[0], fpr, intervals[1], tpr, intervals[2]),
        positives=curve.positives,
        naturals=curve.naturals,
        coverage=curve.positives / samples if samples else None,
        unscored=unscored,
    )


def average(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Average rows, or averages of groups, each with the same weight; ``skipped`` are those without positives.

    Source: Granese et al., "MEAD" (2022), tables 1 to 3: the rows of a norm are averaged, and in table 3 the averages
    of the four groups (l1, l2, linf, no norm).
    """
    keys = ("auroc", "fpr_at_95_tpr", "tpr_at_5_fpr")
    numbers = [[row[key] for key in keys] for row in rows if row["auroc"] is not None]
    means = np.mean(numbers, axis=0).tolist() if numbers else [None] * len(keys)
    return {**dict(zip(keys, means, strict=True)), "rows": len(numbers), "skipped": len(rows) - len(numbers)}


class PublishedCurve(NamedTuple):
    """The curve that the paper's public code computes, from the lowest thresholds to the highest."""

    fpr: Floats  # Share of natural samples flagged, (thresholds,)
    tpr: Floats  # Share of positives flagged, (thresholds,)
    auroc: float
    fpr_at_95_tpr: float


def published_curve(natural: Floats, scores: Floats, success: Bools, *, thresholds: int = 200) -> PublishedCurve | None:
    """Compute the curve and its numbers as the public code does; None without positives, and with infinite scores.

    Natural scores may be ``(L, N)``, where they were taken again for each arm; each arm has thresholds of its own.
    """
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
    return PublishedCurve(fpr, tpr, area, float(np.interp(0.95, y, x)))


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


def _interval(values: Floats, *, trials: int) -> list[float] | None:
    if len(values) == 0:
        return None
    tail = (1 - _CONFIDENCE) / 2
    low, high = (float(value) for value in np.quantile(values, [tail, 1 - tail]))
    if low == high and low in (0.0, 1.0):
        exact = proportion_interval(round(low) * trials, trials, confidence=_CONFIDENCE)
        return None if exact is None else list(exact)
    return [low, high]
