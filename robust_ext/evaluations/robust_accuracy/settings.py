"""Settings and result of robust accuracy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from robust_ext.core import tabular
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import LARGEST_SEED, Settings, setting, settings_class
from robust_ext.core.tabular import Columns, Row
from robust_ext.core.wording import accuracy, typed
from robust_ext.evaluations.result import EvaluationResult, bounds_of

if TYPE_CHECKING:
    import pandas

SAMPLE_COLUMNS: Columns = {
    "attack": str,
    "epsilon": float,
    **dict.fromkeys(("index", "sample"), int),
    "correct": bool,
    "outcome": str,
    "predicted": int,
    **dict.fromkeys(("distance", "broken_at"), float),
    "queries": int,
}
"""Of :attr:`RobustAccuracyResult.records`: name and type of each."""


@dataclass(frozen=True, eq=False, repr=False)
class RobustAccuracyResult(EvaluationResult):
    """Security curves; see :class:`EvaluationResult`.

    Attributes:
        records: A row for each run of an attack and sample, of results that were made in this process (a call with the
            same run folder makes one without running anything again): ``attack``; ``epsilon`` that it was given, None
            for the smallest perturbation; ``index`` and id (``sample``); ``correct``, whether the clean input is right;
            verified ``outcome``, ``predicted`` class and ``distance`` of the candidate; ``broken_at``, the first
            budget at which the sample counts as broken by it; ``queries``, rows sent forward until the first
            adversarial point in the ball, all of them where there is none or the smallest perturbation is searched for.
        candidates: With ``keep_candidates``, the nearest verified adversarial example of each sample, float32
            ``(N, ...)``, the clean input where there is none; else None.
    """

    candidates: NDArray[np.float32] | None = field(default=None, kw_only=True)

    kind = "robust_accuracy"
    columns: ClassVar[Columns] = {
        "attack": str,
        **dict.fromkeys(("epsilon", "robust_accuracy", "robust_accuracy_low", "robust_accuracy_high"), float),
        "success_rate": float,
        **dict.fromkeys(("samples", "non_finite", "not_attacked"), int),
        "seconds": float,
        **dict.fromkeys(("forward", "backward"), int),
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

    def success_rate(self, epsilon: float, *, attack: str | None = None) -> float | None:
        """Attack success rate: of the samples that are right to begin with, the share that is broken at a budget.

        Arguments are those of :meth:`robust_accuracy`; None where no sample is right.
        """
        return self._success(self.robust_accuracy(epsilon, attack=attack))

    def _success(self, robust: float) -> float | None:
        clean = self.content["clean_accuracy"]
        return 1 - robust / clean if clean else None

    def found_by(self, epsilon: float) -> dict[int, list[str]]:
        """Return the attacks that break each broken sample at a budget, by its place; see :attr:`records`.

        Samples that are wrong to begin with are none of them.
        """
        found: dict[int, list[str]] = {}
        for row in self.records:
            if row["broken_at"] is not None and row["broken_at"] <= epsilon:
                names = found.setdefault(row["index"], [])
                names += [row["attack"]] if row["attack"] not in names else []
        return dict(sorted(found.items()))

    def over_queries(self, attack: str, epsilon: float) -> list[tuple[int, float]]:
        """Return robust accuracy over the number of queries of one run: at 0, and wherever a sample breaks.

        Args:
            attack: One that was given a budget.
            epsilon: The budget.

        Raises:
            KeyError: It was not run at this budget, or the result was loaded and holds no :attr:`records`.
        """
        rows = [row for row in self.records if row["attack"] == attack and row["epsilon"] == epsilon]
        if not rows:
            raise KeyError((attack, epsilon))
        left, points = sum(row["correct"] for row in rows), list[tuple[int, float]]()
        broken = Counter(row["queries"] or 0 for row in rows if row["broken_at"] is not None)
        for queries in sorted({0, *broken}):
            left -= broken[queries]
            points.append((queries, left / len(rows)))
        return points

    def sample_frame(self) -> pandas.DataFrame:
        """The :attr:`records` as a data frame of pandas, which is an optional package.

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        return tabular.frame(SAMPLE_COLUMNS, self.records)

    @property
    def _curves(self) -> list[Mapping[str, Any]]:
        return [*self.content["attacks"], {"name": "worst case", "robust_accuracy": self.content["worst_case"]}]

    def rows(self) -> list[Row]:
        """One an attack and budget, whose cost is that of all budgets, and one a budget for the worst case over all."""
        found = []
        for attack in self._curves:
            own = {**attack, **attack.get("passes", {}), "attack": attack["name"], "samples": self.content["samples"]}
            for row in attack["robust_accuracy"]:
                more = {**bounds_of("robust_accuracy", row["interval"]), "success_rate": None}
                if row["robust_accuracy"] is not None:
                    more["success_rate"] = self._success(row["robust_accuracy"])
                found.append(self.row(**{**own, **row, **more}))
        return found

    def solved(self) -> dict[tuple[Any, ...], dict[int, bool]]:
        """Return whether each sample, by its place, is robust; nothing of results of earlier versions."""
        return {
            (attack["name"], row["epsilon"]): {place: one == "1" for place, one in enumerate(row["robust"])}
            for attack in self._curves
            for row in attack["robust_accuracy"]
            if "robust" in row
        }


@settings_class
class RobustAccuracySettings(Settings):
    """Budgets of robust accuracy, and how attacks are run."""

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
    seed: int = setting(default=0, help="Seed of all random draws.", minimum=0, maximum=LARGEST_SEED, panel="run")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epsilons is not None:
            if not self.epsilons:
                raise InvalidArgumentError("epsilons", self.epsilons, "a list of at least one budget")
            if len(set(self.epsilons)) < len(self.epsilons):
                raise InvalidArgumentError("epsilons", self.epsilons, "each budget once")
            self._set("epsilons", tuple(sorted(self.epsilons)))
