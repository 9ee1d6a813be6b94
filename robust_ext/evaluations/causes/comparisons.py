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
from robust_ext.core.statistics import more_often
from robust_ext.engine.verify import BROKEN, LOST
from robust_ext.evaluations.causes import remedies
from robust_ext.evaluations.causes.evidence import Entry
from robust_ext.evaluations.causes.finding import Finding, Remedy, ranked
from robust_ext.evaluations.causes.rewriting import call_of

# Sound attacks lose a sample to one another here and there: at least this many, and this share of all, must be lost.
FEWEST, OF_ALL = 3, 0.1
# What a stronger attack has to find more, of all samples, next to a test of those that only one of the two solves.
LEAST_GAIN = 0.02
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
    """Compare attacks on the same samples, in the same order; ranked findings.

    Args:
        entries_by_name: What each attack left, see :data:`robust_ext.evaluations.causes.evidence.Entry`.
        attacks: The attacks, for their traits.
        judged: Names of those that findings are about, each of which is then held against the strongest as well. Where
            left out, all are, as parts of one evaluation, which may be of different strength.
        larger: What attacks left on the same samples at a larger budget.
        unbounded: The same where the budget is the whole range of inputs.
    """
    found: list[Finding] = []
    for name in entries_by_name if judged is None else judged:
        entries, attack = entries_by_name[name], attacks[name]
        others = {other: (attacks[other], left) for other, left in entries_by_name.items() if other != name}
        found += _against(name, attack, entries, others, strongest=judged is not None)
        if larger is not None and name in larger:
            found += _larger_budget_less(name, entries, larger[name])
        if unbounded is not None and name in unbounded:
            found += _unbounded_fails(name, unbounded[name])
    return ranked(found)


def _against(
    name: str,
    attack: Attack,
    entries: Sequence[Entry],
    others: Mapping[str, tuple[Attack, Sequence[Entry]]],
    *,
    strongest: bool,
) -> list[Finding]:
    """The strongest evidence of each kind; what others find by the same gradients does not speak against these."""
    kinds = {other: _kind(attack, entries, *theirs) for other, theirs in others.items()}
    won = {
        other: [_open(mine) and found["outcome"] in BROKEN for mine, found in zip(entries, left, strict=True)]
        for other, (_, left) in others.items()
    }
    beaten = {other for other, (_, left) in others.items() if strongest and _beats(entries, left)}

    def apart(other: str, past: Collection[str]) -> list[Entry]:
        """The samples that it solves, and none of the past ones."""
        return [mine for row, mine in enumerate(entries) if won[other][row] and not any(won[one][row] for one in past)]

    def shows(other: str, past: Collection[str], closest: Collection[str]) -> bool:
        weak = kinds[other] not in _OF_STRENGTH and _enough(apart(other, past), entries)
        return weak or (other in beaten and len(apart(other, closest)) >= FEWEST)

    stepping = strongest and _gradients(attack, entries) > SINGLE_STEP
    follow = [
        other
        for other, (theirs, left) in others.items()
        if stepping and not _transfers(theirs) and _gradients(theirs, left)
    ]
    winners = [other for other in follow if shows(other, (), ())]
    best: dict[str, tuple[str, list[Entry]]] = {}
    for other, code in kinds.items():
        past, closest = (winners, follow) if code in _MISLED else ((), ())
        rows = apart(other, past)
        if shows(other, past, closest) and len(rows) > len(best.get(code, ("", []))[1]):
            best[code] = other, rows
    found = []
    for code, (other, rows) in best.items():
        seen = f"{len(rows)} of {_unsolved(entries)} samples that it did not solve were solved by {other}."
        flat = remedies.for_flat(attack)[:1] if code in _MISLED else ()
        found.append(
            _finding(
                code,
                _WINS[code].format(other=other, few=_few(attack, entries)),
                seen,
                name,
                rows,
                entries,
                (_remedy(other, others[other][0]), *flat),
            )
        )
    reached = [any(won[other][row] for other in winners) for row in range(len(entries))]
    return [*_random_wins(name, attack, entries, reached), *found]


