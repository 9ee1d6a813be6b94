"""Intervals against beta quantiles; the sequential test against numerical integration."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, special, stats

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


def log_integral(hits, misses, low, high, threshold):
    """Logarithm of the mean over rates in an interval of their likelihood relative to the threshold's."""

    def exponent(rate):
        return special.xlogy(hits, rate / threshold) + special.xlogy(misses, (1 - rate) / (1 - threshold))

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


def test_how_soon_it_decides_and_many_or_no_trials_are_no_trouble():
    assert (proportion_interval(0, 0), lower_bound(0, 0), upper_bound(0, 0)) == (None, 0.0, 1.0)
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
