"""Intervals against beta quantiles; the sequential test against numerical integration and by simulation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from robust_ext.core.statistics import lower_bound, proportion_interval, sequential_decision, upper_bound

COUNTS = st.integers(1, 400).flatmap(lambda trials: st.tuples(st.integers(0, trials), st.just(trials)))


@given(COUNTS, st.sampled_from([0.001, 0.01, 0.05, 0.5]))
def test_bounds_and_intervals_are_beta_quantiles(counts, error_rate):
    hits, trials = counts
    low = stats.beta.ppf(error_rate, hits, trials - hits + 1) if hits else 0.0
    high = stats.beta.ppf(1 - error_rate, hits + 1, trials - hits) if hits < trials else 1.0
    assert lower_bound(hits, trials, error_rate=error_rate) == pytest.approx(low, abs=1e-9)
    assert upper_bound(hits, trials, error_rate=error_rate) == pytest.approx(high, abs=1e-9)
    if error_rate < 0.5:
        interval = proportion_interval(hits, trials, confidence=1 - 2 * error_rate)
        assert interval == pytest.approx((low, high), abs=1e-9)
    # What the bounds mean: a rate there gives so few or so many hits with just this probability.
    if hits < trials:
        assert stats.binom.cdf(hits, trials, high) == pytest.approx(error_rate, abs=1e-6)
    if hits:
        assert stats.binom.sf(hits - 1, trials, low) == pytest.approx(error_rate, abs=1e-6)


def test_intervals_cover():
    """Exactly: the probabilities of the outcomes whose interval holds the truth add up to the confidence or more."""
    assert proportion_interval(0, 0) is None
    assert (lower_bound(0, 0), upper_bound(0, 0)) == (0.0, 1.0)
    for rate in (0.02, 0.5, 0.93):
        covered = 0.0
        for hits in range(31):
            low, high = proportion_interval(hits, 30) or (1, 0)
            covered += stats.binom.pmf(hits, 30, rate) * (low <= rate <= high)
        assert 0.95 <= covered < 1


def log_integral(hits, misses, low, high, threshold):
    """Logarithm of the mean over rates in an interval of their likelihood relative to the threshold's."""

    def exponent(rate):
        return (
            hits * (math.log(rate) if hits else 0.0)
            + misses * (math.log1p(-rate) if misses else 0.0)
            - hits * math.log(threshold)
            - misses * math.log1p(-threshold)
        )

    tiny = 1e-12
    best = min(max(hits / max(hits + misses, 1), low + tiny), high - tiny)
    shift, width = exponent(best), (0.25 / (hits + misses + 1)) ** 0.5
    inner = [p for p in (best - 8 * width, best - width, best, best + width, best + 8 * width) if low < p < high]
    value, _ = integrate.quad(
        lambda rate: math.exp(exponent(rate) - shift), low + tiny, high - tiny, points=inner, limit=300
    )
    return math.log(value / (high - low)) + shift


@pytest.mark.parametrize("threshold", [0.5, 0.9, 0.95])
@pytest.mark.parametrize("trials", [1, 2, 5, 20, 62, 63, 150, 400])
def test_decisions_are_those_of_numerical_integration(threshold, trials):
    decisions = set()
    for hits in sorted({0, 1, trials // 2, *range(max(0, trials - 40), trials + 1)} & set(range(trials + 1))):
        misses = trials - hits
        above = 0.4 * math.exp(min(log_integral(hits, misses, (1 + threshold) / 2, 1, threshold), 300))
        if not misses:
            above += 0.6 * threshold**-trials
        below = math.exp(min(log_integral(hits, misses, 0, threshold, threshold), 300))
        for error_rate in (0.05, 0.2):
            near = any(abs(bet * error_rate - 1) < 1e-4 for bet in (above, below))
            expected = "above" if above >= 1 / error_rate else "below" if below >= 1 / error_rate else None
            if not near:
                assert sequential_decision(hits, trials, threshold=threshold, error_rate=error_rate) == expected
            decisions.add(expected)
    assert len(decisions) >= 2 or trials <= 2


def test_how_soon_it_decides_and_many_trials_are_no_trouble():
    assert [sequential_decision(n, n, threshold=0.95) for n in range(65)] == [None] * 63 + ["above"] * 2
    assert [sequential_decision(0, n, threshold=0.95) for n in range(4)] == [None] * 2 + ["below"] * 2
    for trials in (10**4, 10**6):
        decided = [sequential_decision(hits, trials, threshold=0.5) for hits in (trials, 0, trials // 2)]
        assert decided == ["above", "below", None]
        assert sequential_decision(trials // 100, trials, threshold=0.95) == "below"


@given(COUNTS, st.floats(0.05, 0.99))
def test_more_hits_never_look_worse(counts, threshold):
    rank = {"below": 0, None: 1, "above": 2}
    hits, trials = counts
    decision = sequential_decision(hits, trials, threshold=threshold)
    if hits < trials:
        assert rank[sequential_decision(hits + 1, trials, threshold=threshold)] >= rank[decision]
    assert decision != ("above" if hits / trials < threshold else "below")


def first_decisions(threshold, error_rate, trials):
    """For every number of trials, from how many hits on it says "above", and up to how many "below"."""
    above, below = np.full(trials + 1, trials + 1), np.full(trials + 1, -1)
    top, bottom = 0, -1
    for n in range(1, trials + 1):
        # Both limits only grow, which the test above shows: walk along them.
        top = max(top, bottom)
        while top <= n and sequential_decision(top, n, threshold=threshold, error_rate=error_rate) != "above":
            top += 1
        above[n] = top
        while sequential_decision(bottom + 1, n, threshold=threshold, error_rate=error_rate) == "below":
            bottom += 1
        below[n] = bottom
        top -= 1
    return above, below


def wrong_rate(rate, wrong, *, runs, threshold=0.95, error_rate=0.05):
    """How often a look after every one of 400 samples ends, at the first decision, in the wrong one."""
    above, below = first_decisions(threshold, error_rate, 400)
    hits = (np.random.default_rng(1).random((runs, 400)) < rate).cumsum(1)
    up, down = hits >= above[1:], hits <= below[1:]
    first_up, first_down = (np.where(each.any(1), each.argmax(1), 400) for each in (up, down))
    bad = first_up < first_down if wrong == "above" else first_down < first_up
    return float(bad.mean())


@pytest.mark.parametrize(
    ("rate", "wrong", "threshold", "error_rate"),
    [(rate, "above", 0.95, 0.05) for rate in (0.95, 0.94, 0.9)]
    + [(rate, "below", 0.95, 0.05) for rate in (0.95, 0.96)]
    + [(threshold, wrong, threshold, 0.2) for threshold in (0.5, 0.9) for wrong in ("above", "below")],
)
def test_errors_are_rare_however_often_one_looks(rate, wrong, threshold, error_rate):
    # Three standard deviations of 4000 runs.
    most = error_rate + 3 * math.sqrt(error_rate * (1 - error_rate) / 4000)
    assert wrong_rate(rate, wrong, runs=4000, threshold=threshold, error_rate=error_rate) <= most
