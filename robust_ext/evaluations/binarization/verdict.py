"""From a score to a verdict, by stated rules, with the reason in a sentence.

The rules, in order: (1) an attack that repairs at least two canaries attacks predicted labels, and fails; (2) without
planted problems, nothing is concluded; (3) with fewer than ``minimum_samples``, the score fails only when its one-sided
upper bound is below the threshold, and nothing passes; (4) a score below the threshold fails (the paper's rule, figure
2); (5) an R-ASR above ``maximum_random_score``, or whose interval overlaps the score's, makes the test too easy to
mean anything: inconclusive (section 4.3); (6) what is left passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from robust_ext.core.statistics import proportion_interval, sequential_decision, upper_bound
from robust_ext.evaluations.binarization.defense import TESTS
from robust_ext.evaluations.binarization.settings import BinarizationSettings

VERDICTS = ("passed", "failed", "inconclusive")


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A verdict with what it rests on.

    Args:
        verdict: ``"passed"``, ``"failed"`` or ``"inconclusive"``.
        reason: One sentence, for people.
        score: Share of planted problems that the attack solved; None without any.
        score_interval: Exact interval of it.
        random_score: The same of the random attack (R-ASR).
        random_score_interval: Exact interval of it.
    """

    verdict: str
    reason: str
    score: float | None
    score_interval: tuple[float, float] | None
    random_score: float | None
    random_score_interval: tuple[float, float] | None

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


def judge(
    *, found: int, random_found: int, samples: int, canaries: int, repaired: int, settings: BinarizationSettings
) -> Judgement:
    """Apply the rules.

    Args:
        found: Planted problems that the attack solved.
        random_found: Planted problems that the random attack solved.
        samples: Planted problems.
        canaries: Problems posed with the wrong label.
        repaired: Of these, how many the attack moved into the class of that label.
        settings: For thresholds and confidence.
    """
    interval = proportion_interval(found, samples, confidence=settings.confidence)
    random_interval = proportion_interval(random_found, samples, confidence=settings.confidence)
    verdict, reason = _decide(found, random_found, samples, canaries, repaired, interval, random_interval, settings)
    return Judgement(
        verdict=verdict,
        reason=reason,
        score=found / samples if samples else None,
        score_interval=interval,
        random_score=random_found / samples if samples else None,
        random_score_interval=random_interval,
    )


def _decide(
    found: int,
    random_found: int,
    samples: int,
    canaries: int,
    repaired: int,
    interval: tuple[float, float] | None,
    random_interval: tuple[float, float] | None,
    settings: BinarizationSettings,
) -> tuple[str, str]:
    if repaired >= 2:
        return "failed", (
            f"The attack moved {repaired} of {canaries} misclassified canaries into the class of their label: it "
            "attacks the model's predicted labels instead of the given ones, which repairs misclassified inputs and "
            "overstates robust accuracy."
        )
    if interval is None or random_interval is None:
        return "inconclusive", "No example could be planted, so nothing is known about the attack."
    score, random_score, bar = found / samples, random_found / samples, settings.threshold
    facts = f"It found {found} of {samples} planted examples ({score:.2f}); random search found {random_score:.2f}"
    if samples < settings.minimum_samples:
        bound = upper_bound(found, samples, error_rate=settings.error_rate)
        if bound < bar:
            return "failed", f"{facts}. Even on so few samples a score of {bar:g} can be ruled out."
        return (
            "inconclusive",
            f"{facts}. That is too few samples for a verdict; use at least {settings.minimum_samples}.",
        )
    if score < bar:
        no_better = " and no better than that of random search" if score <= random_score else ""
        compared = no_better or (
            " and hardly better than that of random search" if interval[0] <= random_interval[1] else ""
        )
        return "failed", (
            f"{facts}. A score below {bar:g}{compared} means that the attack misses adversarial examples that exist, "
            "so robustness measured with it cannot be trusted."
        )
    if random_score > settings.maximum_random_score or random_interval[1] >= interval[0]:
        harder = "Make the test harder (more inner points, a larger kappa)"
        why, remedy = (
            (f"an R-ASR above {settings.maximum_random_score:g}", harder)
            if random_score > settings.maximum_random_score
            else ("an R-ASR whose interval overlaps that of the score", f"{harder}, or use more samples")
        )
        return "inconclusive", f"{facts}: {why} means that the planted examples are too easy to find. {remedy}."
    sure = sequential_decision(found, samples, threshold=bar, error_rate=settings.error_rate) == "above"
    doubt = "" if sure else f" (so few samples leave room for a true score below {bar:g})"
    return "passed", f"{facts}. The attack finds what is there to be found in this model{doubt}."


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
    best = max(deciding, key=lambda attack: attack["score"] or 0.0)
    return best["reason"] if len(attacks) == 1 else f"Best of {len(attacks)} attacks, {best['name']}: {best['reason']}"


def pair_verdict(tests: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """The verdict on an attack, and why.

    Failed where it fails either test, passed where it passes both, else inconclusive.

    Args:
        tests: Its results in the regular and the inverted test.
    """
    verdicts = {test: result["verdict"] for test, result in tests.items()}
    reasons = " ".join(f"In the {test} test: {result['reason']}" for test, result in tests.items())
    if "failed" not in verdicts.values():
        verdict = "passed" if set(verdicts.values()) == {"passed"} else "inconclusive"
        return verdict, reasons
    failed = [test for test, verdict in verdicts.items() if verdict == "failed"]
    if len(failed) == 2:
        meaning = "It fails both tests: it finds neither what the detector lets pass nor what it detects."
    else:
        found, missed = (tests[test]["score"] for test in (_other(failed[0]), failed[0]))
        meaning = (
            f"It fails the {failed[0]} test ({_in_words(missed)}) and not the {_other(failed[0])} one "
            f"({_in_words(found)}): it ignores the detector, and finds only what happens to be on its side."
        )
    return "failed", f"{meaning} {reasons}"


def _other(test: str) -> str:
    return TESTS[1 - TESTS.index(test)]


def _in_words(score: float | None) -> str:
    return "nothing planted" if score is None else f"{score:.2f}"
