"""Attacks of your own that depend on the number of rows: they pass in the batches of a test and fail in larger ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from robust_ext.attacks.base import CallableAttack
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

    Only functions are looked into, and only those that solve a problem: what attacks of libraries do is known.

    Returns:
        Of how many rows at once, which it solved before, it solves how many; None where candidates are the same.
    """
    solved = [row for row, one in enumerate(problems.samples) if result.records[one]["outcome"] == "found"]
    if not isinstance(attack.attack, CallableAttack) or not solved or attack.settings.draws > 1:
        return None
    if attack.attack.traits.one_by_one or not identifiable(problems.inputs, attack.settings.threat_model):
        # It is attacked row by row.
        return None
    candidates = []
    for copies in (1, _COPIES):
        found = yield from _copied(attack, problems, solved[:1], copies)
        candidates.append(found.candidates[0])
    away = (candidates[0] - candidates[1]).abs().max() / attack.settings.threat_model.epsilon
    if not bool(away > _APART):
        return None
    large = yield from _copied(attack, problems, solved, _ROWS)
    return {"rows": _ROWS, "found": sum(record["outcome"] == "found" for record in large.records.values())}


def _copied(attack: ProblemAttack, problems: Problems, rows: Sequence[int], count: int) -> Work[Attacked]:
    """The attack on so many rows, which are copies of these in turn."""
    some = problems.select([rows[number % len(rows)] for number in range(count)])
    # Each has a record of its own.
    numbered = replace(some, samples=tuple(range(count)))
    return (yield from replace(attack, canaries=frozenset()).run(numbered, together=True))


def find_batch_dependence(name: str, records: Sequence[Record], rules: Rules) -> Finding | None:
    """The finding about an attack that solves fewer problems in larger batches."""
    for record in records:
        found = record["attacks"].get(name, {}).get("batches")
        if found is not None and rules.fails(found["found"], found["rows"]):
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
