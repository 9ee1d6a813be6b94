"""Settings and result of robust accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import LARGEST_SEED, Settings, setting, settings_class
from robust_ext.evaluations.result import EvaluationResult, bounds_of
from robust_ext.reports.tabular import Columns, Row
from robust_ext.reports.wording import accuracy, typed

_WORST = "worst case"


class RobustAccuracyResult(EvaluationResult):
    """Security curves; see :class:`EvaluationResult`."""

    kind = "robust_accuracy"
    columns: ClassVar[Columns] = {
        "attack": str,
        "epsilon": float,
        "robust_accuracy": float,
        "robust_accuracy_low": float,
        "robust_accuracy_high": float,
        "samples": int,
        "non_finite": int,
        "not_attacked": int,
        "seconds": float,
        "forward": int,
        "backward": int,
        "description": str,
    }
    keys = ("attack", "epsilon")
    value = "robust_accuracy"
    shown = ("attack", "epsilon", "robust_accuracy", "samples", "seconds")

    @property
    def attacks(self) -> dict[str, Mapping[str, Any]]:
        """The numbers of each attack, by name."""
        return {one["name"]: one for one in self.content["attacks"]}

    @property
    def headline(self) -> str:
        """The worst case at each budget."""
        found = ", ".join(f"{accuracy(row)} at epsilon {typed(row['epsilon'])}" for row in self.content["worst_case"])
        return f"robust accuracy in per cent, {self.content['norm']}: {found}"

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

    def rows(self) -> list[Row]:
        """One an attack and budget, whose cost is that of all budgets, and one a budget for the worst case over all."""
        worst = {"name": _WORST, "robust_accuracy": self.content["worst_case"]}
        return [
            {
                "attack": attack["name"],
                "epsilon": row["epsilon"],
                "robust_accuracy": row["robust_accuracy"],
                **bounds_of("robust_accuracy", row["interval"]),
                "samples": self.content["samples"],
                "non_finite": row.get("non_finite"),
                "not_attacked": row.get("not_attacked"),
                "seconds": attack.get("seconds"),
                **attack.get("passes", {"forward": None, "backward": None}),
                "description": attack.get("description"),
            }
            for attack in (*self.content["attacks"], worst)
            for row in attack["robust_accuracy"]
        ]

    def solved(self) -> dict[tuple[Any, ...], dict[int, bool]]:
        """Return whether each sample, by its place, is robust; nothing of results of earlier versions."""
        attacks = [*self.content["attacks"], {"name": _WORST, "robust_accuracy": self.content["worst_case"]}]
        return {
            (attack["name"], row["epsilon"]): {place: one == "1" for place, one in enumerate(row["robust"])}
            for attack in attacks
            for row in attack["robust_accuracy"]
            if "robust" in row
        }


@settings_class
class RobustAccuracySettings(Settings):
    """At which budgets robust accuracy is stated, and how attacks are run."""

    label = "robust accuracy"

    epsilons: tuple[float, ...] | None = setting(
        default=None,
        help="Budgets above 0, in the units of the inputs, each once; the epsilon of the threat model alone where "
        "left out.",
        above=0,
        cli=None,
    )
    batch_size: int = setting(
        default=100,
        help="Samples attacked at once. Results of attacks that draw random numbers depend on it.",
        minimum=1,
        panel="run",
    )
    seed: int = setting(default=0, help="Of every draw.", minimum=0, maximum=LARGEST_SEED, panel="run")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epsilons is not None:
            if not self.epsilons:
                raise InvalidArgumentError("epsilons", self.epsilons, "a list of at least one budget")
            if len(set(self.epsilons)) < len(self.epsilons):
                raise InvalidArgumentError("epsilons", self.epsilons, "each budget once")
            self._set("epsilons", tuple(sorted(self.epsilons)))
