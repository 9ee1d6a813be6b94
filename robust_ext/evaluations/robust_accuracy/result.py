"""The result of a robust-accuracy evaluation, as an object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from robust_ext.evaluations.result import EvaluationResult


@dataclass(frozen=True)
class RobustAccuracyResult(EvaluationResult):
    """Security curves; see :class:`EvaluationResult`."""

    @property
    def attacks(self) -> dict[str, Mapping[str, Any]]:
        """The numbers of each attack, by name."""
        return {one["name"]: one for one in self.content["attacks"]}

    def robust_accuracy(self, epsilon: float, *, attack: str | None = None) -> float:
        """Robust accuracy at a budget.

        Args:
            epsilon: One of those that were evaluated.
            attack: Name of one attack; None for the worst case over all.

        Raises:
            KeyError: It was not evaluated.
        """
        rows = self.content["worst_case"] if attack is None else self.attacks[attack]["robust_accuracy"]
        return {float(row["epsilon"]): float(row["robust_accuracy"]) for row in rows}[epsilon]
