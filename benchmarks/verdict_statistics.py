"""How often the rules of the binarization test's verdict are wrong, and how often they pass an attack that is right.

    python benchmarks/verdict_statistics.py [--write]

Probabilities are exact sums over counts where samples are drawn independently: binomial for a fixed number of samples,
a recursion over the counts at every look for the sequential rule. What rests on several counts of the same samples
(score and R-ASR, depths) is simulated. ``--write`` puts the tables into docs/evidence/verdict_statistics.md and
the figure next to it.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from scipy import stats

from robust_ext.core.threat import ThreatModel
from robust_ext.evaluations.binarization.rules import LOOKS, Rules, Solved
from robust_ext.evaluations.binarization.settings import BinarizationSettings

EVIDENCE = Path(__file__).parents[1] / "docs" / "evidence"
# Around the tables in docs/evidence/verdict_statistics.md.
BEGIN, END = (f"<!-- {word}: python benchmarks/verdict_statistics.py -->" for word in ("begin", "end"))
SAMPLES, ATTACKS = (16, 29, 32, 48, 64, 128, 512), (1, 3, 10)
RATES = (0.95, 0.97, 0.99, 1.0)
RANDOM_RATES = (0.5, 0.4, 0.3, 0.2, 0.1)
# The most samples of the sequential rule, and how many come between two looks (the groups of the test).
MOST, GROUP = 512, 8
RUNS = 20_000


@cache
def rules(attacks: int = 1, **options: bool | float) -> Rules:
    """The rules of one of so many attacks."""
    threat_model = ThreatModel(norm="linf", epsilon=0.1)
    return Rules(BinarizationSettings(threat_model=threat_model, **options), attacks)  # type: ignore[arg-type]


def fewest(good: Callable[[int], bool], samples: int) -> int:
    """The fewest hits of which something holds that holds of all larger numbers; one more than there are where none."""
    return bisect_left(range(samples + 1), True, key=good)


@cache
def passing(samples: int, rate: float, attacks: int = 1, **options: float) -> float:
    """The probability that one of so many attacks passes, R-ASR apart."""
    least = fewest(lambda found: rules(attacks, **options).proves_rate(found, samples), samples)
    return float(stats.binom.sf(least - 1, samples, rate))


def failing(samples: int, rate: float) -> float:
    """The probability that an attack fails."""
    least = fewest(lambda found: not rules().fails(found, samples), samples)
    return float(stats.binom.cdf(least - 1, samples, rate))


def hard(samples: int, random_rate: float) -> float:
    """The probability that samples show R-ASR to be low enough, at a look or in the end."""
    one, alive, low, before = rules(), {0: 1.0}, 0.0, 0
    for searched in (*(look for look in LOOKS if look < samples), samples):
        step = stats.binom.pmf(range(searched - before + 1), searched - before, random_rate).tolist()
        after, alive, before = _after_group(alive, step), {}, searched
        for hits, weight in after.items():
            if one.proves_hard(_planted(0, samples, hits, searched)):
                low += weight
            else:
                alive[hits] = weight
    return low


def _most_random(samples: int, **options: bool) -> int:
    """The most hits of random search that show R-ASR to be low enough; -1 where none do."""
    one = rules(**options)
    return fewest(lambda hits: not one.proves_hard(_planted(0, samples, hits, samples)), samples) - 1


def _planted(found: int, samples: int, random_found: int, random_samples: int) -> Solved:
    return Solved(found=found, samples=samples, random_found=random_found, random_samples=random_samples)


def best_of(single: float, attacks: int) -> float:
    """The probability that any of so many attacks passes that are independent of each other: the most there can be."""
    return 1 - (1 - single) ** attacks


def _after_group(alive: dict[int, float], step: list[float]) -> dict[int, float]:
    """The probability of every number of hits after one more group, given that before it and that of its own hits."""
    after: dict[int, float] = {}
    for hits, weight in alive.items():
        for more, chance in enumerate(step):
            after[hits + more] = after.get(hits + more, 0.0) + weight * chance
    return after


@cache
def sequential(rate: float, attacks: int = 1) -> tuple[float, float, float]:
    """Probabilities to pass and to fail, and the mean number of samples, where random search finds nothing.

    By a recursion over the number of hits at every look.
    """
    one = rules(attacks, sequential=True)
    alive = {0: 1.0}  # The probability of every number of hits with which the test goes on.
    passed = failed = spent = 0.0
    step = stats.binom.pmf(range(GROUP + 1), GROUP, rate).tolist()
    for samples in range(GROUP, MOST + 1, GROUP):
        after, alive = _after_group(alive, step), {}
        for hits, weight in after.items():
            if samples < MOST and not one.decided(_planted(hits, samples, 0, samples)):
                # What is left out could change no figure that is shown.
                alive |= {hits: weight} if weight > 1e-12 else {}
                continue
            passed += weight * one.proves_rate(hits, samples)
            failed += weight * one.fails(hits, samples)
            spent += weight * samples
    return passed, failed, spent


@cache
def random_search(random_rate: float) -> tuple[float, float]:
    """With the sequential rule, the probability that R-ASR is found to be low enough, and the mean number of samples.

    Random search ends at the first look at which it is settled. By a recursion, as :func:`sequential`.
    """
    one = rules(sequential=True)
    alive, low, spent = {0: 1.0}, 0.0, 0.0
    step = stats.binom.pmf(range(GROUP + 1), GROUP, random_rate).tolist()
    for samples in range(GROUP, MOST + 1, GROUP):
        after, alive = _after_group(alive, step), {}
        for hits, weight in after.items():
            at = _planted(0, samples, hits, samples)
            if samples < MOST and not one.random_settled(at):
                alive |= {hits: weight} if weight > 1e-12 else {}
                continue
            low += weight * one.proves_hard(at)
            spent += weight * samples
    return low, spent


@dataclass(frozen=True)
class Depth:
    """A depth with its true rates and the share of problems that others prove there."""

    rate: float
    random_rate: float
    proved: float = 1.0
    depth: float = 1.0


def simulated(depths: Sequence[Depth], samples: int, *, correlation: float, runs: int = RUNS) -> dict[str, float]:
    """Shares of the verdicts, where what solves a problem depends on the sample and on how hard that is for each.

    A search of rate r solves a problem where a normal variable is below its r-quantile. The variables of the attack and
    of random search, each the same at all depths, have this correlation, below 0 where samples that are hard for one
    are easy for the other.
    """
    draw = np.random.default_rng(0)
    attack, other = draw.standard_normal((2, runs, samples))
    random = correlation * attack + (1 - correlation**2) ** 0.5 * other
    order = draw.random((runs, samples))
    columns = []
    for at in depths:
        posed = order < at.proved
        solved, hit = (
            posed & (one < stats.norm.ppf(rate)) for one, rate in ((attack, at.rate), (random, at.random_rate))
        )
        counts = np.stack([solved.sum(1), hit.sum(1), posed.sum(1)], 1).tolist()
        columns.append([Solved(found=f, random_found=r, samples=n, depth=at.depth) for f, r, n in counts])
    found = [rules().decide(table)[0] for table in zip(*columns, strict=True)]
    return {verdict: found.count(verdict) / runs for verdict in ("passed", "inconclusive", "failed")}


def false_passes() -> Iterator[tuple[str, float]]:
    """In words, and the largest probability of a pass that should not be, over the cases of a rule."""
    yield "an attack of rate .9, fixed number of samples", max(passing(n, 0.9) for n in range(1, 513))
    for attacks in ATTACKS[1:]:
        largest = max(best_of(passing(n, 0.9, attacks), attacks) for n in range(1, 513))
        yield f"the best of {attacks} attacks of rate .9, fixed number of samples", largest
    for attacks in ATTACKS:
        of = f"the best of {attacks} attacks" if attacks > 1 else "an attack"
        yield f"{of} of rate .9, sequential", best_of(sequential(0.9, attacks)[0], attacks)
    yield "a detector's pair: rate .9 in one test, 1 in the other", max(passing(n, 0.9) for n in range(1, 513))
    yield (
        "a detector's pair: rate .9 in both, independent of each other",
        max(passing(n, 0.9) ** 2 for n in range(1, 513)),
    )
    yield "R-ASR of .5, fixed number of samples", max(hard(n, 0.5) for n in range(1, 513))
    yield "R-ASR of .5, sequential", random_search(0.5)[0]
    correlations = (-1.0, 0.0, 0.6, 1.0)
    rates = {"rate .9, R-ASR .3": Depth(0.9, 0.3), "rate 1, R-ASR .5": Depth(1.0, 0.5)}
    for words, one in rates.items():
        largest = max(simulated([one], n, correlation=c)["passed"] for n in (32, 64) for c in correlations)
        yield f"{words}, dependent on each other", largest
    planted, easy, last = Depth(1.0, 0.6), Depth(0.9, 0.5, 0.9, 2.0), Depth(0.9, 0.1, 0.7, 4.0)
    cases = {
        "depths 1, 2, 4: R-ASR .6, .1, .1; rate 1, .9, .9": [planted, Depth(0.9, 0.1, 0.9, 2.0), last],
        "depths 1, 2, 4: R-ASR .6, .5, .1; rate 1, .9, .9": [planted, easy, last],
        "depths 1, 2, 4: R-ASR .5, .5, .5; rate 1, 1, 1": [
            Depth(1.0, 0.5),
            Depth(1.0, 0.5, 0.9, 2.0),
            Depth(1.0, 0.5, 0.7, 4.0),
        ],
    }
    for words, depths in cases.items():
        yield words, max(simulated(depths, n, correlation=c)["passed"] for n in (64, 128) for c in correlations)


def tables() -> Iterator[str]:
    """Lines of Markdown."""
    yield "| what should not pass | passes with probability |\n|---|---|"
    for words, value in false_passes():
        yield f"| {words} | {value:.3f} |"
    yield (
        "\n| samples | misses that pass, for 1 / 3 / 10 attacks | a rate of .9 passes (score alone) | "
        + " | ".join(f"{rate:g} passes" for rate in RATES)
        + " | .99 fails |"
    )
    yield "|---" * (4 + len(RATES)) + "|"
    for samples in SAMPLES:
        fewest = [_misses(samples, attacks) for attacks in ATTACKS]
        alone = f"{passing(samples, 0.9):.3f} ({passing(samples, 0.9, proven_rate=0.0):.3f})"
        power = " | ".join(f"{passing(samples, rate):.2f}" for rate in RATES)
        yield f"| {samples} | {' / '.join(fewest)} | {alone} | {power} | {failing(samples, 0.99):.3f} |"
    for attacks in ATTACKS:
        found = [sequential(rate, attacks) for rate in (0.9, *RATES, 0.99)]
        among = f"sequential, {attacks} attack{'s' * (attacks > 1)}"
        power = " | ".join(f"{passed:.2f}" for passed, _, _ in found[1:-1])
        yield f"| {among}: {found[-2][2]:.0f} for a perfect one | | {found[0][0]:.3f} | {power} | {found[-1][1]:.3f} |"
    yield "\n| samples | R-ASR that is low enough | " + " | ".join(f"of {rate:g}" for rate in RANDOM_RATES) + " |"
    yield "|---" * (2 + len(RANDOM_RATES)) + "|"
    for samples in SAMPLES:
        most = _most_random(samples)
        shown = " | ".join(f"{hard(samples, rate):.2f}" for rate in RANDOM_RATES)
        yield f"| {samples} | {most} of {samples} ({most / samples:.2f}) | {shown} |"
    found = [random_search(rate) for rate in (*RANDOM_RATES, 0.0)]
    shown = " | ".join(f"{low:.2f} ({samples:.0f})" for low, samples in found[:-1])
    yield f"| sequential (searched): {found[-1][1]:.0f} for an R-ASR of 0 | | {shown} |"


def _misses(samples: int, attacks: int) -> str:
    """The most misses with which one of so many attacks passes."""
    most = samples - fewest(lambda found: rules(attacks).proves_rate(found, samples), samples)
    return str(most) if most >= 0 else "-"


def draw(path: Path) -> None:
    """False passes by number of samples, and passes by true rate of the attack and of random search."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "robust_ext"
    figure, (wrong, right, low) = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    numbers = range(4, 257)
    for words, attacks, shared, options in (
        ("score alone, best of 10", 10, 1, {"proven_rate": 0.0}),
        ("score alone", 1, 1, {"proven_rate": 0.0}),
        ("rate shown, best of 10, each at .05", 10, 1, {}),
        ("rate shown, best of 10", 10, 10, {}),
        ("rate shown", 1, 1, {}),
    ):
        values = [best_of(passing(n, 0.9, shared, **options), attacks) for n in numbers]
        wrong.plot(numbers, values, label=words, linewidth=1)
    wrong.axhline(0.05, color="black", linewidth=0.8, linestyle=":")
    wrong.set(title="an attack of true rate .9 passes", xlabel="samples", ylabel="probability", ylim=(0, 1))
    grid = np.linspace(0.85, 1, 61).tolist()
    for samples in (32, 64, 128, 512):
        right.plot(grid, [passing(samples, rate) for rate in grid], label=f"{samples} samples")
    right.plot(grid[::4], [sequential(rate)[0] for rate in grid[::4]], "k--", label=f"sequential, up to {MOST}")
    right.axvline(0.9, color="black", linewidth=0.8, linestyle=":")
    right.set(title="one attack passes", xlabel="its true rate", ylim=(0, 1.02))
    grid = np.linspace(0, 0.7, 71).tolist()
    for samples in (32, 64, 128, 512):
        low.plot(grid, [hard(samples, rate) for rate in grid], label=f"{samples} samples")
    low.axvline(0.5, color="black", linewidth=0.8, linestyle=":")
    low.set(title="R-ASR is low enough", xlabel="true R-ASR", ylim=(0, 1.02))
    for panel in (wrong, right, low):
        panel.legend(fontsize="x-small")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Print, and write where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put tables and figure into docs/evidence/")
    lines = list(map(_shown, tables()))
    if parser.parse_args().write:
        page = EVIDENCE / "verdict_statistics.md"
        before, rest = page.read_text().split(BEGIN)
        page.write_text("\n".join([before + BEGIN, "", *lines, "", END]) + rest.split(END)[1])
        draw(EVIDENCE / "verdict_statistics.svg")


def _shown(line: str) -> str:
    print(line, flush=True)
    return line


if __name__ == "__main__":
    main()
