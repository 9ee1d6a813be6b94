"""Intervals of proportions, and a sequential test that may stop at any time."""

from __future__ import annotations

import math

from robust_ext.core.validation import check_integer, check_number


def proportion_interval(hits: int, trials: int, *, confidence: float = 0.95) -> tuple[float, float] | None:
    """Exact (Clopper-Pearson) two-sided interval of a proportion; None without trials.

    Example:
        >>> low, high = proportion_interval(32, 32)
        >>> round(low, 3), high
        (0.891, 1.0)
    """
    _check(hits, trials, confidence=confidence)
    if trials == 0:
        return None
    tail = (1 - confidence) / 2
    return 1.0 - _upper(trials - hits, trials, tail), _upper(hits, trials, tail)


def upper_bound(hits: int, trials: int, *, error_rate: float = 0.05) -> float:
    """One-sided exact upper bound of a proportion: below it with probability ``1 - error_rate``; 1 without trials."""
    _check(hits, trials, error_rate=error_rate)
    return _upper(hits, trials, error_rate)


def lower_bound(hits: int, trials: int, *, error_rate: float = 0.05) -> float:
    """One-sided exact lower bound of a proportion: above it with probability ``1 - error_rate``; 0 without trials.

    Example:
        >>> round(lower_bound(28, 28), 4), round(lower_bound(29, 29), 4)
        (0.8985, 0.9019)
    """
    _check(hits, trials, error_rate=error_rate)
    return 1.0 - _upper(trials - hits, trials, error_rate)


def _check(hits: int, trials: int, **share: float) -> None:
    check_integer("trials", trials, minimum=0)
    check_integer("hits", hits, minimum=0, maximum=trials)
    for name, value in share.items():
        check_number(name, value, minimum=0, maximum=1, open_minimum=True, open_maximum=True)


def _upper(hits: int, trials: int, tail: float) -> float:
    """The proportion at which so few hits have probability ``tail``, a quantile of the beta distribution."""
    if hits == trials:
        return 1.0
    # Not scipy.stats, which takes a second to import; this package should cost little beyond torch.
    from scipy.special import betaincinv

    return float(betaincinv(hits + 1, trials - hits, 1 - tail))


def paired_difference(gained: int, lost: int, trials: int) -> tuple[float, tuple[float, float], float]:
    """The change of a rate between two measurements of the same trials: difference, 95% interval, and a p-value.

    ``gained`` trials succeed in the second alone, ``lost`` ones in the first alone. The p-value is of McNemar's test,
    exact and two-sided; the interval holds the exact ones of both rates of change at once (Bonferroni), so that it
    covers at least as often as it states, and may hold 0 where the test is clear.

    Source: McNemar, "Note on the sampling error of the difference between correlated proportions" (1947).

    Example:
        >>> difference, interval, p = paired_difference(10, 1, 50)
        >>> difference, round(interval[0], 3), round(interval[1], 3), round(p, 4)
        (0.18, -0.031, 0.357, 0.0117)
    """
    changed = check_integer("gained", gained, minimum=0) + check_integer("lost", lost, minimum=0)
    check_integer("trials", trials, minimum=max(changed, 1))
    tail = sum(math.comb(changed, count) for count in range(min(gained, lost) + 1))
    # Whole numbers, as powers of two leave the range of floats.
    p_value = min(1.0, 2 * tail / 2**changed)
    up, down = (1 - _upper(trials - hits, trials, 0.0125) for hits in (gained, lost))
    most_up, most_down = (_upper(hits, trials, 0.0125) for hits in (gained, lost))
    return (gained - lost) / trials, (up - most_down, most_up - down), p_value


def more_often(gained: int, lost: int, *, error_rate: float = 0.05) -> bool:
    """Test whether a second measurement of the same trials succeeds more often: an exact one-sided sign test.

    Trials with the same outcome in both say nothing: of the others, ``gained`` succeed in the second alone.

    Example:
        >>> more_often(5, 0), more_often(4, 0), more_often(9, 2), more_often(9, 3)
        (True, False, True, False)
    """
    changed = check_integer("gained", gained, minimum=0) + check_integer("lost", lost, minimum=0)
    return bool(sum(math.comb(changed, count) for count in range(lost + 1)) <= error_rate * 2**changed)


def difference_interval(
    first: float, first_interval: tuple[float, float], second: float, second_interval: tuple[float, float]
) -> tuple[float, float]:
    """The 95% interval of ``second - first``, of two independent numbers with 95% intervals of their own.

    Source: Newcombe, "Interval estimation for the difference between independent proportions" (1998), method 10, which
    takes any two intervals; with those of the same samples, it is wider than need be.

    Example:
        >>> low, high = difference_interval(0.4, (0.3, 0.5), 0.9, (0.8, 0.95))
        >>> round(low, 3), round(high, 3)
        (0.359, 0.612)
    """
    low = math.hypot(second - second_interval[0], first_interval[1] - first)
    high = math.hypot(second_interval[1] - second, first - first_interval[0])
    return second - first - low, second - first + high


def sequential_decision(hits: int, trials: int, *, threshold: float, error_rate: float = 0.05) -> str | None:
    """Decide while samples come in whether a success rate is at least ``threshold``: ``"above"``, ``"below"`` or None.

    Two likelihood ratios are kept, each a nonnegative supermartingale under what it argues against, so each error has
    at most probability ``error_rate`` however often one looks (Ville's inequality). Against "at most the threshold"
    bets a mixture of a perfect attack (weight .6) and rates uniform in the upper half of what is above the threshold
    (.4); against "at least the threshold" bet rates uniform below it. At .95 and .05 a perfect attack needs 63 samples,
    a hopeless one 2.

    Example:
        >>> sequential_decision(63, 63, threshold=0.95), sequential_decision(1, 4, threshold=0.95)
        ('above', 'below')
    """
    _check(hits, trials, threshold=threshold)
    check_number("error_rate", error_rate, minimum=0, maximum=0.5, open_minimum=True, open_maximum=True)
    from scipy.special import betainc, betaln

    misses = trials - hits
    null = hits * math.log(threshold) + misses * math.log1p(-threshold)
    # The integral of p^hits (1 - p)^misses over an interval, by the incomplete beta function, relative to the null.
    whole = _exp(float(betaln(hits + 1, misses + 1)) - null)
    below, lower = (float(betainc(hits + 1, misses + 1, rate)) for rate in (threshold, (1 + threshold) / 2))
    against_low = 0.8 * whole * (1 - lower) / (1 - threshold) + (0.6 * _exp(-null) if misses == 0 else 0.0)
    if against_low >= 1 / error_rate:
        return "above"
    return "below" if whole * below / threshold >= 1 / error_rate else None


def _exp(exponent: float) -> float:
    """``exp`` that ends at a large number: a bet beyond it is decided long before."""
    return math.exp(min(exponent, 500.0))
