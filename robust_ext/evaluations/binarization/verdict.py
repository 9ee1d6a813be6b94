"""From a score to a verdict, by fixed rules, with the reason in a sentence.

The rules, in order:

1. An attack that repairs at least two canaries attacks predicted labels, and fails (section 4.2).
2. Without planted problems, nothing is known: inconclusive.
3. A score below ``threshold`` fails (the paper's rule, figure 2): the attack misses what is there. It takes two misses,
   because a single one may be chance; and where the score would not fail if the points counted at which the network's
   logits are not finite, the network may be to blame: inconclusive.
4. A pass is a statement about a rate, so samples must show that the rate is above ``proven_rate``; where they do not:
   inconclusive.
5. A pass means something only where random search finds little (section 4.3), so samples must show that its rate
   (R-ASR) is at most ``maximum_random_score``. Where they do not, rules 4 and 5 are applied to deeper problems that
   others than the attack proved, depth by depth; an attack that falls behind there fails. Where no depth is left:
   inconclusive.
6. An attack that uses gradients fails where these die in the head, which the test replaces, or where it misses what is
   planted at the logits behind it.
7. What is left passes.

:mod:`robust_ext.evaluations.binarization.rules` has what shows a rate, and docs/evidence/verdict_statistics.md how
often each rule is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from robust_ext.core.statistics import proportion_interval
from robust_ext.evaluations.binarization.defense import TESTS
from robust_ext.evaluations.binarization.reasons import easier_to_plant, explain, explain_head
from robust_ext.evaluations.binarization.rules import Rules, Solved
from robust_ext.evaluations.causes.finding import WEIGHTS

VERDICTS = ("passed", "failed", "inconclusive")
REPAIRED = 2
"""This many canaries moved into the class of their label show an attack on predicted labels."""
_PREDICTED_LABELS = (
    "The attack moved {repaired} of {planted} misclassified canaries into the class of their label: it attacks the "
    "model's predicted labels instead of the given ones, which repairs misclassified inputs and overstates robust "
    "accuracy."
)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counts of an attack's planted problems, and of samples without one."""

    problems: Sequence[Solved]  # The planted ones, and at greater depths, in order, those that others proved.
    canaries: int = 0  # Problems posed with the wrong label,
    repaired: int = 0  # how many of them the attack repaired.
    lost: str = ""  # How many problems it was not run on and why, as text.
    inseparable: int = 0  # Further samples for which no readout was found,
    unplanted: int = 0  # in which no planted point stayed adversarial,
    unfound: int = 0  # or in which the detector judged no point as the test needs.
    easier: str = ""  # Why a detector let nothing be planted, and what to change.
    behind: Solved | None = None  # Problems planted at the logits, for an attack that uses gradients.
    masking: str = ""  # How the head masks gradients, as a clause.


def judge(counts: Counts, rules: Rules) -> dict[str, Any]:
    """Return the verdict with what it rests on: shares of planted problems solved, None without any, and intervals."""
    first, level, depth = counts.problems[0], rules.settings.confidence, 1.0
    if counts.repaired >= REPAIRED:
        verdict, reason = "failed", _PREDICTED_LABELS.format(repaired=counts.repaired, planted=counts.canaries)
    elif not first.samples:
        ways = easier_to_plant(rules.settings, inseparable=counts.inseparable, unplanted=counts.unplanted)
        reason = "No example could be planted, so nothing is known about the attack. "
        reason += counts.easier or f"To settle it: {ways}."
        verdict = "inconclusive"
    else:
        verdict, at = rules.decide(counts.problems)
        without = counts.inseparable + counts.unplanted + counts.unfound
        reason, depth = explain(verdict, at, first, rules, without=without), at.depth
        if _stopped_at_head(verdict, counts, rules) and counts.behind is not None:
            verdict, reason = "failed", f"{reason} {explain_head(counts.behind, counts.masking)}"
    if first.non_finite:
        reason += (
            f" In {first.non_finite} of {first.samples} problems it came to points at which the network returns NaN or "
            "infinite logits, which is a fault of the network and counts as not found."
        )
    if counts.lost:
        reason += f" {counts.lost}; these were not attacked, and count as not found."
    interval = proportion_interval(first.found, first.samples, confidence=level)
    random_interval = proportion_interval(first.random_found, first.searched, confidence=level)
    return {
        "verdict": verdict,
        "reason": reason,
        "verdict_depth": depth,
        "score": first.found / first.samples if first.samples else None,
        "score_interval": interval and list(interval),
        "random_samples": first.searched,
        "random_score": first.random_score if first.searched else None,
        "random_score_interval": random_interval and list(random_interval),
    }


