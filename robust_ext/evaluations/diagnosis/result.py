"""The result of a diagnosis, as an object."""

from __future__ import annotations

from typing import ClassVar

from robust_ext.evaluations.causes.finding import Finding
from robust_ext.evaluations.result import EvaluationResult, bounds_of
from robust_ext.reports.tabular import Columns, Row


class DiagnosisResult(EvaluationResult):
    """What is wrong with an attack or a model, and what to do; see :class:`EvaluationResult`."""

    kind = "diagnosis"
    columns: ClassVar[Columns] = {
        "attack": str,
        "reference": bool,
        "verdict": str,
        "robust_accuracy": float,
        "robust_accuracy_low": float,
        "robust_accuracy_high": float,
        "epsilon": float,
        "score": float,
        "score_low": float,
        "score_high": float,
        "random_score": float,
        "planted": int,
        "not_attacked": int,
        "error": str,
        "seconds": float,
        "forward": int,
        "backward": int,
        "description": str,
    }
    keys = ("attack",)
    value = "robust_accuracy"
    shown = ("attack", "reference", "verdict", "robust_accuracy", "score", "random_score", "seconds")

    @property
    def likely(self) -> Finding | None:
        """The most likely cause of a failure; None where nothing of weight was found."""
        return next((one for one in self.findings if one.weight != "low"), None)

    @property
    def headline(self) -> str:
        """The code of the likely cause, with the attack it is about."""
        if self.likely is None:
            return "diagnosis: none of the known causes applies"
        return f"diagnosis: {self.likely.code} ({self.likely.attack or 'the model'})"

    def rows(self) -> list[Row]:
        """One an attack, and one a reference that it is compared with."""
        return [
            {
                "attack": one["name"],
                "reference": "not_planted" not in one,
                "verdict": one.get("verdict"),
                "robust_accuracy": one["robust_accuracy"],
                **bounds_of("robust_accuracy", one["interval"]),
                "epsilon": one["epsilon"],
                "score": one.get("score"),
                **bounds_of("score", one.get("score_interval")),
                "random_score": one.get("random_score"),
                "planted": one.get("planted"),
                "not_attacked": one["not_attacked"],
                "error": one["error"],
                "seconds": one["seconds"],
                **{way: one["passes"].get(way) for way in ("forward", "backward")},
                "description": one["description"],
            }
            for one in (*self.content["attacks"], *self.content["references"])
        ]
