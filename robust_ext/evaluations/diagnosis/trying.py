"""Remedies, run on the same samples and seeds as the attack that they are for: what they change, and whether at all.

What an attack draws follows from its name, which it keeps. A remedy is judged by what is solved on the model that was
given, in any view of it that the attack is shown: beyond noise, by a test of the samples and planted problems that are
solved either before or after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.base import Attack
from robust_ext.core.errors import IsolationError, OutOfTimeError, RobustExtError
from robust_ext.core.statistics import more_often
from robust_ext.engine.identity import describe
from robust_ext.evaluations.causes.finding import Finding, Remedy
from robust_ext.evaluations.causes.rewriting import call_of
from robust_ext.evaluations.diagnosis.examination import Examination
from robust_ext.evaluations.diagnosis.examining import Examined, Examiner
from robust_ext.registry.attack import as_attack

OUTCOMES = ("confirmed", "finds more", "within noise", "changes nothing", "worse", "raised")
"""What remedies may do, those of use first. ``"confirmed"``: the same attack solves more, beyond noise; ``"finds
more"``: another attack in its place does, which says nothing of the cause."""
HELPED = OUTCOMES[:2]
"""Those of use."""
# Test score at which nothing further is tried for an attack, and how many remedies are tried for it at most.
_ENOUGH, _MOST = 0.95, 4


@dataclass(frozen=True, kw_only=True)
class Trials:
    """The setting in which remedies are tried; ``in_eval_mode`` runs attacks on the model in eval mode, if it can."""

    attacks: Mapping[str, Attack]
    examination: Examination
    in_eval_mode: Callable[[], Examiner | None]

    def run(self, findings: Sequence[Finding]) -> Iterator[dict[str, Any]]:
        """Try the remedies that can be run, in order, until one makes an attack find the planted points; plain values.

        Raises:
            OutOfTimeError: The time was over before all of them were tried.
        """
        seen, solved, counts = set[tuple[str, str]](), set[str](), Counter[str]()
        for finding in findings:
            for remedy in finding.remedies if finding.weight != "low" else ():
                # The model may have to be put into eval mode first.
                runs = remedy.evaluate or (remedy.runnable and self.examination.examiner is not None)
                for name in _about(finding, self.attacks) if runs else ():
                    key = name, made_of(self.attacks[name], remedy)
                    if key in seen or name in solved or counts[name] >= _MOST:
                        continue
                    seen.add(key)
                    counts[name] += 1
                    entry = self._try(finding, remedy, name)
                    if entry["outcome"] in HELPED and (entry["after"]["score"] or 0.0) >= _ENOUGH:
                        solved.add(name)
                    yield entry

    def _try(self, finding: Finding, remedy: Remedy, name: str) -> dict[str, Any]:
        before, mine = self.examination.attacks.get(name), self.examination.examiner
        entry: dict[str, Any] = {
            "code": finding.code,
            "attack": name,
            "remedy": remedy.to_dict(),
            "text": None,
            "before": None if before is None else _numbers(before, mine),
            "after": None,
            "outcome": "raised",
            "confirmed": False,
            "beside": [],
            "error": None,
        }
        examiner = self.in_eval_mode() if remedy.evaluate else mine
        if examiner is None:
            return {**entry, "error": "the model cannot be evaluated in eval mode either"}
        try:
            attack = _remedied(self.attacks[name], remedy)
            entry["text"] = _text(attack)
            after = examiner.examine(attack.named(name))
        except (IsolationError, OutOfTimeError):
            raise
        except RobustExtError as error:
            return {**entry, "error": str(error)}
        if after.cut:
            raise OutOfTimeError("the time that was given is over")
        if after.ran.error is not None:
            return {**entry, "error": after.ran.error}
        outcome = outcome_of(before, after)
        if outcome == "confirmed" and not _same(self.attacks[name], attack):
            outcome = "finds more"
        entry |= {"after": _numbers(after, examiner), "outcome": outcome, "confirmed": outcome == "confirmed"}
        if outcome == "confirmed" and examiner.settings.references:
            # The reference attacks on the same samples, through the same view of the model.
            known = self.examination.references if examiner is mine else {}
            entry["beside"] = [
                {"name": ran.name, "text": _text(ran.attack), "robust_accuracy": ran.accuracy(examiner.correct)}
                for ran in examiner.strongest(attack, known)
                if ran.error is None
            ]
        return entry


