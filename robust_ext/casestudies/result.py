"""The result of case studies, as an object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from robust_ext.core.tabular import Columns, Row
from robust_ext.evaluations.result import EvaluationResult, bounds_of


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
