"""The result of the evaluation of a test-time defense, as an object."""

from __future__ import annotations

from dataclasses import dataclass

from robust_ext.evaluations.result import EvaluationResult


@dataclass(frozen=True)
class AdaptiveResult(EvaluationResult):
    """What is left of a static model and of its defense; see :class:`EvaluationResult`."""

    @property
    def static(self) -> float:
        """Robust accuracy of the static model under all attacks."""
        return float(self.content["static"]["worst_case"]["robust_accuracy"])

    @property
    def defended(self) -> float:
        """Robust accuracy of the defense under all attacks."""
        return float(self.content["defended"]["worst_case"]["robust_accuracy"])
