"""The result of a binarization test, as an object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from robust_ext.evaluations.result import EvaluationResult


@dataclass(frozen=True)
class BinarizationResult(EvaluationResult):
    """What the binarization test found; see :class:`EvaluationResult`.

    Args:
        content: Everything ``result.json`` holds; numbers, not strings.
        records: One a sample, in order.
        examples: A few candidates as images, for the report.
    """

    records: Sequence[Mapping[str, Any]] = field(default=(), repr=False, kw_only=True)

    @property
    def verdict(self) -> str:
        """``"passed"``, ``"failed"`` or ``"inconclusive"``: that of the best attack."""
        return str(self.content["verdict"])

    @property
    def attacks(self) -> dict[str, Mapping[str, Any]]:
        """The numbers of each attack, by name."""
        return {attack["name"]: attack for attack in self.content["attacks"]}

    @property
    def score(self) -> float | None:
        """Test score of the best attack; None when no problem could be planted."""
        scores = [attack["score"] for attack in self.content["attacks"] if attack["score"] is not None]
        return max(scores) if scores else None
