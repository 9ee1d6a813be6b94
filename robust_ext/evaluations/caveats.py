"""Warnings about numbers that rest on more than the attacks' results.

Non-finite logits, samples that were not attacked, and candidates outside the threat model.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import nan
from statistics import median
from typing import Any, NamedTuple

from robust_ext.attacks.base import Attack
from robust_ext.core.cost import Spent
from robust_ext.core.threat import ThreatModel
from robust_ext.core.wording import percent
from robust_ext.engine.progress import PHASES, phases_of
from robust_ext.engine.run import Outcome
from robust_ext.engine.verify import LOST


class Part(NamedTuple):
    """The cost of a phase, for an attack or detector where it has several."""

    phase: str
    of: str | None
    spent: Spent


def time_table(outcomes: Iterable[Outcome[Any]], *, begun: float | None, others: Iterable[Part] = ()) -> dict[str, Any]:
    """Rows and seconds by phase, of these outcomes since ``begun`` and of earlier calls in the same folders.

    ``others`` are parts that no block reports. Seconds are those of all processes that worked on blocks, and the last
    phase, ``"rest"``, is what no other one took. ``wall`` is how long this call took; None with ``begun``, where that
    is more than these outcomes; ``resumed`` is how many blocks an earlier call finished. Plain values.
    """
    left, wall = list(outcomes), None if begun is None else time.perf_counter() - begun
    found: defaultdict[tuple[str, str | None], list[Spent]] = defaultdict(list)
    taken = (Part(*one) for run in left for timing in run.timings for one in phases_of(timing, run.run.title))
    for part in (*others, *taken):
        found[part.phase, part.of].append(part.spent)
    # In the order of phases, and of attacks as they came.
    order = list(PHASES)
    parts = [Part(*key, Spent.total(found[key])) for key in sorted(found, key=lambda key: order.index(key[0]))]
    stated = Spent.total(part.spent for part in parts)
    earlier = sum(one.store.earlier for one in left)
    worked = sum(timing.get("seconds", 0.0) for one in left for timing in one.timings)
    total = stated._replace(seconds=max((wall or 0.0) + earlier, stated.seconds, worked))
    parts.append(Part("rest", None, Spent(seconds=total.seconds - stated.seconds)))
    rows = [{"phase": phase, "of": of, **spent._asdict()} for phase, of, spent in parts]
    return {"phases": rows, "total": total._asdict(), "wall": wall, "resumed": sum(one.store.resumed for one in left)}


def parts_of(content: Mapping[str, Any]) -> Iterator[Part]:
    """The parts of an evaluation inside another one, from its result, but for what they leave."""
    for row in content["time"]["phases"]:
        if row["phase"] != "rest":
            spent = Spent(row["forward"], row["backward"], row["seconds"])
            yield Part(row["phase"], row["of"], spent)


Records = Sequence[Mapping[str, Any]]

_FIX = (
    "it divides by zero or overflows there: fix it (a larger constant under a root or a division, log_softmax for the "
    "log of a softmax, float32 for float16), and run this again"
)
# Attacks that a warning names, those with most samples first.
_NAMED = 3
# A share of an attack's candidates outside that is warned of.
_NOTICEABLE = 0.05


def lost_words(records: Records, *, of: str = "sample") -> str:
    """Describe how many of these records' samples were not attacked, and why; empty if none."""
    lost = [record for record in records if record["outcome"] in LOST]
    return f"{len(lost)} of {len(records)} {of}s: {_why(lost[0])}" if lost else ""


def attack_warnings(attacks: Sequence[tuple[str, Records]], *, consequence: str) -> list[str]:
    """Warnings about attacks, of their names and the records of all samples they were run on.

    ``consequence`` is what samples that were not attacked do to the numbers.
    """
    found, broken, lost = [], dict[str, tuple[int, int]](), dict[str, dict[str, tuple[int, int]]]()
    for name, records in attacks:
        if count := sum(record["outcome"] == "non_finite_logits" for record in records):
            broken[name] = count, len(records)
        if missed := [record for record in records if record["outcome"] in LOST]:
            lost.setdefault(_why(missed[0]), {})[name] = len(missed), len(records)
    if broken:
        found.append(f"The model returned NaN or infinite logits at verified points, {_counts(broken)}; {_FIX}.")
    for why, counts in lost.items():
        found.append(f"{_counts(counts)} samples: {why}. These samples were not attacked{consequence}.")
    return found


def outside_warnings(ran: Iterable[tuple[str, Attack, ThreatModel, Records]]) -> list[str]:
    """Warnings about candidates outside ball or bounds, of attacks' names and records, which all of them have.

    Attacks for the smallest perturbation are left out where it is larger than epsilon: that is what they found.
    """
    totals, places = Counter[str](), {"beyond_epsilon": "beyond epsilon", "out_of_bounds": "out of the bounds"}
    outside: dict[str, dict[str, list[float]]] = {outcome: {} for outcome in places}
    for name, attack, model, records in ran:
        totals[name] += len(records)
        for record in records:
            outcome = record["outcome"]
            if outcome in places and not (outcome == "beyond_epsilon" and attack.traits.minimum_norm):
                # Records of earlier versions may lack it.
                outside[outcome].setdefault(name, []).append((record.get("distance") or nan) / model.epsilon)
    found = []
    for outcome, distances in outside.items():
        shown = [
            f"{name}: {len(values)} of {totals[name]}, at {median(values):.3g} epsilon on the median and "
            f"{max(values):.3g} at most"
            for name, values in distances.items()
            if len(values) >= _NOTICEABLE * totals[name]
        ]
        if shown:
            found.append(
                f"Candidates lay {places[outcome]} of the threat model and count as not found, whatever the model "
                f"predicts there ({_first(shown)}). Give the attack the threat model's norm, epsilon and bounds, or "
                "project what it returns; an attack that minimises another norm is no evidence for this one."
            )
    return found


def rounding_warnings(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """State the second number of robust accuracies ``rows`` of entries that take values of a grid; else nothing."""
    stated = [
        f"{percent(row['robust_accuracy'])}% with it and {percent(row['without_rounding'])}% without"
        + (f" (epsilon {row['epsilon']:g})" if "epsilon" in row else "")
        for row in rows
        if "without_rounding" in row
    ]
    words = "Candidates were rounded to the grid of valid values before they counted. Robust accuracy is at most"
    return [f"{words} {'; '.join(stated)}."] if stated else []


def _why(record: Mapping[str, Any]) -> str:
    other = {"ended": "the attack's process ended", "timed_out": "the attack was stopped at its time limit"}
    return str(record.get("error") or other[record["outcome"]])


def _counts(counts: Mapping[str, tuple[int, int]]) -> str:
    """``name: 3 of 16``, of those with most, and how many others there are."""
    ranked = sorted(counts.items(), key=lambda entry: -entry[1][0])
    return _first([f"{name}: {count} of {total}" for name, (count, total) in ranked])


def _first(words: Sequence[str]) -> str:
    more = len(words) - _NAMED
    return ", ".join(words[:_NAMED]) + (f" and {more} more" if more > 0 else "")
