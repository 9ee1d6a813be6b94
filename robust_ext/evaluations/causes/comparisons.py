"""Attacks on the same samples against one another: where what is weaker finds more, the stronger one is at fault.

Sources of the comparisons: Athalye, Carlini, Wagner, "Obfuscated Gradients Give a False Sense of Security" (2018),
section 3.1; Carlini et al., "On Evaluating Adversarial Robustness" (2019), section 4; Pintor et al., "Indicators of
Attack Failure" (2022), for transfer and unbounded attacks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

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


_CAUSES = {
    "loop_at_fault": "{other}, which follows gradients of the same model, solves samples that the attack misses: the "
    "gradients are useful, so the fault lies in the attack's own loop, loss or step.",
    "weaker_kind": "{other} solves samples that the attack misses: {few}, so its number does not measure robustness.",
    "transfer_wins": "Examples made for another model ({other}) solve samples that the attack misses: another model's "
    "gradients are more useful than its own.",
    "gradient_free_wins": "{other}, which uses no gradients, solves samples that the attack misses: gradients mislead "
    "it.",
    "single_step_wins": "A single step ({other}) solves samples that the attack misses with many steps.",
    "random_wins": "Random search solves samples that the attack misses, within the same ball.",
    "larger_budget_less": "It finds less with a larger budget, although everything that it found before is still "
    "within reach.",
    "unbounded_fails": "It fails even with the whole range of inputs as its budget, which certainly holds other "
    "classes.",
}
# Evidence against the gradients, unless attacks that follow the same ones find it too.
_MISLED = ("gradient_free_wins", "transfer_wins")
# An attack may lose to a stronger one by chance: these take a test of the samples that only one of the two solves.
_OF_STRENGTH = ("loop_at_fault", "weaker_kind")


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
    runs = {name: _Run(name, attacks[name], entries) for name, entries in entries_by_name.items()}
    for name in entries_by_name if judged is None else judged:
        mine, others = runs[name], [one for other, one in runs.items() if other != name]
        found += _against(mine, others, strongest=judged is not None)
        if more := (larger or {}).get(name, ()):
            wider = replace(mine, entries=more)
            rows = [row for row, one in enumerate(mine.entries) if one["outcome"] in BROKEN and wider.is_open(row)]
            if wider.enough(rows):
                seen = f"{len(rows)} samples were solved with the smaller budget, and not with the larger one."
                remedy = Remedy(words="Scale steps and starts with epsilon, and return the best point of the path.")
                found.append(wider.finding("larger_budget_less", seen, rows, [remedy]))
        free = replace(mine, entries=(unbounded or {}).get(name, ()))
        if len(rows := free.unsolved) >= max(FEWEST, UNBOUNDED * len(free.entries)):
            seen = f"{len(rows)} of {len(free.entries)} samples stay unsolved with any perturbation allowed."
            remedy = Remedy(
                words="Fix the attack before you use its numbers at small budgets: begin with its steps and its loss."
            )
            found.append(free.finding("unbounded_fails", seen, rows, [remedy]))
    return ranked(found)


@dataclass(frozen=True)
class _Run:
    """An attack with what it left of the samples, which are known by their rows."""

    name: str
    attack: Attack
    entries: Sequence[Entry]

    def is_open(self, row: int) -> bool:
        """Return whether a sample was attacked, rightly, and not solved."""
        entry = self.entries[row]
        return entry["outcome"] not in (*BROKEN, *LOST) and entry.get("correct") is not False

    def solves(self, row: int) -> bool:
        return self.entries[row]["outcome"] in BROKEN

    @cached_property
    def unsolved(self) -> list[int]:
        return [row for row in range(len(self.entries)) if self.is_open(row)]

    @cached_property
    def gradients(self) -> float:
        """The most gradients a sample took; where nothing was recorded, 0 for attacks that need none, else many."""
        traces = [trace for entry in self.entries if (trace := entry.get("trace"))]
        if not self.attack.traits.gradients:
            return 0
        return max((trace.get("gradients") or 0 for trace in traces), default=SINGLE_STEP + 1)

    @property
    def transfers(self) -> bool:
        """True if its gradients are those of another model: of networks it was given, or of the smoothed one."""
        attack = self.attack
        return isinstance(attack, Transfer) or (isinstance(attack, AdaptedAttack) and attack.noise > 0)

    def enough(self, rows: Sequence[int]) -> bool:
        return len(rows) >= max(FEWEST, OF_ALL * len(self.entries))

    def finding(self, code: str, seen: str, rows: Sequence[int], found: Sequence[Remedy], other: str = "") -> Finding:
        if self.attack.traits.minimum_norm:
            few = "it looks for the smallest perturbation, and ends where it found none"
        else:
            few = "it takes a single step" if self.gradients else "it takes no gradient"
        return Finding(
            code=code,
            cause=_CAUSES[code].format(other=other, few=few),
            evidence=(seen,),
            attack=self.name,
            samples=len(rows),
            of=max(len(self.unsolved), len(rows)),
            remedies=tuple(found),
        )


def _against(mine: _Run, others: Sequence[_Run], *, strongest: bool) -> list[Finding]:
    """The strongest evidence of each kind; what others find by the same gradients does not speak against these."""
    kinds = {one.name: _kind(mine, one) for one in others}
    won = {one.name: {row for row in mine.unsolved if one.solves(row)} for one in others}
    beaten = {one.name for one in others if strongest and _beats(mine, one)}
    stepping = strongest and mine.gradients > SINGLE_STEP
    follow = [one.name for one in others if stepping and not one.transfers and one.gradients]

    def apart(other: str, past: Iterable[str]) -> list[int]:
        """The samples that it solves, and none of the past ones."""
        return sorted(won[other].difference(*(won[one] for one in past)))

    def shows(other: str, past: Iterable[str], closest: Iterable[str]) -> bool:
        weak = kinds[other] not in _OF_STRENGTH and mine.enough(apart(other, past))
        return weak or (other in beaten and len(apart(other, closest)) >= FEWEST)

    winners = [other for other in follow if shows(other, (), ())]
    reached = set[int]().union(*(won[other] for other in winners))
    found, best = [], dict[str, tuple[_Run, list[int]]]()
    rows = [row for row in mine.unsolved if mine.entries[row].get("random_found") and row not in reached]
    seen = f"of {len(mine.unsolved)} samples that it did not solve were solved by"
    if mine.enough(rows):
        words = f"{len(rows)} {seen} random points."
        found.append(mine.finding("random_wins", words, rows, remedies.for_flat(mine.attack)))
    for one in others:
        code = kinds[one.name]
        past, closest = (winners, follow) if code in _MISLED else ((), ())
        rows = apart(one.name, past)
        if shows(one.name, past, closest) and (code not in best or len(rows) > len(best[code][1])):
            best[code] = one, rows
    for code, (one, rows) in best.items():
        call, flat = call_of(one.attack), remedies.for_flat(mine.attack)[:1] if code in _MISLED else ()
        words = f"Run {one.name} as well, and count a sample as robust only if every attack fails."
        run = Remedy(words=words, attack=None if call is None else call.changed(), beside=True)
        found.append(mine.finding(code, f"{len(rows)} {seen} {one.name}.", rows, [run, *flat], one.name))
    return found


def _kind(mine: _Run, other: _Run) -> str:
    """Return the meaning of the other attack's win."""
    # Without steps to be misled on, losing to another is no symptom of a fault.
    if mine.gradients <= SINGLE_STEP:
        return "weaker_kind"
    if other.transfers:
        return "transfer_wins"
    if other.gradients == 0:
        return "gradient_free_wins"
    if other.gradients <= SINGLE_STEP:
        return "single_step_wins"
    return "weaker_kind" if mine.attack.traits.minimum_norm else "loop_at_fault"


def _beats(mine: _Run, other: _Run) -> bool:
    """Return whether the other solves more samples, beyond noise."""
    rows = [row for row, one in enumerate(mine.entries) if one.get("correct") is not False]
    gained = sum(mine.is_open(row) and other.solves(row) for row in rows)
    lost = sum(mine.solves(row) and other.is_open(row) for row in rows)
    return gained - lost >= max(FEWEST, LEAST_GAIN * len(mine.entries)) and more_often(gained, lost)
