"""Settings and result of a MEAD run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from robust_ext.core.settings import setting, settings_class
from robust_ext.core.tabular import Columns, Row
from robust_ext.core.wording import percent
from robust_ext.detectors.combining import METHODS
from robust_ext.engine.evaluation_file import JudgedSettings
from robust_ext.evaluations.result import EvaluationResult, bounds_of


class MeadResult(EvaluationResult):
    """The results of detectors against all arms at once; see :class:`EvaluationResult`.

    The examples are candidates that slipped through.
    """

    kind = "mead"
    columns: ClassVar[Columns] = {
        **dict.fromkeys(("detector", "group", "scenario"), str),
        **dict.fromkeys(("auroc", "auroc_low", "auroc_high", "fpr_at_95_tpr", "tpr_at_5_fpr"), float),
        "positives": int,
        "coverage": float,
        **dict.fromkeys(("non_finite", "not_attacked"), int),
    }
    keys = ("detector", "group", "scenario")
    value = "auroc"
    shown = ("detector", "group", "scenario", "auroc", "fpr_at_95_tpr", "tpr_at_5_fpr", "positives")

    @property
    def detectors(self) -> dict[str, Mapping[str, Any]]:
        """The numbers of each detector, by name."""
        return {one["name"]: one for one in self.content["detectors"]}

    @property
    def arms(self) -> dict[str, Mapping[str, Any]]:
        """The numbers of each arm, by name."""
        return {one["name"]: one for one in self.content["arms"]}

    @property
    def headline(self) -> str:
        """The mean AUROC of each detector, and its lowest of all groups of arms, those that are adaptive to it too."""
        from robust_ext.reports.mead_rows import worst_row

        found = []
        for name, entry in self.detectors.items():
            lowest = worst_row(entry)
            worst = "" if lowest is None else f" (lowest {percent(lowest['auroc'])})"
            found.append(f"{name} {percent(self.auroc(name))}{worst}")
        return f"MEAD, mean AUROC in per cent: {', '.join(found)}"

    def auroc(self, detector: str, norm: str | None = "all", *, objective: str | None = None) -> float | None:
        """The average AUROC of a detector.

        Args:
            detector: Its name.
            norm: Of the groups that are averaged; None for those without a norm, ``"all"`` for the mean of the norms.
            objective: Of the arms; None for all of them together.
        """
        wanted = {"detector": detector, "norm": norm, "objective": objective}
        return next((row["auroc"] for row in self.content["averages"] if wanted.items() <= row.items()), None)

    def rows(self) -> list[Row]:
        """One a detector, group of arms and scenario, and one a detector for the mean of the norms."""
        mean = {"group": "mean of norms", "scenario": "blind", "algorithm": None}
        found: list[Row] = []
        for detector in self.content["detectors"]:
            own = {"norm": "all", "detector": detector["name"]}
            means = [{**row, **mean} for row in self.content["averages"] if own.items() <= row.items()]
            found += [
                self.row(**{**row, **bounds_of("auroc", row.get("auroc_interval")), "detector": detector["name"]})
                for row in (*means, *detector["results"], *detector["white_box"])
                if row["objective"] is row["algorithm"] is None
            ]
        return found


@settings_class
class MeadSettings(JudgedSettings):
    """Settings of the arms and their scores."""

    label = "mead"

    naturals: str = setting(
        default="kept",
        help='``"kept"``: samples that are misclassified as they are count like the others, as in the paper. '
        '``"filtered"``: they are left out.',
        choices=("kept", "filtered"),
    )
    resamples: int = setting(
        default=500, help="Resamples of the bootstrap intervals; 0 for no intervals.", minimum=0, maximum=1_000_000
    )
    combine: tuple[str, ...] = setting(
        default=(),
        help="Ways to make one detector of all of them, see :mod:`robust_ext.detectors.combining`: "
        '``"mean"``, ``"max"``, ``"mixture"``. They need clean inputs to calibrate on.',
        choices=METHODS,
        panel="detector",
    )
    detector_fpr: float = setting(
        default=0.05,
        help="Share of clean inputs that a detector without a threshold may flag, in (0, 1).",
        above=0,
        below=1,
        panel="detector",
    )
    published: bool = setting(
        default=False,
        help="Whether to add the numbers that the paper's public code computes, see "
        ":mod:`robust_ext.evaluations.mead.metric`.",
    )
    batch_size: int = setting(
        default=100,
        help="Samples attacked at once. Results of attacks that draw random numbers depend on it.",
        minimum=1,
        panel="run",
    )

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values."""
        return {**super().to_dict(), "combine": list(self.combine)}