def _random_wins(name: str, attack: Attack, entries: Sequence[Entry], reached: Sequence[bool]) -> list[Finding]:
    pairs = zip(entries, reached, strict=True)
    rows = [entry for entry, gone in pairs if _open(entry) and entry.get("random_found") and not gone]
    if not _enough(rows, entries):
        return []
    cause = "Random search solves what the attack does not, within the same ball."
    seen = f"{len(rows)} of {_unsolved(entries)} samples that it did not solve were solved by random points."
    return [_finding("random_wins", cause, seen, name, rows, entries, remedies.for_flat(attack))]


_WINS = {
    "loop_at_fault": "{other}, which follows gradients of the same model, solves what the attack does not: they are "
    "of use, and what holds the attack back is its own loop, loss or step.",
    "weaker_kind": "{other} solves what the attack does not: {few}, so its number is no measure of robustness.",
    "transfer_wins": "Examples made for another model ({other}) solve what the attack does not: its gradients are of "
    "less use than another model's.",
    "gradient_free_wins": "{other}, which takes no gradient, solves what the attack does not, misled by its own.",
    "single_step_wins": "{other}, which takes one step, solves what the attack does not with many.",
}
# What speaks against the gradients, unless attacks that follow the same ones find it too.
_MISLED = ("gradient_free_wins", "transfer_wins")
# An attack may lose to a stronger one by chance: these take a test of the samples that only one of the two solves.
_OF_STRENGTH = ("loop_at_fault", "weaker_kind")


def _kind(attack: Attack, entries: Sequence[Entry], other: Attack, left: Sequence[Entry]) -> str:
    """Return the meaning of the other attack's win."""
    mine, theirs = _gradients(attack, entries), _gradients(other, left)
    # Without steps to be misled on, losing to another is no symptom of a fault.
    if mine <= SINGLE_STEP:
        return "weaker_kind"
    if _transfers(other):
        return "transfer_wins"
    if theirs == 0:
        return "gradient_free_wins"
    if theirs <= SINGLE_STEP:
        return "single_step_wins"
    return "weaker_kind" if attack.traits.minimum_norm else "loop_at_fault"


def _transfers(other: Attack) -> bool:
    """Return whether its gradients are those of another model: of networks it was given, or of the smoothed one."""
    return isinstance(other, Transfer) or (isinstance(other, AdaptedAttack) and other.noise > 0)


def _few(attack: Attack, entries: Sequence[Entry]) -> str:
    """Why an attack is weak by its kind."""
    if attack.traits.minimum_norm:
        return "it looks for the smallest perturbation, and ends where it found none"
    return "it takes a single step" if _gradients(attack, entries) else "it takes no gradient"


def _beats(entries: Sequence[Entry], left: Sequence[Entry]) -> bool:
    """Return whether the other solves more samples, beyond noise."""
    pairs = [(mine, theirs) for mine, theirs in zip(entries, left, strict=True) if mine.get("correct") is not False]
    gained = sum(_open(mine) and theirs["outcome"] in BROKEN for mine, theirs in pairs)
    lost = sum(mine["outcome"] in BROKEN and _open(theirs) for mine, theirs in pairs)
    return gained - lost >= max(FEWEST, LEAST_GAIN * len(entries)) and more_often(gained, lost)


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
    remedy = Remedy(words="Fix the attack before its numbers at small budgets are read: its steps and loss first.")
    return [_finding("unbounded_fails", cause, seen, name, rows, entries, (remedy,))]


def _remedy(name: str, other: Attack) -> Remedy:
    call = call_of(other)
    words = f"Run {name} beside it, and count a sample as robust only where all fail."
    return Remedy(words=words, attack=None if call is None else call.changed(), beside=True)


def _gradients(attack: Attack, entries: Sequence[Entry]) -> float:
    """The most gradients a sample took; where nothing was recorded, 0 for attacks that need none, else many."""
    traces = [trace for entry in entries if (trace := entry.get("trace"))]
    if not attack.traits.gradients:
        return 0
    return max((trace.get("gradients") or 0 for trace in traces), default=SINGLE_STEP + 1)


def _open(entry: Entry) -> bool:
    """Return whether the sample was attacked, rightly, and not solved."""
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
