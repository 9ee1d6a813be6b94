"""Remedies, run on the same samples and seeds as the attack that they are for: what they change, and whether at all.

What an attack draws follows from its name, which it keeps.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.base import Attack
from robust_ext.core.errors import IsolationError, RobustExtError
from robust_ext.evaluations.causes.finding import Finding, Remedy
from robust_ext.evaluations.causes.rewriting import call_of
from robust_ext.evaluations.diagnosis.examining import Examined, Examiner, robust_share
from robust_ext.registry.attack import as_attack

# A remedy is confirmed where so many more samples or problems are solved with it, or where so large a share of the
# rows come so much closer to another class, in units of the largest logit.
_MORE_SOLVED, _SHARE, _CLOSER = 2, 0.9, 0.01
# Test score at which nothing further is tried for an attack, and how many remedies are tried for it at most.
_MENDED, _MOST = 0.95, 4


@dataclass(frozen=True, kw_only=True)
class Trials:
    """What remedies are tried on."""

    attacks: Mapping[str, Attack]
    before: Mapping[str, Examined]  # By attack; none where the model could not be evaluated
    examiner: Examiner | None  # None likewise
    in_eval_mode: Callable[[], Examiner | None]  # One of the model in eval mode, where that can be evaluated

    def run(self, findings: Sequence[Finding]) -> Iterator[dict[str, Any]]:
        """Try the remedies that can be run, in order, until one makes an attack find what is planted; plain values."""
        seen, mended, counts = set[str](), set[str](), Counter[str]()
        for finding in findings:
            names = list(self.attacks) if finding.attack is None else [finding.attack]
            for remedy in finding.remedies if finding.weight != "low" else ():
                for name in names if self._runs(remedy) else ():
                    key = f"{name} {remedy.attack} {sorted(remedy.view.items())} {remedy.evaluate}"
                    if key in seen or name in mended or counts[name] >= _MOST:
                        continue
                    seen.add(key)
                    counts[name] += 1
                    entry = self._try(finding, remedy, name)
                    if entry["confirmed"] and (entry["after"]["score"] or 0.0) >= _MENDED:
                        mended.add(name)
                    yield entry

    def _runs(self, remedy: Remedy) -> bool:
        """Whether a remedy can be run on the model, which may have to be mended first."""
        return remedy.evaluate or (remedy.runnable and self.examiner is not None)

    def _try(self, finding: Finding, remedy: Remedy, name: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"code": finding.code, "attack": name, "remedy": remedy.to_dict(), "text": None}
        before = self.before.get(name)
        entry |= {"before": None if before is None else numbers(before, self.examiner), "after": None}
        entry |= {"confirmed": False, "error": None}
        examiner = self.in_eval_mode() if remedy.evaluate else self.examiner
        if examiner is None:
            return {**entry, "error": "the model cannot be evaluated in eval mode either"}
        try:
            attack = remedied(self.attacks[name], remedy)
            call = call_of(attack)
            entry["text"] = None if call is None else call.changed()
            after = examiner.examine(attack.named(name))
        except IsolationError:
            raise
        except RobustExtError as error:
            return {**entry, "error": str(error)}
        if after.ran.error is not None:
            return {**entry, "error": after.ran.error}
        return {**entry, "after": numbers(after, examiner), "confirmed": moved(before, after)}


def remedied(attack: Attack, remedy: Remedy) -> Attack:
    """The attack as the remedy has it."""
    base = attack if remedy.attack is None else as_attack(remedy.attack)
    return AdaptedAttack(attack=base, **remedy.view) if remedy.view else base


def evaluated(module: Any) -> Any:
    """A copy of a module in eval mode."""
    return copy.deepcopy(module).eval()


def numbers(examined: Examined, examiner: Examiner | None) -> dict[str, Any]:
    """Robust accuracy and test score of an attack, None where there is none, and what they are shares of."""
    planted, ran = examined.planted, examined.ran
    robust = None
    if examiner is not None and ran.error is None:
        robust = robust_share(ran, examiner.given.correct.tolist())[0] / len(ran.records)
    return {
        "robust_accuracy": robust,
        "samples": len(ran.records),
        "score": None if planted is None else planted["score"],
        "planted": 0 if planted is None else planted["samples"],
        "error": ran.error,
    }


def moved(before: Examined | None, after: Examined) -> bool:
    """Whether a remedy changes what it is to change: more is solved, or the margin rises nearly everywhere."""
    if _solved(after) >= _solved(before) + _MORE_SOLVED:
        return True
    if before is None or before.ran.error is not None:
        return False
    closer = [
        now["best"] > then["best"] + _CLOSER * (then.get("scale") or 0.0)
        for then, now in _traces(before, after)
        if then.get("best") is not None and now.get("best") is not None
    ]
    return bool(closer) and sum(closer) >= _SHARE * len(closer)


def _solved(examined: Examined | None) -> int:
    """How many samples and planted problems an attack solved; none where it raised or was not run."""
    if examined is None or examined.ran.error is not None:
        return 0
    planted: int = sum(entry["outcome"] == "found" for entry in examined.planted_entries)
    return planted + sum(map(examined.ran.solved, range(len(examined.ran.records))))


def _traces(before: Examined, after: Examined) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The traces of an attack without and with a remedy, sample by sample."""
    for then, now in zip(before.ran.records, after.ran.records, strict=True):
        if then.get("trace") and now.get("trace"):
            yield then["trace"], now["trace"]
