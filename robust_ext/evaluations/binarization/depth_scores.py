"""Scores at every depth, for each attack and the witnesses together, and the finding that an attack falls behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from robust_ext.attacks.base import Attack
from robust_ext.core.statistics import proportion_interval
from robust_ext.engine.store import Record
from robust_ext.evaluations.binarization.rules import Rules, Solved
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.binarization.witnesses import searchers
from robust_ext.evaluations.causes.finding import Finding, Remedy
from robust_ext.evaluations.causes.remedies import for_more_steps, steps_of
from robust_ext.evaluations.causes.rewriting import call_of


def score_depths(name: str, planted: Sequence[Record], settings: BinarizationSettings) -> list[dict[str, Any]]:
    """Score an attack and random search at every posed depth, from its planted records.

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
        position = settings.boundary_position if depth == 1 else depth
        proved = [pair for pair in posed if depth == 1 or _proved_by_others(name, pair[0], depth)]
        every, others = (
            Solved.of([(outcome, record["random_reach"]) for record, outcome in pairs], position)
            for pairs in (posed, proved)
        )
        interval = proportion_interval(every.found, every.samples, confidence=settings.confidence)
        rows.append(
            {
                "depth": depth,
                "samples": sum(depth == 1 or "depths" in record["attacks"][name] for record in planted),
                "problems": every.samples,
                "found": every.found,
                "score": every.found / every.samples,
                "score_interval": None if interval is None else list(interval),
                "random_samples": every.searched,
                "random_found": every.random_found,
                "random_score": every.random_score if every.searched else None,
                "problems_by_others": others.samples,
                "found_by_others": others.found,
                "random_samples_by_others": others.searched,
                "random_found_by_others": others.random_found,
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
    """Return the outcome of a record's problem at a depth; None where none was posed to the attack."""
    entry = record["attacks"].get(name, {"outcome": "not_planted"})
    outcomes = {one["depth"]: one["outcome"] for one in entry.get("depths", ())}
    outcome = entry["outcome"] if depth == 1 else outcomes.get(depth)
    return None if outcome in (None, "not_planted") else str(outcome)


def _proved_by_others(name: str, record: Record, depth: float) -> bool:
    own = record.get("witnesses", {}).values()
    others = [entry.get("deepest") for other, entry in record["attacks"].items() if other != name]
    return any(reach is not None and reach > depth for reach in (*own, *others))


def find_behind(
    entry: Mapping[str, Any], records: Sequence[Record], attacks: Mapping[str, Attack], settings: BinarizationSettings
) -> Finding | None:
    """The finding about an attack, by its summary and records, at the shallowest depth at which it falls behind."""
    deeper = [row for row in entry["depths"] if row["depth"] > 1]
    if entry["depth"] is None or not deeper:
        return None
    name, rules = entry["name"], Rules(settings, len(attacks))
    for row in deeper:
        if rules.trails(row["found_by_others"], row["problems_by_others"]):
            return _finding(entry, row, _best_witness(name, row["depth"], records), records, attacks, settings)
    # APGD alone, if it is run at all.
    for plain in [attack.name for attack in searchers(settings, images=False, detector=True)]:
        if not rules.outdone(*_compared(name, plain, records, settings)):
            return None
        for row in deeper:
            proved, found = _proofs(name, row["depth"], records).get(plain, (0, 0))
            if proved and rules.fails(found, proved):
                return _finding(entry, row, plain, records, attacks, settings)
    return None


def _finding(
    entry: Mapping[str, Any],
    row: Mapping[str, Any],
    best: str,
    records: Sequence[Record],
    attacks: Mapping[str, Attack],
    settings: BinarizationSettings,
) -> Finding:
    name, depth = entry["name"], row["depth"]
    proved, found = _proofs(name, depth, records)[best]
    solved, problems = row["found_by_others"], row["problems_by_others"]
    searched = row["random_samples_by_others"]
    few = "" if searched == problems else f" of {searched}"
    seen = (
        f"It solves {solved} of {problems} problems at depth {depth:g} that others prove to have a solution, so robust "
        f"accuracy measured with it alone may be too high; random search solves {row['random_found_by_others']}{few}."
    )
    evidence = [seen]
    deeper, shallower = _compared(name, best, records, settings)
    if deeper:
        evidence.append(f"{best} goes deeper in {deeper} samples, the attack in {shallower}.")
    kept = max(one["depth"] for one in entry["depths"] if one["depth"] < depth)
    ours = {attack.name: attack for attack in searchers(settings, images=True, detector=False)}
    return Finding(
        code="falls_behind",
        cause=f"It keeps up only to depth {min(kept, entry['depth']):g}: it finds {found / proved:.0%} of what {best} "
        f"finds at depth {depth:g}.",
        evidence=tuple(evidence),
        attack=name,
        samples=problems - solved,
        of=problems,
        remedies=_remedies(attacks[name], best, attacks.get(best, ours.get(best))),
    )


def _compared(name: str, witness: str, records: Sequence[Record], settings: BinarizationSettings) -> tuple[int, int]:
    """Count the samples in which a witness solves more depths than the attack, and those with fewer.

    Of the same problems: those that were posed to the attack.
    """
    more = fewer = 0
    for record in records:
        outcomes = {depth: outcome_at(name, record, depth) for depth in settings.depths if depth > 1}
        posed = {depth: outcome for depth, outcome in outcomes.items() if outcome is not None}
        reach = witnesses_of(record).get(witness, 0.0)
        theirs = sum(reach > depth for depth in posed)
        mine = sum(outcome == "found" for outcome in posed.values())
        more, fewer = more + (theirs > mine), fewer + (theirs < mine)
    return more, fewer


def _proofs(name: str, depth: float, records: Sequence[Record]) -> dict[str, tuple[int, int]]:
    """Count the problems of a depth that each other witness proves, and those of them that the attack solves."""
    counts = dict[str, tuple[int, int]]()
    for record in records:
        outcome = outcome_at(name, record, depth)
        if outcome is None:
            continue
        for witness, reach in witnesses_of(record).items():
            if witness != name and reach > depth:
                proved, found = counts.get(witness, (0, 0))
                counts[witness] = proved + 1, found + (outcome == "found")
    return counts


def _best_witness(name: str, depth: float, records: Sequence[Record]) -> str:
    """Return the witness that proves most problems that the attack does not solve at a depth."""
    counts = _proofs(name, depth, records)
    return max(counts, key=lambda witness: (counts[witness][0] - counts[witness][1], counts[witness][0]))


def _remedies(attack: Attack, best: str, witness: Attack | None) -> tuple[Remedy, ...]:
    call = None if witness is None else call_of(witness)
    beside = f"Run {best} as well, and count a sample as robust only if both fail."
    steps = steps_of(attack)
    more = () if steps is None else for_more_steps(attack, steps=steps)[:1]
    return Remedy(words=beside, attack=None if call is None else call.changed(), beside=True), *more
