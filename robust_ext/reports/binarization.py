"""The result of a binarization test, with one or two tests an attack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.engine.verify import LOST, OUTCOMES
from robust_ext.reports import findings
from robust_ext.reports.drawing import RANDOM, SCORE, Drawing
from robust_ext.reports.hardness import calibration_plots, depth_plots, depth_words, hardness_plots
from robust_ext.reports.plots import Bar, bar_plot
from robust_ext.reports.tabular import Line, paragraph, table
from robust_ext.reports.wording import attack_title, interval, plain, seconds, share

_HEADER = ("verdict", "attack", "test score", "R-ASR", "depth", "planted", "canaries", "seconds")
_VERDICTS = ("passed", "failed", "inconclusive")


def text(result: Mapping[str, Any]) -> str:
    """A row an attack, or two where it went through the regular and the inverted test, and sentences below.

    A row has the verdict, the test score and the random attack's success rate (R-ASR) with their intervals, the depth
    up to which it solves what witnesses prove, the planted problems, the canaries it repaired of those there were, and
    its seconds. The sentences are reasons, findings of the diagnosis that no reason states, warnings and the verdict.
    """
    _check(result)
    threshold = result["settings"]["threshold"]
    one_target = len({attack["target"] for attack in result["attacks"]}) == 1
    rows = [_HEADER, *(_row(attack, threshold, one_target) for attack in _tests(result)["attacks"])]
    below = []
    for attack in result["attacks"]:
        # The verdict states the reason of a single attack.
        if "tests" in attack or attack["reason"] != result["reason"]:
            both = f" {attack['verdict']}, score {share(attack['score'], threshold)}." if "tests" in attack else ""
            below += paragraph(f"{attack_title(attack)}:{both} {plain(attack['reason'])}")
    setup, others = findings.divided(result.get("findings", ()))
    above = findings.lines(setup)
    unstated, leading = _unstated(result), findings.leading(others)
    below += findings.lines(unstated)
    for warning in result.get("warnings", ()):
        below += paragraph(f"Warning: {plain(warning)}")
    verdict = paragraph(f"Verdict: {result['verdict'].upper()}. {plain(result['reason'])}")
    verdict += findings.first_to_paste(one for one in leading if one not in unstated)
    lines = [*above, *([""] if above else []), *table(rows, words=(0, 1, 2, 3)), ""]
    return "\n".join([*lines, *below, *([""] if below else []), *verdict, ""])


def context(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the page's content."""
    _check(result)
    tests = _tests(result)
    pairs = [] if tests is result else result["attacks"]
    return {
        "result": tests,
        "headline": _headline(result),
        "whole": result,
        "tested_twice": pairs,
        "OUTCOMES": {key: words for key, words in OUTCOMES.items() if _shown(key, tests, pairs=bool(pairs))},
        "threshold": result["settings"]["threshold"],
        "score_plot": _score_plot(tests),
        "depths": list(depth_plots(tests)),
        "depth_words": depth_words,
        "of_fewer": of_fewer,
        "hardness": list(hardness_plots(tests)),
        "calibration": list(calibration_plots(tests)),
    }


def _headline(result: Mapping[str, Any]) -> str:
    """The verdict, with how many attacks pass where only some do."""
    passed, every = sum(attack["verdict"] == "passed" for attack in result["attacks"]), len(result["attacks"])
    return str(result["verdict"]) if passed in (0, every) else f"{result['verdict']}: {passed} of {every} attacks pass"


def _unstated(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The findings that lead, but for those that a reason states."""
    reasons = " ".join(attack["reason"] for attack in result["attacks"])
    stated = {finding["code"] for finding in result.get("findings", ()) if findings.sentence(finding) in reasons}
    return [
        finding
        for finding in findings.leading(findings.divided(result.get("findings", ()))[1])
        if finding["code"] not in stated
    ]


def _shown(outcome: str, result: Mapping[str, Any], *, pairs: bool) -> bool:
    """Return whether an outcome is shown: those that any test may have, and others where they occurred."""
    if outcome == "rejected":
        return pairs
    rare = outcome in ("non_finite_logits", *LOST)
    return not rare or any(attack["outcomes"].get(outcome) for attack in result["attacks"])


def _check(result: Mapping[str, Any]) -> None:
    for owner in (result, *result["attacks"]):
        if owner.get("verdict") not in _VERDICTS:
            raise InvalidArgumentError("verdict", owner.get("verdict"), "one of " + ", ".join(map(repr, _VERDICTS)))


def _tests(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """A result in which every test of every attack is an entry; a result of one test is returned as it is."""
    if not any("tests" in attack for attack in result["attacks"]):
        return result
    entries = [
        {**one, "name": f"{attack['name']} ({test})"}
        for attack in result["attacks"]
        for test, one in attack["tests"].items()
    ]
    return {**result, "attacks": entries}


def _row(attack: Mapping[str, Any], threshold: float, one_target: bool) -> Line:
    """The cells of one attack, in the order of the header; a target that all share leaves room for the name."""
    canaries = attack["canaries"]
    return (
        attack["verdict"],
        plain(attack["name"]) if one_target else attack_title(attack),
        f"{share(attack['score'], threshold)} {interval(attack['score_interval'], decimals=2)}".rstrip(),
        f"{share(attack['random_score'], threshold)} {interval(attack['random_score_interval'], decimals=2)}".rstrip()
        + of_fewer(attack),
        depth_words(attack),
        str(attack["samples"]),
        f"{canaries['repaired']} of {canaries['planted']}" if canaries["planted"] else "-",
        seconds(attack["seconds"]["total"]),
    )


def of_fewer(attack: Mapping[str, Any]) -> str:
    """Describe the number of problems behind an R-ASR, where random search did not run on all."""
    searched = attack.get("random_samples", attack["samples"])
    return "" if searched == attack["samples"] else f" of {searched}"


def _score_plot(result: Mapping[str, Any]) -> Drawing:
    """Bars of every attack's test score and R-ASR, with their intervals and the threshold."""
    threshold = result["settings"]["threshold"]

    def bar(attack: Mapping[str, Any], kind: str, words: str, colour: str) -> Bar:
        value = attack[kind]
        shown = "no" if value is None else share(value, threshold)
        parts = [] if value is None else [(value, colour)]
        return Bar(parts=parts, words=f"{shown} {words}", hatched=colour == RANDOM, interval=attack[f"{kind}_interval"])

    rows = [
        (attack_title(attack), [bar(attack, "score", "score", SCORE), bar(attack, "random_score", "R-ASR", RANDOM)])
        for attack in result["attacks"]
    ]
    return bar_plot(
        rows,
        axis="share of planted problems solved",
        label="Test score and R-ASR of each attack",
        prefix="score",
        line=(threshold, f"pass from {threshold:g}"),
    )
