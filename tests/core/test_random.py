"""Streams by keys, counted numbers, intervals and the sequential test, against numpy's integers and scipy's laws."""

import hashlib
import math
import random
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats

from robust_ext.attacks.base import draw_seed
from robust_ext.core.random import CountedRows, RowGenerator, derive_seed, seeded_globals, stream
from robust_ext.core.statistics import lower_bound, proportion_interval, sequential_decision, upper_bound

PARTS = 40_000
KINDS = ("words", "centred", "uniforms", "signs", "normals", "laplaces")


def mixed(values):
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        values = (values ^ (values >> np.uint32(shift))) * np.uint32(factor)
    return values


def words(key, rows, places):
    a, b, c, d = np.frombuffer(hashlib.blake2b(key.to_bytes(8, "little"), digest_size=16).digest(), "<u4")
    rows, places = (np.asarray(numbers, dtype=np.uint32) for numbers in (rows, places))
    first, second = mixed(mixed(rows ^ a) + b), mixed(mixed(rows ^ c) + d)
    return mixed(mixed(places[None] ^ first[:, None]) + second[:, None])


@settings(max_examples=50)
@given(
    keys=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=3),
    start=st.one_of(st.integers(0, 300), st.integers(0, 2**31 - 10)),
    count=st.integers(0, 7),
    size=st.integers(0, 70),
    skip=st.sampled_from([0, 1, 12345, 2**31 - 80]),
)
def test_words_are_those_of_unsigned_arithmetic(keys, start, count, size, skip):
    found = CountedRows(keys, count, start=start).words(size, skip=skip).numpy().view(np.uint32)
    expected = [words(key, np.arange(start, start + count), np.arange(skip, skip + size)) for key in keys]
    np.testing.assert_array_equal(found, np.stack(expected))
    if not skip:
        shares = CountedRows(keys, count, start=start).uniforms(size).numpy()
        np.testing.assert_array_equal(shares, (np.stack(expected).view(np.int32) >> 8) / 2**24 + 0.5)


@settings(max_examples=50)
@given(kind=st.sampled_from(KINDS), cuts=st.lists(st.integers(0, 40), max_size=6), key=st.integers(0, 2**63))
def test_rows_depend_on_nothing_that_is_drawn_with_them(kind, cuts, key):
    whole = CountedRows([key, 5], 40)
    expected = getattr(whole, kind)(33)
    edges = [0, *sorted(cuts), 40]
    pieces = [
        getattr(CountedRows([5, key, 1], end - start, start=start), kind)(33)[1] for start, end in pairwise(edges)
    ]
    assert torch.equal(torch.cat(pieces), expected[0])
    assert torch.equal(getattr(whole, kind)(33), expected), "drawn again"


@pytest.mark.parametrize("kind", ["normals", "laplaces"])
def test_no_value_of_a_table_hangs_on_the_last_bits_of_a_logarithm(kind):
    """Values are rounded to whole numbers, and none is so near a half that another library's would be another."""
    rows = CountedRows([77], 400)
    index = rows.words(2000)[0]
    index = torch.cat([index & 0xFFFF, (index >> 16) & 0xFFFF], 1).flatten().long()
    values = np.full(2**16, np.nan)
    values[index] = getattr(rows, kind)(4000)[0].flatten().double()
    assert np.array_equal(values, values.round())
    assert abs(values).min() >= 1
    assert abs(values).max() < 2**19
    if kind == "normals":
        edges = stats.norm.ppf(0.5 + np.arange(2**15 + 1) / 2**16)
        exact = -np.diff(stats.norm.pdf(edges)) * 2**16 * PARTS
    else:
        shares = np.arange(2**15 + 1, dtype=np.longdouble) / 2**15
        logs = shares * np.log(np.where(shares > 0, shares, 1))
        exact = ((1 - np.diff(logs) * 2**15) * PARTS).astype(np.float64)
    np.testing.assert_array_equal(np.sort(values)[2**15 :], np.sort(exact.round()))
    assert abs(exact % 1 - 0.5).min() > 2e-6


def globals_drawn():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@given(st.sets(st.integers(0, 30), min_size=1))
def test_some_rows_draw_what_they_would_among_all(rows):
    generator = stream(3, "rows")
    every = [draw_seed(generator) for _ in range(31)]
    some = RowGenerator.of(sorted(rows), 3, "rows")
    assert [draw_seed(some) for _ in rows] == [every[row] for row in sorted(rows)]


def test_every_part_of_the_key_counts_on_every_machine_alike():
    """Fixed once and for all: a change would give everyone other points."""
    keys = [(), (0,), ("0",), (0, 0), (0, "a"), ("a", 0), ("a",), ("ab",), ("a", "b"), (1,), (12,), (1, 2)]
    keys += [(seed, purpose) for seed in range(200) for purpose in ("inner", "boundary")]
    seeds = {derive_seed(seed, *key) for seed in (0, 1, 2, 12) for key in keys}
    assert len(seeds) == 4 * len(set(keys))
    assert derive_seed(0, 7, "inner") == 4608928784374938213
    assert derive_seed(np.int64(5), 1) == derive_seed(5, 1) == derive_seed(torch.tensor(5), 1)
    for seed in (0, 2**63, 2**80):
        assert 0 <= derive_seed(seed, "x") == stream(seed, "x").initial_seed() < 2**63


@pytest.mark.parametrize("seed", [0, 1, 2**32 + 5, 2**63 - 1, 2**64 + 3])
def test_the_guard_seeds_and_restores(seed):
    """Also after an exception, and inside another one."""
    expected = []
    for _ in range(2):
        for begin in (torch.manual_seed, random.seed, np.random.seed):
            begin(77)
        expected = expected or globals_drawn()
    with suppress(ZeroDivisionError), seeded_globals(seed):
        inside = [globals_drawn(), globals_drawn()]
        np.random.randn()
        raise ZeroDivisionError
    assert globals_drawn() == expected
    with seeded_globals(seed):
        first = globals_drawn()
        with seeded_globals(2):
            globals_drawn()
        assert [first, globals_drawn()] == inside
        assert first != expected


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
