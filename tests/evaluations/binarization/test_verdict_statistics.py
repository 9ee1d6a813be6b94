"""How often the verdict is wrong: exact sums against simulated tests, and against the errors that are stated."""

import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).parents[3]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("needs the repository", allow_module_level=True)
sys.path.insert(0, str(ROOT / "benchmarks"))

import verdict_statistics as benchmark  # noqa: E402

RUNS = 2000


def near(share, probability, runs=RUNS):
    """Within four standard deviations of that many runs."""
    return abs(share - probability) <= 4 * np.sqrt(probability * (1 - probability) / runs) + 1e-3


@pytest.mark.parametrize("attacks", benchmark.ATTACKS)
@pytest.mark.parametrize("samples", benchmark.SAMPLES)
def test_a_rate_of_nine_tenths_rarely_passes(attacks, samples):
    """At most .05 for the best of all attacks, and the next count of misses would be more often wrong than that."""
    single = benchmark.passing(samples, 0.9, attacks)
    assert benchmark.best_of(single, attacks) <= 0.05
    fewest = benchmark.fewest(lambda found: benchmark.rules(attacks).proves_rate(found, samples), samples)
    if fewest / samples > 0.96:
        assert stats.binom.sf(fewest - 2, samples, 0.9) > 0.05 / attacks
    assert benchmark.hard(samples, 0.5) <= 0.05


def test_deeper_problems_pass_no_more_often():
    depth = benchmark.Depth
    for rates in ((0.6, 0.1, 0.1), (0.6, 0.5, 0.1), (0.5, 0.5, 0.5)):
        rate = 1 - 1e-12 if rates[-1] == 0.5 else 0.9
        depths = [depth(1 - 1e-12, rates[0]), depth(rate, rates[1], 0.9, 2.0), depth(rate, rates[2], 0.7, 4.0)]
        assert benchmark.simulated(depths, 64, correlation=0.5, runs=RUNS)["passed"] <= 0.05


def test_random_search_ends_where_it_is_settled():
    """An R-ASR of .5 is rarely found low enough, at a recursion over all looks and in simulated tests."""
    low, spent = benchmark.random_search(0.5)
    rules, random = benchmark.rules(sequential=True), np.random.default_rng(0)
    hits = (random.random((RUNS, benchmark.MOST)) < 0.5).cumsum(1)[:, benchmark.GROUP - 1 :: benchmark.GROUP]
    looks = np.arange(benchmark.GROUP, benchmark.MOST + 1, benchmark.GROUP)
    most = [benchmark._most_random(look, sequential=True) for look in looks.tolist()]
    assert near((hits <= most).any(1).mean(), low)
    assert low <= rules.random_error_rate() == 0.05 / 2
    assert spent > benchmark.MOST / 2
    assert benchmark.random_search(0.0) == (1.0, 8.0)
    assert rules.random_error_rate() + 3 * rules.random_error_rate(8.0) == pytest.approx(0.05)


# Options, the problems that random search found and all, and whether R-ASR is settled.
SETTLED = [
    ({}, 0, 7, False), ({}, 0, 8, True), ({}, 1, 11, False), ({}, 1, 12, True),
    # Deeper problems need it where planted ones are too easy.
    ({}, 30, 30, False), ({"depths": (1,)}, 30, 30, True), ({"depths": (1,)}, 0, 7, True),
    ({"least_depth": 2.0}, 0, 30, False), ({"maximum_random_score": 1.0}, 0, 30, False),
    ({"random_stops": False}, 0, 30, False), ({"sequential": False, "random_stops": False}, 0, 30, False),
    ({"sequential": False}, 0, 7, False), ({"sequential": False}, 0, 8, True), ({"sequential": False}, 1, 16, True),
    ({"sequential": False}, 2, 16, True), ({"sequential": False}, 3, 16, False),
]  # fmt: skip


def test_where_random_search_is_settled():
    for options, found, samples, settled in SETTLED:
        first = benchmark.Solved(found=0, random_found=found, samples=samples)
        assert benchmark.rules(**{"sequential": True, **options}).random_settled(first) == settled, options
