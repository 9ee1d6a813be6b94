"""The result of case studies, as an object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from robust_ext.evaluations.result import EvaluationResult


@dataclass(frozen=True)
class CaseStudyResult(EvaluationResult):
    """What became of the recipes; see :class:`robust_ext.evaluations.result.EvaluationResult`."""

    @property
    def studies(self) -> dict[str, Mapping[str, Any]]:
        """What was measured of each study, by name."""
        return {study["name"]: study for study in self.content["studies"]}