def _about(finding: Finding, attacks: Mapping[str, Attack]) -> list[str]:
    return list(attacks) if finding.attack is None else [finding.attack]


def _text(attack: Attack) -> str | None:
    call = call_of(attack)
    return None if call is None else call.changed()


def _remedied(attack: Attack, remedy: Remedy) -> Attack:
    """The attack as the remedy has it."""
    base = attack if remedy.attack is None else as_attack(remedy.attack)
    return AdaptedAttack(attack=base, **remedy.view) if remedy.view else base


def made_of(attack: Attack, remedy: Remedy) -> str:
    """Return the attack of a remedy: of two remedies with the same attack, one is tried."""
    try:
        made = describe(_remedied(attack, remedy))
    except RobustExtError:
        made = str(remedy.attack)
    return f"{made} in eval mode" if remedy.evaluate else made


def reordered(
    findings: Sequence[Finding], tried: Sequence[Mapping[str, Any]], attacks: Mapping[str, Attack]
) -> list[Finding]:
    """Findings with what became of each remedy that was tried; those that did not help come last, the worst at the end.

    What became of a remedy is known wherever it is proposed for the same attack.
    """
    known = {
        (one["attack"], made_of(attacks[one["attack"]], Remedy.from_dict(one["remedy"]))): one["outcome"]
        for one in tried
    }

    def marked(finding: Finding, remedy: Remedy) -> Remedy:
        names = _about(finding, attacks) if remedy.runnable else ()
        found = [known.get((name, made_of(attacks[name], remedy)), "") for name in names]
        return replace(remedy, tried=min(found, key=rank, default=""))

    return [
        replace(
            one, remedies=tuple(sorted((marked(one, each) for each in one.remedies), key=lambda each: rank(each.tried)))
        )
        for one in findings
    ]


def rank(outcome: str) -> float:
    """The place of what became of a remedy; what was not tried comes before what did not help."""
    return OUTCOMES.index(outcome) if outcome else OUTCOMES.index("within noise") - 0.5


def _same(attack: Attack, other: Attack) -> bool:
    """Return whether another attack is the same one with other settings, or on another view of the model."""
    while isinstance(other, AdaptedAttack):
        other = other.attack
    while isinstance(attack, AdaptedAttack):
        attack = attack.attack
    calls = call_of(attack), call_of(other)
    if calls[0] is None or calls[1] is None:
        return attack is other
    return (calls[0].scope, calls[0].name) == (calls[1].scope, calls[1].name)


def _numbers(examined: Examined, examiner: Examiner | None) -> dict[str, Any]:
    """Robust accuracy and test score of an attack, None without one, and what they are shares of."""
    planted, ran = examined.planted, examined.ran
    return {
        "robust_accuracy": None if examiner is None else ran.accuracy(examiner.correct),
        "samples": len(ran.records),
        "score": None if planted is None else planted["score"],
        "planted": 0 if planted is None else planted["samples"],
        "error": ran.error,
    }


def outcome_of(before: Examined | None, after: Examined) -> str:
    """Return one of :data:`OUTCOMES`, by the solved samples, planted problems, and both together."""
    pairs = []
    for one, other in zip(_solved(before), _solved(after), strict=True):
        gained = sum(solved and not one.get(row, False) for row, solved in other.items())
        pairs.append((gained, sum(one.get(row, False) and not solved for row, solved in other.items())))
    gained, lost = (sum(counts) for counts in zip(*pairs, strict=True))
    pairs.append((gained, lost))
    worse = any(more_often(down, up) for up, down in pairs if down)
    if not worse and any(more_often(up, down) for up, down in pairs if up):
        return "confirmed"
    if worse or lost > gained:
        return "worse"
    return "within noise" if gained > lost else "changes nothing"


def _solved(examined: Examined | None) -> tuple[dict[int, bool], dict[int, bool]]:
    """Return which samples and which planted problems an attack solved; empty where it raised or did not run."""
    if examined is None or examined.ran.error is not None:
        return {}, {}
    planted = {row: entry["outcome"] == "found" for row, entry in enumerate(examined.planted_entries)}
    return {row: examined.ran.solved(row) for row in range(len(examined.ran.records))}, planted
