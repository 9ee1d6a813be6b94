"""The result of case studies, as an object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from robust_ext.evaluations.binarization.verdict import REPAIRED
from robust_ext.evaluations.result import EvaluationResult, bounds_of
from robust_ext.reports.tabular import Columns, Row

_TEST = ("score", "score_interval", "random_score", "random_score_interval", "samples", "canaries", "depth", "depths")


class CaseStudyResult(EvaluationResult):
    """The verdicts on the recipes; see :class:`robust_ext.evaluations.result.EvaluationResult`."""

    kind = "case_studies"
    columns: ClassVar[Columns] = {
        "study": str,
        "recipe": str,
        "verdict": str,
        "flagged_by": str,
        "robust_accuracy": float,
        "score": float,
        "score_low": float,
        "score_high": float,
        "random_score": float,
        "depth": float,
        "samples": int,
        "canaries": int,
        "canaries_repaired": int,
        "published_robust_accuracy": float,
        "published_score": str,
    }
    keys = ("study", "recipe")
    value = "score"
    shown = ("study", "recipe", "verdict", "flagged_by", "robust_accuracy", "score", "random_score", "samples")

    @property
    def studies(self) -> dict[str, Mapping[str, Any]]:
        """The studies by name, as in ``result.json``."""
        return {study["name"]: study for study in self.content["studies"]}

    @property
    def headline(self) -> str:
        """The numbers of authors' recipes flagged and of right ones passed."""
        of = len(self.content["studies"])
        return (
            f"case studies: {self.content['flagged']} of {of} recipes of the authors flagged, "
            f"{self.content['passed']} of {of} right ones passed"
        )

    def rows(self) -> list[Row]:
        """Return two rows a study, one for each recipe; robust accuracy of the authors' is their claim."""
        found: list[Row] = []
        for study in self.content["studies"]:
            for kind, accuracy, published in (("weak", "claimed", "claimed"), ("right", "verified", "true")):
                recipe = study["recipes"][kind]
                canaries, score = recipe["canaries"] or {}, study["published"][f"{kind}_score"]
                found.append(
                    {
                        "study": study["name"],
                        "recipe": kind,
                        **{name: recipe[name] for name in ("verdict", "flagged_by")},
                        "robust_accuracy": recipe["robust_accuracy"][accuracy],
                        **bounds_of("score", recipe["score_interval"]),
                        **{name: recipe[name] for name in ("score", "random_score", "depth", "samples")},
                        "canaries": canaries.get("planted"),
                        "canaries_repaired": canaries.get("repaired"),
                        "published_robust_accuracy": study["published"][published],
                        "published_score": None if score is None else str(score),
                    }
                )
        return found


def refused_entry(reason: str) -> dict[str, Any]:
    """Return the entry of a recipe whose model the binarization test refuses."""
    empty: dict[str, Any] = {"reason": "", "findings": [], "hardness": None, "tests": {}, **dict.fromkeys(_TEST)}
    return {"refused": reason, "verdict": "refused", **empty}


def tested_entry(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a recipe from its binarization test; with a detector, from the worse of both tests."""
    attack = content["attacks"][0]
    tests = attack.get("tests", {})
    worst = min(tests.values(), key=lambda test: -1.0 if test["score"] is None else test["score"]) if tests else attack
    shown = {name: worst.get(name) for name in _TEST}
    if tests:
        shown["random_score"] = max((test["random_score"] or 0.0) for test in tests.values())
    return {
        "refused": None,
        "verdict": attack["verdict"],
        "reason": attack["reason"],
        "findings": content["findings"],
        "hardness": worst["hardness"],
        "tests": {name: {key: test.get(key) for key in ("verdict", *_TEST)} for name, test in tests.items()},
        **shown,
    }


def flagged_by(entry: Mapping[str, Any], causes: Sequence[str]) -> str | None:
    """Return the evidence against a recipe: a refusal, canaries, the score, or a finding of one of the causes."""
    if entry["refused"] is not None:
        return "refused"
    if (entry["canaries"] or {}).get("repaired", 0) >= REPAIRED:
        return "canaries"
    if entry["verdict"] == "failed":
        return "score"
    found = [finding["code"] for finding in entry["findings"] if finding["weight"] != "low"]
    return next((f"diagnosis: {code}" for code in found if code in causes), None)
