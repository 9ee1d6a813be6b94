"""Settings and result of the evaluation of an adaptive test-time defense."""

from __future__ import annotations

from typing import ClassVar

from robust_ext.attacks._common.objectives import OBJECTIVES
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.tabular import Columns, Row
from robust_ext.core.wording import accuracy
from robust_ext.engine.evaluation_file import JudgedSettings
from robust_ext.evaluations.result import EvaluationResult, bounds_of


class AdaptiveResult(EvaluationResult):
    """The robust accuracy of a static model and of its defense; see :class:`EvaluationResult`."""

    kind = "test_time"
    columns: ClassVar[Columns] = {
        **dict.fromkeys(("attack", "category"), str),
        "samples": int,
        **dict.fromkeys(("still_robust", "static", "static_low", "static_high"), float),
        **dict.fromkeys(("defended", "defended_low", "defended_high", "deviation"), float),
        **dict.fromkeys(("non_finite", "not_attacked"), int),
        "seconds": float,
        **dict.fromkeys(("forward", "backward"), int),
    }
    keys = ("attack",)
    value = "defended"
    shown = ("attack", "category", "samples", "static", "defended", "still_robust", "seconds")

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
        name = self.content["defense"]
        return f"{defended}% of samples survive the attacks with the defense {name}, {static}% without it"

    def rows(self) -> list[Row]:
        """One an attack, and one for the worst case over all."""
        worst, found = {"name": "worst case", "category": "all"}, []
        static, defended = (
            [*self.content[side]["attacks"], {**worst, **self.content[side]["worst_case"]}]
            for side in ("static", "defended")
        )
        for before, after in zip(static, defended, strict=True):
            both = {"attack": after["name"]}
            for side, one in (("static", before), ("defended", after)):
                both |= {side: one["robust_accuracy"], **bounds_of(side, one["interval"])}
            found.append(self.row(**{**after, **after.get("passes", {}), **both}))
        return found


CATEGORIES = ("naive", "transfer", "black-box", "white-box")
APART = ("only", "skip", "minutes")
"""Settings that decide which steps are run, and nothing of what a step that is run leaves."""


@settings_class
class AdaptiveSettings(JudgedSettings):
    """The strength of the attacks on a defense, and the number of queries of a random one."""

    label = "the evaluation of a test-time defense"

    steps: int = setting(default=50, help="Steps of APGD through the defense.", minimum=1)
    transfer_steps: int = setting(
        default=50, help="Steps of APGD on the static model and on other networks, at least 50.", minimum=50
    )
    losses: tuple[str, ...] = setting(
        default=(),
        help="Losses that APGD maximises, repeatable; ce and margin by default, and targeted-dlr if full.",
        choices=tuple(OBJECTIVES),
    )
    restarts: int = setting(
        default=1, help="Runs of APGD with each loss, from starts of their own (paper: up to 100, for IMF).", minimum=1
    )
    target_classes: int = setting(
        default=3,
        help="Classes that a targeted loss aims at in each run, the likeliest first (paper: 3, 5 or 9).",
        minimum=1,
    )
    queries: int = setting(
        default=500,
        help="Queries of Square and RayS for each sample; unless full, Square takes a fifth or a tenth of them first.",
        minimum=1,
    )
    draws: int = setting(default=8, help="Draws that gradients of a random defense are averaged over.", minimum=1)
    repeats: int = setting(
        default=20,
        help="Queries of a random defense for each candidate: so many choose the worst attack on each sample, and as "
        "many fresh ones measure robust accuracy.",
        minimum=1,
    )
    only: tuple[str, ...] = setting(
        default=(),
        help=f"Run only attacks of this category, repeatable: {', '.join(CATEGORIES)}.",
        choices=CATEGORIES,
    )
    skip: tuple[str, ...] = setting(default=(), help="Run no attack of this category; repeatable.", choices=CATEGORIES)
    full: bool = setting(
        default=False,
        help="Run every attack on every sample. If not, cheap attacks come first, and others run on the samples that "
        "these did not break.",
    )
    minutes: float | None = setting(
        default=None,
        help="Minutes after which no further attack begins; the result lists those that were not run.",
        above=0,
    )
    batch_size: int = setting(
        default=64,
        help="Samples attacked and judged at once; for batch-level defenses the nearest number of whole groups.",
        minimum=1,
        panel="run",
    )