def _stopped_at_head(verdict: str, counts: Counts, rules: Rules) -> bool:
    """Return whether the head decides; an attack that fails already need not get through a sound one."""
    behind, masked = counts.behind, bool(counts.masking)
    if behind is None or not rules.stops_at_head(behind, masked=masked):
        return False
    return verdict == "passed" or ((masked or verdict != "failed") and rules.fails(behind.found, behind.samples))


def overall(verdicts: Sequence[str]) -> str:
    """The verdict on a set of attacks, used together: the best of them, since one strong attack is enough."""
    for verdict in ("passed", "inconclusive"):
        if verdict in verdicts:
            return verdict
    return "failed" if verdicts else "inconclusive"


def overall_reason(attacks: Sequence[Mapping[str, Any]]) -> str:
    """The reason of the attack that decides :func:`overall`, named where there are several."""
    verdict = overall([attack["verdict"] for attack in attacks])
    deciding = [attack for attack in attacks if attack["verdict"] == verdict]
    if not deciding:
        return "No attack was run."
    # Of equal scores the deepest.
    best = max(deciding, key=lambda attack: (attack["score"] or 0.0, attack.get("depth") or 0.0))
    return best["reason"] if len(attacks) == 1 else f"Best of {len(attacks)} attacks, {best['name']}: {best['reason']}"


def pair_verdict(tests: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """The verdict on an attack, by its results in the regular and the inverted test, and why.

    Failed where it fails either test, passed where it passes both, else inconclusive.
    """
    verdicts = {test: result["verdict"] for test, result in tests.items()}
    reasons = " ".join(f"In the {test} test: {result['reason']}" for test, result in tests.items())
    if "failed" not in verdicts.values():
        verdict = "passed" if set(verdicts.values()) == {"passed"} else "inconclusive"
        return verdict, reasons
    failed = [test for test, verdict in verdicts.items() if verdict == "failed"]
    blind = all(misses_most(tests[test]) for test in failed)
    if len(failed) == 2:
        shown = " and ".join(f"{tests[test]['score'] or 0:.2f} in the {test} one" for test in failed)
        meaning = f"It fails both tests: {shown}."
        if blind:
            meaning = "It fails both tests: it finds neither what the detector lets pass nor what it detects."
    else:
        other = TESTS[1 - TESTS.index(failed[0])]
        missed, found = (
            "nothing planted" if score is None else f"{score:.2f}"
            for score in (tests[test]["score"] for test in (failed[0], other))
        )
        meaning = f"It fails the {failed[0]} test ({missed}) and not the {other} one ({found})"
        if blind and tests[other]["score"] is not None:
            meaning += ", like an attack that ignores the detector and finds only what happens to be on its side."
        else:
            meaning += "."
    return "failed", f"{meaning} {reasons}"


def misses_most(test: Mapping[str, Any]) -> bool:
    """Return whether an attack surely finds less than half of the planted points, by its interval if any.

    Otherwise what it misses is no sign that it ignores a detector.
    """
    interval = test.get("score_interval")
    highest = interval[1] if interval else test["score"]
    return highest is not None and highest < 0.5


def combine_tests(
    contents: Mapping[str, Mapping[str, Any]], described: Mapping[str, Any], *, time: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``result.json`` of the regular and the inverted test together, with their shared settings.

    ``time`` is what both took.
    """
    regular = contents["regular"]
    attacks = []
    for number, attack in enumerate(regular["attacks"]):
        tests = {test: content["attacks"][number] for test, content in contents.items()}
        verdict, reason = pair_verdict(tests)
        scores = [one["score"] for one in tests.values()]
        attacks.append(
            {
                **{key: attack[key] for key in ("name", "description", "target")},
                "score": None if None in scores else min(scores),
                "verdict": verdict,
                "reason": reason,
                "tests": tests,
            }
        )
    return {
        **regular,
        "verdict": overall([attack["verdict"] for attack in attacks]),
        "reason": overall_reason(attacks),
        "attacks": attacks,
        "findings": _of_both(contents),
        "witnesses": [{"test": test, **row} for test, one in contents.items() for row in one["witnesses"]],
        "warnings": [f"In the {test} test: {words}" for test, one in contents.items() for words in one["warnings"]],
        "settings": {**regular["settings"], **described},
        "time": dict(time),
    }


def _of_both(contents: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The findings of both tests, one of each cause and attack."""
    once = dict[tuple[object, ...], dict[str, Any]]()
    for content in contents.values():
        for finding in content["findings"]:
            once.setdefault((finding["attack"], finding["code"], finding["layer"]), finding)
    return sorted(once.values(), key=lambda finding: WEIGHTS.index(finding["weight"]))
