"""From what was measured of case studies to ``result.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from robust_ext.casestudies.base import CaseStudy, Measurement
from robust_ext.engine.identity import versions
from robust_ext.evaluations.binarization.verdict import REPAIRED

_TEST = ("score", "score_interval", "random_score", "random_score_interval", "samples", "canaries", "depth", "depths")


def make_content(
    studies: Sequence[Mapping[str, Any]],
    *,
    samples: int,
    settings: Mapping[str, Any],
    seed: int,
    time: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything ``result.json`` holds."""
    return {
        "kind": "case_studies",
        "studies": list(studies),
        "flagged": sum(
            study["recipes"]["weak"]["flagged_by"] is not None and study["mechanism"]["present"] for study in studies
        ),
        "passed": sum(study["recipes"]["right"]["verdict"] == "passed" for study in studies),
        "samples": samples,
        "settings": dict(settings),
        "versions": versions(),
        "seed": seed,
        "time": dict(time),
    }


def study_entry(
    study: CaseStudy,
    *,
    measurement: Measurement,
    recipes: Mapping[str, Mapping[str, Any]],
    epsilon: float,
    clean: float,
    seconds: float,
) -> dict[str, Any]:
    """One study: what it is, what was measured, and what became of both recipes."""
    judged = {kind: {**_EMPTY, **recipe} for kind, recipe in recipes.items()}
    for recipe in judged.values():
        recipe["flagged_by"] = flagged_by(recipe, study.causes)
    return {
        "title": study.title,
        "source": study.source,
        "notes": study.notes,
        "epsilon": epsilon,
        "clean_accuracy": clean,
        "mechanism": asdict(measurement),
        "published": asdict(study.published),
        "causes": list(study.causes),
        "recipes": judged,
        "seconds": seconds,
    }


_EMPTY: Mapping[str, Any] = {
    "verdict": "refused",
    "reason": "",
    "findings": [],
    "hardness": None,
    "tests": {},
    **dict.fromkeys(_TEST),
}


def binarization_entry(content: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of the binarization test of one attack; with a detector, of the worse of both tests."""
    attack = content["attacks"][0]
    tests = attack.get("tests", {})
    worst = min(tests.values(), key=lambda test: -1.0 if test["score"] is None else test["score"]) if tests else attack
    shown = {name: worst.get(name) for name in _TEST}
    if tests:
        shown["random_score"] = max((test["random_score"] or 0.0) for test in tests.values())
    return {
        "verdict": attack["verdict"],
        "reason": attack["reason"],
        "findings": content["findings"],
        "hardness": worst["hardness"],
        "tests": {name: {key: test.get(key) for key in ("verdict", *_TEST)} for name, test in tests.items()},
        **shown,
    }


def flagged_by(recipe: Mapping[str, Any], causes: Sequence[str]) -> str | None:
    """What shows that a recipe is not to be trusted: a refusal, canaries, the score, or a finding of its cause."""
    if recipe["refused"] is not None:
        return "refused"
    if (recipe["canaries"] or {}).get("repaired", 0) >= REPAIRED:
        return "canaries"
    if recipe["verdict"] == "failed":
        return "score"
    found = [finding["code"] for finding in recipe["findings"] if finding["weight"] != "low"]
    return next((f"diagnosis: {code}" for code in found if code in causes), None)
