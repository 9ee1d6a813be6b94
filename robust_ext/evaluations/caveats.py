"""What a number rests on beside what was found: non-finite logits, and samples that were not attacked; as warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from robust_ext.engine.outcomes import LOST

Records = Sequence[Mapping[str, Any]]

_MEND = (
    "it divides by zero or overflows there: mend it (a larger constant under a root or a division, log_softmax for the "
    "log of a softmax, float32 for float16), and run this again"
)
# Attacks that a warning names, those with most samples first.
_NAMED = 3


def lost_words(records: Records, *, of: str = "sample") -> str:
    """How many of these records' samples were not attacked, and why, in words; empty where all were."""
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


def _why(record: Mapping[str, Any]) -> str:
    other = {"ended": "the attack's process ended", "timed_out": "the attack was stopped at its time limit"}
    return str(record.get("error") or other[record["outcome"]])


def _counts(counts: Mapping[str, tuple[int, int]]) -> str:
    """``name: 3 of 16``, of those with most, and how many others there are."""
    ranked = sorted(counts.items(), key=lambda entry: -entry[1][0])
    words = [f"{name}: {count} of {total}" for name, (count, total) in ranked[:_NAMED]]
    more = len(ranked) - _NAMED
    return ", ".join(words) + (f" and {more} more" if more > 0 else "")
