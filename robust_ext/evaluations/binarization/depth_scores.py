"""From per-sample records to scores at every depth, for each attack and for the witnesses together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from robust_ext.core.statistics import proportion_interval
from robust_ext.engine.store import Record
from robust_ext.evaluations.binarization.settings import BinarizationSettings


def score_depths(name: str, planted: Sequence[Record], settings: BinarizationSettings) -> list[dict[str, Any]]:
    """What an attack and random search solve at every depth at which problems were posed, of its planted records.

    The first is the test itself; further ones may have been looked into for fewer ``samples``. ``by_others`` are counts
    of the problems that some witness other than the attack proves to have a solution: the planted point at depth 1,
    beyond it what another attack of the run or one of the project's own found. Empty where no further depths were
    asked for.
    """
    if len(settings.depths) < 2 or not planted:
        return []
    rows = []
    for depth in settings.depths:
        posed = [(record, outcome) for record in planted if (outcome := outcome_at(name, record, depth)) is not None]
        if not posed:
            break
        looked_into = [record for record in planted if depth == 1 or "depths" in record["attacks"][name]]
        others = [pair for pair in posed if depth == 1 or _proved_by_others(name, pair[0], depth)]
        position = settings.boundary_position if depth == 1 else depth
        found, random_found, searched = _counts(posed, position)
        found_by_others, random_by_others, searched_by_others = _counts(others, position)
        interval = proportion_interval(found, len(posed), confidence=settings.confidence)
        rows.append(
            {
                "depth": depth,
                "samples": len(looked_into),
                "problems": len(posed),
                "found": found,
                "score": found / len(posed),
                "score_interval": None if interval is None else list(interval),
                "random_samples": searched,
                "random_found": random_found,
                "random_score": random_found / searched if searched else None,
                "problems_by_others": len(others),
                "found_by_others": found_by_others,
                "random_samples_by_others": searched_by_others,
                "random_found_by_others": random_by_others,
            }
        )
    return rows


def solved_depth(depths: Sequence[Mapping[str, Any]], settings: BinarizationSettings) -> float | None:
    """The largest depth up to which an attack solves what witnesses prove, by the threshold; None where not even 1."""
    solved: float | None = None
    for row in depths:
        if row["score"] < settings.threshold:
            break
        solved = row["depth"]
    return solved


def witnesses_of(record: Record) -> dict[str, float]:
    """The deepest verified point of each witness of a sample: the project's own attacks, and those of the run."""
    own: dict[str, float | None] = dict(record.get("witnesses", {}))
    for name, entry in record["attacks"].items():
        # An attack of the run that is called like one of the project's counts with it.
        own[name] = max((reach for reach in (own.get(name), entry.get("deepest")) if reach is not None), default=None)
    return {name: reach for name, reach in own.items() if reach is not None}


def witness_curve(records: Sequence[Record], settings: BinarizationSettings) -> list[dict[str, Any]]:
    """The share of samples that are proved to have a solution at every depth, and by whom.

    Of those planted for which that was looked into.
    """
    if len(settings.depths) < 2:
        return []
    planted = [
        record
        for record in records
        if any("depths" in entry and entry["outcome"] != "not_planted" for entry in record["attacks"].values())
    ]
    rows = []
    for depth in settings.depths[1:]:
        proofs = [{name for name, reach in witnesses_of(record).items() if reach > depth} for record in planted]
        by = {name: sum(name in one for one in proofs) for name in sorted(set().union(*proofs))}
        proved = sum(map(bool, proofs))
        share = proved / len(planted) if planted else None
        rows.append({"depth": depth, "samples": len(planted), "proved": proved, "share": share, "by": by})
    return rows


def outcome_at(name: str, record: Record, depth: float) -> str | None:
    """What became of a record's problem at a depth; None where none was posed to the attack."""
    entry = record["attacks"].get(name, {"outcome": "not_planted"})
    outcomes = {one["depth"]: one["outcome"] for one in entry.get("depths", ())}
    outcome = entry["outcome"] if depth == 1 else outcomes.get(depth)
    return None if outcome in (None, "not_planted") else str(outcome)


def _proved_by_others(name: str, record: Record, depth: float) -> bool:
    own = record.get("witnesses", {}).values()
    others = [entry.get("deepest") for other, entry in record["attacks"].items() if other != name]
    return any(reach is not None and reach > depth for reach in (*own, *others))


def _counts(posed: Sequence[tuple[Record, str]], position: float) -> tuple[int, int, int]:
    """How many of the problems the attack and random search solved, and on how many the latter was tried."""
    random = [record["random_reach"] for record, _ in posed if record["random_reach"] is not None]
    found = sum(outcome == "found" for _, outcome in posed)
    return found, sum(reach > position for reach in random), len(random)
