"""An attack that passes the test and falls behind where others go deeper: the finding, by a stated rule.

The rule: an attack whose score at depth 1 passes falls behind at a deeper one if the one-sided exact upper bound of its
rate, on the problems that witnesses *other than itself* prove to have a solution, is below three quarters
(:meth:`robust_ext.evaluations.binarization.rules.Rules.trails`). The bound's error rate is that of the run, divided by
the numbers of depths and of attacks: that bounds the chance that this is said of any attack that finds so much of
what is there.
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
    rules = Rules(settings, len(attacks))
    for row in deeper:
        if rules.trails(row["found_by_others"], row["problems_by_others"]):
            return _finding(entry["name"], row, records, attacks, settings)
    return None


def _finding(
    name: str,
    row: Mapping[str, Any],
    records: Sequence[Record],
    attacks: Mapping[str, Attack],
    settings: BinarizationSettings,
) -> Finding:
    depth = row["depth"]
    best, proved, found = _best_witness(name, depth, records)
    solved, problems = row["found_by_others"], row["problems_by_others"]
    searched = row["random_samples_by_others"]
    few = "" if searched == problems else f" of {searched}"
    seen = (
        f"It solves {solved} of {problems} problems at depth {depth:g} that others prove to have a solution; random "
        f"search solves {row['random_found_by_others']}{few}."
    )
    ours = {attack.name: attack for attack in searchers(settings, images=True, detector=False)}
    return Finding(
        code="falls_behind",
        cause=f"It finds {found / proved:.0%} of what {best} finds at depth {depth:g}.",
        evidence=(seen,),
        attack=name,
        samples=problems - solved,
        of=problems,
        remedies=_remedies(attacks[name], best, attacks.get(best, ours.get(best))),
    )


def _best_witness(name: str, depth: float, records: Sequence[Record]) -> tuple[str, int, int]:
    """Who else proves most that the attack does not solve at a depth, how many, and how many of them it solves."""
    counts = dict[str, tuple[int, int]]()
    for record in records:
        outcome = outcome_at(name, record, depth)
        if outcome is None:
            continue
        for witness, reach in witnesses_of(record).items():
            if witness != name and reach > depth:
                proved, found = counts.get(witness, (0, 0))
                counts[witness] = proved + 1, found + (outcome == "found")
    best = max(counts, key=lambda witness: (counts[witness][0] - counts[witness][1], counts[witness][0]))
    return best, *counts[best]


def _remedies(attack: Attack, best: str, witness: Attack | None) -> tuple[Remedy, ...]:
    call = None if witness is None else call_of(witness)
    beside = f"Run {best} beside it, and count a sample as robust only where both fail."
    steps = steps_of(attack)
    more = () if steps is None else for_more_steps(attack, steps=steps)[:1]
    return Remedy(words=beside, attack=None if call is None else call.changed(), beside=True), *more
