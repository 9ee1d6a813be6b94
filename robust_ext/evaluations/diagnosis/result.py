"""The result of a diagnosis, as an object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from robust_ext.evaluations.causes.finding import Finding
from robust_ext.evaluations.result import EvaluationResult


@dataclass(frozen=True)
class DiagnosisResult(EvaluationResult):
    """What is wrong with an attack or a model, and what to do; see :class:`EvaluationResult`.

    Args:
        content: Everything ``result.json`` holds; numbers, not strings.
        findings: In order of weight, those that explain others first.
    """

    findings: Sequence[Finding] = field(default=(), repr=False, kw_only=True)

    @property
    def likely(self) -> Finding | None:
        """The most likely cause of a failure; None where nothing of weight was found."""
        return next((one for one in self.findings if one.weight != "low"), None)
