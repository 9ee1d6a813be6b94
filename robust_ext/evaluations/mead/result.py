"""The result of a MEAD run, as an object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from robust_ext.evaluations.result import EvaluationResult


@dataclass(frozen=True)
class MeadResult(EvaluationResult):
    """How detectors fare against all arms at once; see :class:`EvaluationResult`.

    The examples are candidates that slipped through.
    """

    @property
    def detectors(self) -> dict[str, Mapping[str, Any]]:
        """The numbers of each detector, by name."""
        return {one["name"]: one for one in self.content["detectors"]}

    @property
    def arms(self) -> dict[str, Mapping[str, Any]]:
        """The numbers of each arm, by name."""
        return {one["name"]: one for one in self.content["arms"]}

    def auroc(self, detector: str, norm: str | None = "all", *, objective: str | None = None) -> float | None:
        """The average AUROC of a detector.

        Args:
            detector: Its name.
            norm: Of the groups that are averaged; None for those without a norm, ``"all"`` for the mean of the norms.
            objective: Of the arms; None for all of them together.
        """
        for row in self.content["averages"]:
            if (row["detector"], row["norm"], row["objective"]) == (detector, norm, objective):
                value: float | None = row["auroc"]
                return value
        return None
