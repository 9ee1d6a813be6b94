"""Differences between two results of one kind: scores, settings, versions, network and samples."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from robust_ext.core.statistics import difference_interval, paired_difference
from robust_ext.evaluations.callbacks import is_digest
from robust_ext.evaluations.result import EvaluationResult, bounds_of
from robust_ext.reports.tabular import Row
from robust_ext.reports.wording import typed

# What settings identify by digests, as text; not all evaluations keep all of them.
IDENTITY = {
    "model": "network",
    "model_code": "code of the network",
    "inputs": "samples",
    "labels": "labels",
    "detector_digest": "detector",
    "defense": "defense",
}
# Beside the settings, in some evaluations.
_STATED = ("norm", "epsilon", "samples", "suite", "naturals", "seed", "isolated")
_CHANCE = 0.05

Different = dict[str, list[Any]]
Solved = Mapping[int, bool]


def identities(first: EvaluationResult, second: EvaluationResult) -> dict[str, bool]:
    """Return whether network, samples and what else both results identify are the same, by words for it."""
    before, after = first.content.get("settings", {}), second.content.get("settings", {})
    return {
        words: before[key] == after[key]
        for key, words in IDENTITY.items()
        if key in before and key in after and (is_digest(key) or isinstance(before[key], str))
    }


def setting_changes(
    first: EvaluationResult, second: EvaluationResult, pairs: Mapping[str, str]
) -> dict[str, list[Any]]:
    """The settings with different values, each with both; None where one lacks it. ``pairs`` are names of attacks."""
    before, after = _settings(first, {}), _settings(second, {new: old for old, new in pairs.items()})
    found: Different = {}
    for name, (old, new) in _different(before, after).items():
        parts = _parts(old), _parts(new)
        if parts[0] and parts[0][""] == parts[1].get(""):
            found |= {f"{name} {key}": pair for key, pair in _different(*parts).items()}
        else:
            found[name] = [old, new]
    return found


def version_changes(first: EvaluationResult, second: EvaluationResult) -> Different:
    """The packages with different versions, each with both."""
    return _different(first.content.get("versions", {}), second.content.get("versions", {}))


def _parts(description: Any) -> dict[str, str]:
    """The settings in the description of an attack, ``Name(key=value, ...)``, its name under no key; or nothing."""
    found = re.fullmatch(r"([^()]+)\((.*)\)", description) if isinstance(description, str) else None
    parts = [] if found is None else re.split(r", (?=\w+=)", found[2])
    if found is None or not all(re.match(r"\w+=", part) for part in parts):
        return {}
    return {"": found[1], **dict(part.split("=", 1) for part in parts)}


def _different(before: Mapping[str, Any], after: Mapping[str, Any]) -> Different:
    names = {**before, **after}
    return {
        name: [before.get(name), after.get(name)]
        for name in names
        # What JSON made a list of was a tuple.
        if _listed(before.get(name)) != _listed(after.get(name))
    }


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _settings(result: EvaluationResult, renamed: Mapping[str, str]) -> dict[str, Any]:
    """Everything that was chosen, by flat names, and what each attack is; attacks are called as in the first result."""
    content = result.content
    found = {name: content[name] for name in _STATED if name in content}
    for name, value in content.get("settings", {}).items():
        if name in IDENTITY or is_digest(name) or name in ("attacks", "detectors", "surrogates"):
            continue
        if isinstance(value, Mapping):
            found |= {f"{name} {key}": one for key, one in value.items()}
        else:
            found[name] = value
    for row in result.rows():
        if row.get("description") is not None:
            name = str(row[result.keys[0]])
            found[f"attack {renamed.get(name, name)}"] = row["description"]
    return found


def name_pairs(first: EvaluationResult, second: EvaluationResult) -> dict[str, str]:
    """Return the names in the second result of the first one's attacks, detectors or studies.

    One that each has alone is compared with the other's.
    """
    key = first.keys[0]
    before, after = (list(dict.fromkeys(str(row[key]) for row in one.rows())) for one in (first, second))
    pairs = {name: name for name in before if name in after}
    left = [name for name in before if name not in pairs], [name for name in after if name not in pairs]
    if len(left[0]) == len(left[1]) == 1:
        pairs[left[0][0]] = left[1][0]
    return pairs


def score_changes(first: EvaluationResult, second: EvaluationResult, pairs: Mapping[str, str]) -> Iterator[Row]:
    """A row for each row of both results; scores of the same samples are compared sample by sample where known."""
    value, keys = first.value, first.keys
    after = {tuple(row[key] for key in keys): row for row in second.rows()}
    shared = identities(first, second).get("samples", False)
    solved = (first.solved(), second.solved()) if shared else ({}, {})
    for row in first.rows():
        place = tuple(row[key] for key in keys)
        there = (pairs.get(str(place[0])), *place[1:])
        other = after.get(there)
        if other is None:
            continue
        title = str(place[0]) if place[0] == there[0] else f"{place[0]} -> {there[0]}"
        rest = [
            f"{key} {typed(one)}" if isinstance(one, float) else str(one)
            for key, one in zip(keys[1:], place[1:], strict=True)
            if one is not None
        ]
        both = solved[0].get(place), solved[1].get(there)
        yield {
            "score": ", ".join([title, *rest]),
            "verdict_before": row.get("verdict"),
            "verdict_after": other.get("verdict"),
            "before": row[value],
            **bounds_of("before", _interval(row, value)),
            "after": other[value],
            **bounds_of("after", _interval(other, value)),
            **_change(row, other, value, both),
        }


def _interval(row: Row, value: str) -> tuple[float, float] | None:
    low, high = row.get(f"{value}_low"), row.get(f"{value}_high")
    return (low, high) if isinstance(low, float) and isinstance(high, float) else None


def _change(
    row: Row, other: Row, value: str, solved: tuple[Mapping[int, bool] | None, Mapping[int, bool] | None]
) -> Row:
    """The difference of two scores with its interval, and what is known of single samples."""
    nothing: Row = dict.fromkeys(("p_value", "gained", "lost", "paired"))
    before, after = row[value], other[value]
    if not isinstance(before, float) or not isinstance(after, float):
        return {**nothing, "difference": None, **bounds_of("difference", None), "beyond_chance": None}
    ids = sorted({*(solved[0] or ())} & {*(solved[1] or ())})
    if ids and solved[0] is not None and solved[1] is not None:
        gained = sum(solved[1][one] and not solved[0][one] for one in ids)
        lost = sum(solved[0][one] and not solved[1][one] for one in ids)
        difference, interval, p_value = paired_difference(gained, lost, len(ids))
        counts: Row = {"p_value": p_value, "gained": gained, "lost": lost, "paired": len(ids)}
        beyond = p_value < _CHANCE
        return {**counts, "difference": difference, **bounds_of("difference", interval), "beyond_chance": beyond}
    intervals = _interval(row, value), _interval(other, value)
    found = None
    if intervals[0] is not None and intervals[1] is not None:
        found = difference_interval(before, intervals[0], after, intervals[1])
    outside = None if found is None else not found[0] <= 0 <= found[1]
    return {**nothing, "difference": after - before, **bounds_of("difference", found), "beyond_chance": outside}
