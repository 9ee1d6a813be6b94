"""Attacks that depend on the number of rows: they pass in the batches of a test and fail in larger ones."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.base import Attack, CallableAttack
from robust_ext.core.errors import AttackError
from robust_ext.core.statistics import more_often
from robust_ext.engine.store import Record
from robust_ext.engine.task import Work
from robust_ext.evaluations.binarization.attacking import Attacked, ProblemAttack
from robust_ext.evaluations.binarization.problems import Problems
from robust_ext.evaluations.binarization.rules import Rules
from robust_ext.evaluations.causes.finding import Finding, Remedy
from robust_ext.models.adaptive_features import together
from robust_ext.models.binarized import identifiable

# Copies of one row that are attacked at once; from how far apart, in epsilons, candidates are others; and by how much
# the row is moved, in epsilons, to see what rounding alone does to an attack.
_COPIES, _APART, _MOVED = 4, 1e-3, 1e-5
# Rows of the batch in which the attack is then run again; and how many rows take turns where it may mix up rows.
_ROWS, _ALONE = 64, 8


def compare_batches(attack: ProblemAttack, problems: Problems, result: Attacked) -> Work[dict[str, Any] | None]:
    """Attack one row alone and among copies of itself; where its candidates differ, many rows at once.

    Steps by the sign of a deep network's gradient follow its rounding, which differs from batch to batch. So nothing
    more is run where the attack solves the row among copies too, and ends elsewhere when the row is moved by rounding.
    Where fewer rows are solved than a pass needs, they are attacked once more in batches as small as the test's, so
    that attacks whose draws differ are held against themselves. Only attacks that follow gradients and solve most of
    the problems are looked into; those of this project are known. A user's own class of a library, which the test
    attacks row by row, is given copies of one row at a time, as it may mix up others.

    Returns:
        Of how many rows, which it solved before, it solves how many, how many more it ``gained`` in small batches and
        how many it ``lost`` there; None where candidates are the same, or the attack raises on copies.
    """
    try:
        return (yield from _compare(attack, problems, result))
    except AttackError:
        # It may be made for single rows, or run out of memory: the test itself is over.
        return None


def _compare(attack: ProblemAttack, problems: Problems, result: Attacked) -> Work[dict[str, Any] | None]:
    outcomes = [result.records[one]["outcome"] for one in problems.samples]
    solved, rules = [row for row, one in enumerate(outcomes) if one == "found"], Rules(attack.settings)
    if not solved or rules.fails(len(solved), len(outcomes)) or _known(attack.attack) or attack.settings.draws > 1:
        return None
    if together(attack.features) > 1:
        # The defense is another in other batches.
        return None
    groups, size, step = [solved], _COPIES, _COPIES
    if attack.attack.traits.one_by_one or not identifiable(problems.inputs, attack.settings.threat_model):
        if not attack.attack.unlisted:
            # It is attacked row by row.
            return None
        attack = replace(attack, attack=_at_once(attack.attack))
        groups, size, step = [[row] for row in solved[:_ALONE]], 1, _ROWS
    first, epsilon = problems.select(solved[:1]), attack.settings.threat_model.epsilon
    alone = yield from _copied(attack, first, [0], range(1))
    among = yield from _copied(attack, first, [0], range(_COPIES))
    if _distance(alone, among) <= _APART * epsilon:
        return None
    if among.records[0]["outcome"] == "found" and attack.settings.threat_model.plain:
        low, high = attack.settings.threat_model.bounds
        moved = (first.inputs + _MOVED * epsilon * first.inputs.sign()).clamp(low, high)
        rounded = yield from _copied(attack, replace(first, inputs=moved), [0], range(1))
        if _distance(alone, rounded) > _APART * epsilon:
            return None
    total, large = 0, set[int]()
    for number, group in enumerate(groups, 1):
        found = yield from _copied(attack, problems, group, range(total, total + _ROWS))
        total, large = total + _ROWS, large | _found(found)
        # A single row may be an easy one.
        if number >= min(2, len(groups)) and not rules.fails(len(large), total):
            return {"rows": total, "found": len(large), "gained": 0, "lost": 0}
    small, again = set[int](), set[int]()
    for start in range(0, total, step):
        numbers = range(start, start + size)
        small |= _found((yield from _copied(attack, problems, groups[start // _ROWS], numbers)))
        again |= set(numbers)
    gained, lost = len(small - large), len((large & again) - small)
    return {"rows": total, "found": len(large), "gained": gained, "lost": lost}


def _known(attack: Attack) -> bool:
    """Return whether it takes no gradients, or is one of this project's own."""
    while isinstance(attack, AdaptedAttack):
        attack = attack.attack
    return not attack.traits.gradients or (
        type(attack).__module__.startswith("robust_ext.attacks.") and not isinstance(attack, CallableAttack)
    )


def _at_once(attack: Attack) -> Attack:
    """The same attack, which is given all rows at once."""
    changed = copy(attack)
    changed.traits = replace(attack.traits, batching="any")
    return changed


def _distance(one: Attacked, other: Attacked) -> float:
    """How far apart their candidates for the first row are, in linf."""
    return float((one.candidates[0] - other.candidates[0]).abs().max())


def _found(result: Attacked) -> set[int]:
    return {number for number, record in result.records.items() if record["outcome"] == "found"}


def _copied(attack: ProblemAttack, problems: Problems, rows: Sequence[int], numbers: range) -> Work[Attacked]:
    """The attack on copies of these rows in turn, by their numbers; AttackError where nothing comes back."""
    some = problems.select([rows[number % len(rows)] for number in numbers])
    # Each has a record of its own.
    numbered = replace(some, samples=tuple(numbers))
    result = yield from replace(attack, canaries=frozenset()).run(numbered, together=True)
    if any("error" in record for record in result.records.values()):
        raise AttackError(f"{attack.attack.name}: nothing came back for copies of a row")
    return result


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
                    f"Of {found['rows']} copies of what it solves in the batches of the test, {_ROWS} at once, it "
                    f"solves {found['found']}.",
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
