"""From a score to a verdict, by stated rules, with the reason in a sentence.

The rules, in order: (1) an attack that repairs at least two canaries attacks predicted labels, and fails; (2) without
planted problems, nothing is concluded; (3) with fewer than ``minimum_samples``, the score fails only when its one-sided
upper bound is below the threshold, and nothing passes; (4) a score below the threshold fails (the paper's rule, figure
2); (5) an R-ASR above ``maximum_random_score``, or whose interval overlaps the score's, makes the test too easy to
mean anything: inconclusive (section 4.3); (6) what is left passes. By rules 3 and 4 no attack fails that would not if
the points counted at which the network's logits are not finite: inconclusive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from robust_ext.core.statistics import proportion_interval, separating_trials, sequential_decision, upper_bound
from robust_ext.evaluations.binarization.advice import easier_to_plant, more_samples, settle
from robust_ext.evaluations.binarization.defense import TESTS
from robust_ext.evaluations.binarization.settings import BinarizationSettings

VERDICTS = ("passed", "failed", "inconclusive")


def judge(
    found: int,
    random_found: int,
    samples: int,
    *,
    planted: int,
    repaired: int,
    settings: BinarizationSettings,
    non_finite: int = 0,
    lost: str = "",
    inseparable: int = 0,
    unplanted: int = 0,
) -> dict[str, Any]:
    """The verdict with what it rests on: shares of planted problems solved, None without any, and exact intervals.

    Of ``samples`` problems the attack solved ``found`` and the random attack (R-ASR) ``random_found``; of ``planted``
    canaries, posed with the wrong label, the attack ``repaired`` some. In ``non_finite`` other problems it came to
    points at which the network's logits are not finite; ``lost`` is how many it was not run on and why, in words. In
    ``inseparable`` further samples no readout was found, in ``unplanted`` no planted point stayed adversarial.
    """
    interval = proportion_interval(found, samples, confidence=settings.confidence)
    random_interval = proportion_interval(random_found, samples, confidence=settings.confidence)
    if repaired >= 2:
        verdict = "failed"
        reason = (
            f"The attack moved {repaired} of {planted} misclassified canaries into the class of their label: it "
            "attacks the model's predicted labels instead of the given ones, which repairs misclassified inputs and "
            "overstates robust accuracy."
        )
    elif interval is None or random_interval is None:
        easier = easier_to_plant(settings, inseparable=inseparable, unplanted=unplanted)
        reason = f"No example could be planted, so nothing is known about the attack. To settle it: {easier}."
        verdict = "inconclusive"
    else:
        intervals, without = (interval, random_interval), inseparable + unplanted
        verdict, reason = _decide(found, random_found, samples, non_finite, intervals, settings, without=without)
    if non_finite:
        reason += (
            f" In {non_finite} of {samples} problems it came to points at which the network returns NaN or infinite "
            "logits, which is a fault of the network and counts as not found."
        )
    if lost:
        reason += f" {lost}; these were not attacked, and count as not found."
    return {
        "verdict": verdict,
        "reason": reason,
        "score": found / samples if samples else None,
        "score_interval": interval and list(interval),
        "random_score": random_found / samples if samples else None,
        "random_score_interval": random_interval and list(random_interval),
    }


def _decide(
    found: int,
    random_found: int,
    samples: int,
    non_finite: int,
    intervals: tuple[tuple[float, float], tuple[float, float]],
    settings: BinarizationSettings,
    *,
    without: int,
) -> tuple[str, str]:
    """Rules 3 to 6; in ``without`` further samples nothing was planted."""
    interval, random_interval = intervals
    # Where the network breaks down, the attack may not be to blame.
    most = found + non_finite
    score, random_score, bar = found / samples, random_found / samples, settings.threshold
    facts = f"It found {found} of {samples} planted examples ({score:.2f}); random search found {random_score:.2f}"
    if samples < settings.minimum_samples:
        bound = upper_bound(most, samples, error_rate=settings.error_rate)
        if bound < bar:
            return "failed", f"{facts}. Even on so few samples a score of {bar:g} can be ruled out."
        needed = settings.minimum_samples
        if score >= bar:
            needed = max(needed, separating_trials(random_score, score, confidence=settings.confidence) or 0)
        few = f"{facts}. That is too few samples for a verdict; use at least {settings.minimum_samples}."
        return "inconclusive", f"{few} To settle it: {more_samples(needed, planted=samples, lost=without)}."
    if score < bar <= most / samples:
        return "inconclusive", (
            f"{facts}. Whether it misses more is hidden by a network that breaks down. To settle it: mend the network, "
            "and run this again."
        )
    if score < bar:
        better = "no" if score <= random_score else "hardly" if interval[0] <= random_interval[1] else ""
        compared = f" and {better} better than that of random search" if better else ""
        return "failed", (
            f"{facts}. A score below {bar:g}{compared} means that the attack misses adversarial examples that exist, "
            "so robustness measured with it cannot be trusted."
        )
    if random_score > settings.maximum_random_score or random_interval[1] >= interval[0]:
        above = random_score > settings.maximum_random_score
        why = f"above {settings.maximum_random_score:g}" if above else "whose interval overlaps that of the score"
        return "inconclusive", (
            f"{facts}: an R-ASR {why} means that the planted examples are too easy to find. To settle it: "
            f"{settle(found, random_found, samples, settings, lost=without)}."
        )
    sure = sequential_decision(found, samples, threshold=bar, error_rate=settings.error_rate) == "above"
    doubt = "" if sure else f" (so few samples leave room for a true score below {bar:g})"
    return "passed", f"{facts}. The attack finds what was planted in this model{doubt}."


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
    """The verdict on an attack, by its results in the regular and the inverted test, and why.

    Failed where it fails either test, passed where it passes both, else inconclusive.
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
        other = TESTS[1 - TESTS.index(failed[0])]
        missed, found = (
            "nothing planted" if score is None else f"{score:.2f}"
            for score in (tests[test]["score"] for test in (failed[0], other))
        )
        meaning = (
            f"It fails the {failed[0]} test ({missed}) and not the {other} one ({found}): it ignores the detector, and "
            "finds only what happens to be on its side."
        )
    return "failed", f"{meaning} {reasons}"
