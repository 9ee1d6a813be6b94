"""The result of the evaluation of a test-time defense, as an object."""

from __future__ import annotations

from typing import ClassVar

from robust_ext.evaluations.result import EvaluationResult, bounds_of
from robust_ext.reports.tabular import Columns, Row
from robust_ext.reports.wording import accuracy


class AdaptiveResult(EvaluationResult):
    """What is left of a static model and of its defense; see :class:`EvaluationResult`."""

    kind = "test_time"
    columns: ClassVar[Columns] = {
        "attack": str,
        "category": str,
        "samples": int,
        "left": float,
        "static": float,
        "static_low": float,
        "static_high": float,
        "defended": float,
        "defended_low": float,
        "defended_high": float,
        "deviation": float,
        "non_finite": int,
        "not_attacked": int,
        "seconds": float,
        "forward": int,
        "backward": int,
    }
    keys = ("attack",)
    value = "defended"
    shown = ("attack", "category", "samples", "static", "defended", "left", "seconds")

    @property
    def static(self) -> float:
        """Robust accuracy of the static model under all attacks."""
        return float(self.content["static"]["worst_case"]["robust_accuracy"])

    @property
    def defended(self) -> float:
        """Robust accuracy of the defense under all attacks."""
        return float(self.content["defended"]["worst_case"]["robust_accuracy"])

    @property
    def headline(self) -> str:
        """What is left of both."""
        defended, static = (accuracy(self.content[side]["worst_case"]) for side in ("defended", "static"))
        return f"{defended} per cent are left of the defense {self.content['defense']}, {static} of its static model"

    def rows(self) -> list[Row]:
        """One an attack, and one for the worst case over all."""
        static, defended = (
            [
                *self.content[side]["attacks"],
                {"name": "worst case", "category": "all", **self.content[side]["worst_case"]},
            ]
            for side in ("static", "defended")
        )
        return [
            {
                "attack": after["name"],
                "category": after["category"],
                "samples": after.get("samples"),
                "left": after.get("left"),
                "static": before["robust_accuracy"],
                **bounds_of("static", before["interval"]),
                "defended": after["robust_accuracy"],
                **bounds_of("defended", after["interval"]),
                "deviation": after["deviation"],
                "non_finite": after["non_finite"],
                "not_attacked": after["not_attacked"],
                "seconds": after.get("seconds"),
                **after.get("passes", {"forward": None, "backward": None}),
            }
            for before, after in zip(static, defended, strict=True)
        ]
