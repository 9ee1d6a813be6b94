"""Settings and result of the evaluation of an adaptive test-time defense."""

from __future__ import annotations

from typing import ClassVar

from robust_ext.core.settings import setting, settings_class
from robust_ext.engine.evaluation_file import JudgedSettings
from robust_ext.evaluations.result import EvaluationResult, bounds_of
from robust_ext.reports.tabular import Columns, Row
from robust_ext.reports.wording import accuracy


class AdaptiveResult(EvaluationResult):
    """The robust accuracy of a static model and of its defense; see :class:`EvaluationResult`."""

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
        """The robust accuracy of both models."""
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


CATEGORIES = ("naive", "transfer", "black-box", "white-box")
APART = ("only", "skip", "minutes")
"""Settings that decide which steps are run, and nothing of what a step that is run leaves."""


@settings_class
class AdaptiveSettings(JudgedSettings):
    """The strength of the attacks on a defense, and the number of queries of a random one."""

    label = "the evaluation of a test-time defense"

    steps: int = setting(default=50, help="Of APGD through the defense.", minimum=1)
    transfer_steps: int = setting(
        default=50, help="Of APGD on the static model and on other networks, at least 50.", minimum=50
    )
    queries: int = setting(
        default=500,
        help="Of Square and RayS for each sample; unless full, Square takes a fifth or a tenth of them first.",
        minimum=1,
    )
    draws: int = setting(default=8, help="Draws that gradients of a random defense are averaged over.", minimum=1)
    repeats: int = setting(
        default=20,
        help="How often a random defense is queried about each candidate: so often to choose the worst attack on each "
        "sample, and so often again, afresh, to state what is left.",
        minimum=1,
    )
    only: tuple[str, ...] = setting(
        default=(),
        help=f"Run no attacks but those of this category, repeatable: {', '.join(CATEGORIES)}.",
        choices=CATEGORIES,
    )
    skip: tuple[str, ...] = setting(default=(), help="Run no attack of this category; repeatable.", choices=CATEGORIES)
    full: bool = setting(
        default=False,
        help="Run every attack on every sample. If not, cheap ones come first and others run on what they left.",
    )
    minutes: float | None = setting(
        default=None, help="Begin no further attack after so long; what was not run is stated.", above=0
    )
    batch_size: int = setting(
        default=64,
        help="Samples attacked and judged at once; for batch-level defenses the nearest number of whole groups.",
        minimum=1,
        panel="run",
    )
