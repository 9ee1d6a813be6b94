"""Attacks that depend on the number of rows: they pass in the batches of a test and fail in larger ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.base import Attack, CallableAttack
from robust_ext.core.statistics import more_often
from robust_ext.engine.store import Record
from robust_ext.engine.task import Work
from robust_ext.evaluations.binarization.attacking import Attacked, ProblemAttack
from robust_ext.evaluations.binarization.problems import Problems
from robust_ext.evaluations.binarization.rules import Rules
from robust_ext.evaluations.causes.finding import Finding, Remedy
from robust_ext.models.binarized import identifiable

# Copies of one row that are attacked at once, and from how far apart, in epsilons, candidates are others.
_COPIES, _APART = 8, 1e-3
# Rows of the batch in which the attack is then run again.
_ROWS = 64


def compare_batches(attack: ProblemAttack, problems: Problems, result: Attacked) -> Work[dict[str, Any] | None]:
    """Attack one row alone and among copies of itself; where its candidates differ, many rows at once.

    Where fewer of these are solved than a pass needs, they are attacked once more in small batches, so that attacks
    whose draws differ are held against themselves. Only attacks that follow gradients and solve most of the problems
    are looked into; those of this project are known.

    Returns:
        Of how many rows at once, which it solved before, it solves how many, how many more it ``gained`` in small
        batches and how many it ``lost`` there; None where candidates are the same.
    """
    outcomes = [result.records[one]["outcome"] for one in problems.samples]
    solved, rules = [row for row, one in enumerate(outcomes) if one == "found"], Rules(attack.settings)
    if not solved or rules.fails(len(solved), len(outcomes)) or _known(attack.attack) or attack.settings.draws > 1:
        return None
    if attack.attack.traits.one_by_one or not identifiable(problems.inputs, attack.settings.threat_model):
        # It is attacked row by row.
        return None
    candidates = []
    for copies in (1, _COPIES):
        found = yield from _copied(attack, problems, solved[:1], range(copies))
        candidates.append(found.candidates[0])
    away = (candidates[0] - candidates[1]).abs().max() / attack.settings.threat_model.epsilon
    if not bool(away > _APART):
        return None
    large = _found((yield from _copied(attack, problems, solved, range(_ROWS))))
    small = set[int]()
    if rules.fails(len(large), _ROWS):
        for start in range(0, _ROWS, _COPIES):
            small |= _found((yield from _copied(attack, problems, solved, range(start, start + _COPIES))))
    return {"rows": _ROWS, "found": len(large), "gained": len(small - large), "lost": len(large - small)}


def _known(attack: Attack) -> bool:
    """Whether it takes no gradients, or is one of this project's own."""
    while isinstance(attack, AdaptedAttack):
        attack = attack.attack
    return not attack.traits.gradients or (
        type(attack).__module__.startswith("robust_ext.attacks.") and not isinstance(attack, CallableAttack)
    )


def _found(result: Attacked) -> set[int]:
    return {number for number, record in result.records.items() if record["outcome"] == "found"}


def _copied(attack: ProblemAttack, problems: Problems, rows: Sequence[int], numbers: range) -> Work[Attacked]:
    """The attack on copies of these rows in turn, by their numbers."""
    some = problems.select([rows[number % len(rows)] for number in numbers])
    # Each has a record of its own.
    numbered = replace(some, samples=tuple(numbers))
    return (yield from replace(attack, canaries=frozenset()).run(numbered, together=True))


def find_batch_dependence(name: str, records: Sequence[Record], rules: Rules) -> Finding | None:
    """The finding about an attack that solves fewer problems in larger batches."""
    for record in records:
        found = record["attacks"].get(name, {}).get("batches")
        if found is None or not rules.fails(found["found"], found["rows"]):
            continue
        if more_often(found["gained"], found["lost"]):
            missed = found["rows"] - found["found"]
            return Finding(
                code="batch_size_matters",
                cause="It solves fewer of the same problems where more rows are attacked at once.",
                evidence=(
                    f"Of {found['rows']} rows at once, copies of what it solves in the batches of the test, it solves "
                    f"{found['found']}.",
                ),
                attack=name,
                samples=missed,
                of=found["rows"],
                remedies=(
                    Remedy(
                        words="Sum the loss over rows, and scale the gradient of each row by itself.",
                        code='loss = cross_entropy(model(x), y, reduction="sum")',
                    ),
                ),
            )
    return None
