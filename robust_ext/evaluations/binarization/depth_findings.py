"""An attack that passes the test and falls behind where others go deeper: the finding, by two stated rules.

An attack whose score at depth 1 passes falls behind at a deeper one

- if the one-sided exact upper bound of its rate, on the problems that witnesses *other than itself* prove to have a
  solution, is below three quarters (:meth:`robust_ext.evaluations.binarization.rules.Rules.trails`); or
- if the project's plain APGD goes deeper in more samples than the other way round, beyond chance
  (:meth:`robust_ext.evaluations.binarization.rules.Rules.outdone`), and at some depth the attack's score on what that
  proves is below the threshold. An ordinary attack of twenty steps is no worse than it; the other witnesses, which
  average gradients or need none, may beat it without a fault of its own.

Each has the run's error, divided by the number of attacks, and the first also by that of depths. That bounds the chance
that it is met by any attack that finds so much, or is as good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from robust_ext.attacks.base import Attack
from robust_ext.engine.store import Record
from robust_ext.evaluations.binarization.depth_scores import outcome_at, witnesses_of
from robust_ext.evaluations.binarization.rules import Rules
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.binarization.witnesses import searchers
from robust_ext.evaluations.causes.finding import Finding, Remedy
from robust_ext.evaluations.causes.rewriting import call_of
from robust_ext.evaluations.causes.step_remedies import for_more_steps, steps_of


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
    """In how many samples a witness solves problems of more depths than the attack, and of fewer.

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
    """How many problems of a depth each other witness proves, and how many of them the attack solves."""
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
    """Who else proves most that the attack does not solve at a depth."""
    counts = _proofs(name, depth, records)
    return max(counts, key=lambda witness: (counts[witness][0] - counts[witness][1], counts[witness][0]))


def _remedies(attack: Attack, best: str, witness: Attack | None) -> tuple[Remedy, ...]:
    call = None if witness is None else call_of(witness)
    beside = f"Run {best} beside it, and count a sample as robust only where both fail."
    steps = steps_of(attack)
    more = () if steps is None else for_more_steps(attack, steps=steps)[:1]
    return Remedy(words=beside, attack=None if call is None else call.changed(), beside=True), *more
