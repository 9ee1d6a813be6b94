"""Attacks on the same samples against one another: where what is weaker finds more, the stronger one is at fault.

Sources of the comparisons: Athalye, Carlini, Wagner, "Obfuscated Gradients Give a False Sense of Security" (2018),
section 3.1; Carlini et al., "On Evaluating Adversarial Robustness" (2019), section 4; Pintor et al., "Indicators of
Attack Failure" (2022), for transfer and unbounded attacks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.base import Attack
from robust_ext.attacks.transfer import Transfer
from robust_ext.engine.outcomes import BROKEN, LOST
from robust_ext.evaluations.causes import remedies
from robust_ext.evaluations.causes.evidence import Entry
from robust_ext.evaluations.causes.finding import Finding, Remedy, ranked
from robust_ext.evaluations.causes.rewriting import call_of

# Sound attacks lose a sample to one another here and there: so many have to be lost, at least, and such a share of all.
FEWEST, OF_ALL = 3, 0.1
# Where the ball is the whole range, steps that follow epsilon leap over much: sound attacks miss a few samples.
UNBOUNDED = 1 / 3
# Gradients of an attack that takes a single step: one, and one more where it looks at the end too.
SINGLE_STEP = 2


def compare_attacks(
    entries_by_name: Mapping[str, Sequence[Entry]],
    attacks: Mapping[str, Attack],
    *,
    judged: Collection[str] | None = None,
    larger: Mapping[str, Sequence[Entry]] | None = None,
    unbounded: Mapping[str, Sequence[Entry]] | None = None,
) -> list[Finding]:
    """What attacks on the same samples, in the same order, show of one another; ranked.

    Args:
        entries_by_name: What each attack left, see :data:`robust_ext.evaluations.causes.evidence.Entry`.
        attacks: The attacks, for their traits.
        judged: Names of those that findings are about, all where left out; the others are there to compare with.
        larger: What attacks left on the same samples at a larger budget.
        unbounded: The same where the budget is the whole range of inputs.
    """
    found: list[Finding] = []
    for name in entries_by_name if judged is None else judged:
        entries, attack = entries_by_name[name], attacks[name]
        found += _random_wins(name, attack, entries)
        others = {other: left for other, left in entries_by_name.items() if other != name}
        found += _against(name, attack, entries, others, attacks)
        if larger is not None and name in larger:
            found += _larger_budget_less(name, entries, larger[name])
        if unbounded is not None and name in unbounded:
            found += _unbounded_fails(name, unbounded[name])
    return ranked(found)


def _random_wins(name: str, attack: Attack, entries: Sequence[Entry]) -> list[Finding]:
    rows = [entry for entry in entries if _open(entry) and entry.get("random_found")]
    if not _enough(rows, entries):
        return []
    cause = "Random search solves what the attack does not, within the same ball."
    seen = f"{len(rows)} of {_unsolved(entries)} samples that it did not solve were solved by random points."
    return [_finding("random_wins", cause, seen, name, rows, entries, remedies.for_flat(attack))]


def _against(
    name: str,
    attack: Attack,
    entries: Sequence[Entry],
    others: Mapping[str, Sequence[Entry]],
    attacks: Mapping[str, Attack],
) -> list[Finding]:
    """The strongest evidence of each kind."""
    best: dict[str, tuple[str, list[Entry]]] = {}
    for other, left in others.items():
        code = _kind(attack, entries, attacks[other], left)
        pairs = zip(entries, left, strict=True)
        rows = [mine for mine, theirs in pairs if _open(mine) and theirs["outcome"] in BROKEN]
        if code is not None and _enough(rows, entries) and len(rows) > len(best.get(code, ("", []))[1]):
            best[code] = other, rows
    return [
        _finding(
            code,
            _WINS[code].format(other=other),
            f"{len(rows)} of {_unsolved(entries)} samples that it did not solve were solved by {other}.",
            name,
            rows,
            entries,
            _remedy(other, attacks[other], attack),
        )
        for code, (other, rows) in best.items()
    ]


_WINS = {
    "transfer_wins": "Examples made for another model ({other}) solve what the attack does not: its gradients are of "
    "less use than another model's.",
    "gradient_free_wins": "{other}, which takes no gradient, solves what the attack does not, misled by its own.",
    "single_step_wins": "{other}, which takes one step, solves what the attack does not with many.",
}


def _kind(attack: Attack, entries: Sequence[Entry], other: Attack, left: Sequence[Entry]) -> str | None:
    """What it means where the other wins; None where it may."""
    mine, theirs = _gradients(attack, entries), _gradients(other, left)
    # Without steps to be misled on, losing to another is no symptom.
    if mine <= SINGLE_STEP:
        return None
    if isinstance(other, Transfer) or (isinstance(other, AdaptedAttack) and other.noise > 0):
        # Its gradients are those of another model: of networks it was given, or of the smoothed one.
        return "transfer_wins"
    if theirs == 0:
        return "gradient_free_wins"
    return "single_step_wins" if theirs <= SINGLE_STEP else None


def _larger_budget_less(name: str, entries: Sequence[Entry], larger: Sequence[Entry]) -> list[Finding]:
    pairs = zip(entries, larger, strict=True)
    rows = [after for before, after in pairs if before["outcome"] in BROKEN and _open(after)]
    if not _enough(rows, larger):
        return []
    cause = "It finds less with a larger budget, where all that it found before is still there."
    seen = f"{len(rows)} samples were solved with the smaller budget, and not with the larger one."
    remedy = Remedy(words="Let steps and starts follow epsilon, and return the best point of the path.")
    return [_finding("larger_budget_less", cause, seen, name, rows, larger, (remedy,))]


def _unbounded_fails(name: str, entries: Sequence[Entry]) -> list[Finding]:
    rows = [entry for entry in entries if _open(entry)]
    if len(rows) < max(FEWEST, UNBOUNDED * len(entries)):
        return []
    cause = "It fails even where the budget is the whole range of inputs, which holds other classes for sure."
    seen = f"{len(rows)} of {len(entries)} samples stay unsolved with any perturbation allowed."
    remedy = Remedy(words="Mend the attack before its numbers at small budgets are read: its steps and loss first.")
    return [_finding("unbounded_fails", cause, seen, name, rows, entries, (remedy,))]


def _remedy(name: str, other: Attack, attack: Attack) -> tuple[Remedy, ...]:
    call = call_of(other)
    words = f"Run {name} beside it, and count a sample as robust only where all fail."
    other_one = Remedy(words=words, attack=None if call is None else call.changed(), beside=True)
    return other_one, *remedies.for_flat(attack)[:1]


def _gradients(attack: Attack, entries: Sequence[Entry]) -> float:
    """The most gradients a sample took; where nothing was recorded, 0 for attacks that need none, else many."""
    traces = [trace for entry in entries if (trace := entry.get("trace"))]
    if not attack.traits.gradients:
        return 0
    return max((trace.get("gradients") or 0 for trace in traces), default=SINGLE_STEP + 1)


def _open(entry: Entry) -> bool:
    """Whether the sample was attacked, rightly, and not solved."""
    return entry["outcome"] not in (*BROKEN, *LOST) and entry.get("correct") is not False


def _unsolved(entries: Sequence[Entry]) -> int:
    return sum(map(_open, entries))


def _enough(rows: Sequence[Entry], entries: Sequence[Entry]) -> bool:
    return len(rows) >= max(FEWEST, OF_ALL * len(entries))


def _finding(
    code: str,
    cause: str,
    seen: str,
    name: str,
    rows: Sequence[Entry],
    entries: Sequence[Entry],
    found: Sequence[Remedy],
) -> Finding:
    return Finding(
        code=code,
        cause=cause,
        evidence=(seen,),
        attack=name,
        samples=len(rows),
        of=max(_unsolved(entries), len(rows)),
        remedies=tuple(found),
    )
