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
from robust_ext.engine.progress import phases_of
from robust_ext.engine.run import Outcome
from robust_ext.engine.verify import LOST
from robust_ext.reports.timing import PHASES


class Part(NamedTuple):
    """The cost of a phase, for an attack or detector where it has several."""

    phase: str
    of: str | None
    spent: Spent


def time_table(outcomes: Iterable[Outcome[Any]], *, begun: float | None, others: Iterable[Part] = ()) -> dict[str, Any]:
    """Rows and seconds by phase, of these outcomes since ``begun`` and of earlier calls in the same folders.

    ``others`` are parts that no block states. Seconds are those of all processes that worked on blocks, and the last
    phase, ``"rest"``, is what no other one took. ``wall`` is how long this call took; None with ``begun``, where that
    is more than these outcomes; ``resumed`` is how many blocks an earlier call finished. Plain values.
    """
    left, wall = list(outcomes), None if begun is None else time.perf_counter() - begun
    found: defaultdict[tuple[str, str | None], list[Part]] = defaultdict(list)
    taken = (Part(*one) for run in left for timing in run.timings for one in phases_of(timing, run.run.title))
    for part in (*others, *taken):
        found[part.phase, part.of].append(part)
    # In the order of phases, and of attacks as they came.
    order = list(PHASES)
    rows = [_row(*found[key]) for key in sorted(found, key=lambda key: order.index(key[0]))]
    stated = sum(row["seconds"] for row in rows)
    earlier = sum(one.store.earlier for one in left)
    worked = sum(timing.get("seconds", 0.0) for one in left for timing in one.timings)
    seconds = max((wall or 0.0) + earlier, stated, worked)
    rest = _row(Part("rest", None, Spent(seconds=seconds - stated)))
    total = Spent(sum(row["forward"] for row in rows), sum(row["backward"] for row in rows), seconds)
    resumed = sum(one.store.resumed for one in left)
    return {"phases": [*rows, rest], "total": _numbers(total), "wall": wall, "resumed": resumed}


def parts_of(content: Mapping[str, Any]) -> Iterator[Part]:
    """The parts of an evaluation inside another one, from its result, but for what they leave."""
    for row in content["time"]["phases"]:
        if row["phase"] != "rest":
            spent = Spent(row["forward"], row["backward"], row["seconds"])
            yield Part(row["phase"], row["of"], spent)


def _row(*parts: Part) -> dict[str, Any]:
    """A row of the table: parts of one phase."""
    return {"phase": parts[0].phase, "of": parts[0].of, **_numbers(Spent.total(part.spent for part in parts))}


def _numbers(spent: Spent) -> dict[str, Any]:
    return {**spent.passes, "seconds": spent.seconds}


Records = Sequence[Mapping[str, Any]]

_MEND = (
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
        found.append(f"The model returned NaN or infinite logits at verified points, {_counts(broken)}; {_MEND}.")
    for why, counts in lost.items():
        found.append(f"{_counts(counts)} samples: {why}. These samples were not attacked{consequence}.")
    return found


def outside_warnings(ran: Iterable[tuple[str, Attack, ThreatModel, Records]]) -> list[str]:
    """Warnings about candidates outside ball or bounds, of attacks' names and records, which all of them have.

    Attacks for the smallest perturbation are left out where it is larger than epsilon: that is what they found.
    """
    far, out = dict[str, list[float]](), dict[str, list[float]]()
    totals = Counter[str]()
    for name, attack, model, records in ran:
        totals[name] += len(records)
        for record in records:
            distances = far if record["outcome"] == "beyond_epsilon" else out
            beyond = record["outcome"] == "beyond_epsilon" and not attack.traits.minimum_norm
            if beyond or record["outcome"] == "out_of_bounds":
                # Records of earlier versions may lack it.
                distances.setdefault(name, []).append((record.get("distance") or nan) / model.epsilon)
    found = []
    for what, distances in (("beyond epsilon", far), ("out of the bounds", out)):
        shown = {
            name: f"{name}: {len(values)} of {totals[name]}, at {median(values):.3g} epsilon on the median and "
            f"{max(values):.3g} at most"
            for name, values in distances.items()
            if len(values) >= _NOTICEABLE * totals[name]
        }
        if shown:
            found.append(
                f"Candidates lay {what} of the threat model and count as not found, whatever the model makes of them "
                f"({_first(list(shown.values()))}). Give the attack the threat model's norm, epsilon and bounds, or "
                "project what it returns; an attack that minimises another norm is no evidence for this one."
            )
    return found


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
