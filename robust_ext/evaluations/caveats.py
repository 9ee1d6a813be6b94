"""What a number rests on beside what was found: non-finite logits, and samples that were not attacked; as warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from robust_ext.engine.outcomes import LOST

MEND = (
    "the model divides by zero or overflows there: mend it (a larger constant under a root or a division, log_softmax "
    "for the log of a softmax, float32 for float16)"
)
"""What to do about logits that are not finite."""


def lost_of(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Records of samples that were not attacked."""
    return [record for record in records if record["outcome"] in LOST]


def lost_words(records: Sequence[Mapping[str, Any]], *, of: str = "sample") -> str:
    """How many of these records' samples were not attacked, and why, in words; empty where all were."""
    lost = lost_of(records)
    if not lost:
        return ""
    why = (
        lost[0].get("error")
        or {"ended": "the attack's process ended", "timed_out": "the attack was stopped"}[lost[0]["outcome"]]
    )
    return f"{len(lost)} of {len(records)} {of}s: {why}"


def attack_warnings(name: str, records: Sequence[Mapping[str, Any]], *, consequence: str) -> list[str]:
    """Warnings about one attack, of the records of all samples it was run on.

    ``consequence`` is what samples that were not attacked do to the numbers.
    """
    found, broken = [], sum(record["outcome"] == "non_finite_logits" for record in records)
    if broken:
        found.append(
            f"{name}: at {broken} of {len(records)} verified points the model returned NaN or infinite logits; {MEND}, "
            "and run this again."
        )
    words = lost_words(records)
    if words:
        found.append(f"{name}: {words}. These samples were not attacked{consequence}.")
    return found
