"""Rows of detectors in ``result.json``: those of the paper's tables, averages, and every arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from robust_ext.evaluations.arms import Arm
from robust_ext.evaluations.mead.metric import (
    Bools,
    Detection,
    Floats,
    attribution,
    average,
    curve_at,
    detect,
    multi_armed,
    published_curve,
    worst_scores,
)
from robust_ext.evaluations.mead.settings import MeadSettings

NORMS_IN_ORDER = ("l1", "l2", "linf", None)
_GRID = np.array([0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, *np.arange(0.1, 1.0001, 0.05).round(2)])


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """One arm's results."""

    arm: Arm
    name: str  # Unlike others; arms that are adaptive to a detector are named with it
    adaptive_to: str | None  # Name of the detector it attacks too
    # Where its candidate is allowed, and misclassified or one at which the logits are not finite, bool (N,)
    success: Bools
    finite: Bools  # Where its success is by finite logits, bool (N,)
    lost: Bools  # Where it was not run: its process ended, or hung, bool (N,)
    scores: dict[str, Floats]  # Of its candidates by every detector, float64 (N,)
    cost: Mapping[str, Any]  # What its run took, and how its candidates fared, for result.json


@dataclass(frozen=True)
class DetectorRows:
    """The rows of one detector.

    Args:
        detector: Its name.
        natural: Its scores of the samples as they are, float64 ``(N,)``.
        correct: Which of them are classified correctly, bool ``(N,)``.
        settings: Those of the run.
        threshold: What it flags above, where it has a threshold.
    """

    detector: str
    natural: Floats
    correct: Bools
    settings: MeadSettings
    threshold: float | None

    def of(self, arms: Sequence[ArmResult]) -> dict[str, Any]:
        """All of its rows in ``result.json``; arms adaptive to another detector are left out.

        Groups of arms that are not adaptive (``results``), those that are, by themselves and with the others of the
        group (``white_box``), each arm (``arms``), and the averages over groups by norm and objective (``averages``).
        """
        blind, adaptive = dict[str, list[ArmResult]](), dict[str, list[ArmResult]]()
        mine = [one for one in arms if one.adaptive_to in (None, self.detector)]
        for one in mine:
            (blind if one.adaptive_to is None else adaptive).setdefault(one.arm.group, []).append(one)
        white_box = []
        for group, members in adaptive.items():
            white_box.append(self._row(members, scenario="white-box"))
            if group in blind:
                white_box.append(self._row([*blind[group], *members], scenario="all"))
        results = [row for members in blind.values() for row in self._group(members)]
        single = [{"arm": one.name, **self._detection([one])._asdict(), "slipped": self._slipped(one)} for one in mine]
        return {"results": results, "white_box": white_box, "arms": single, "averages": self._averages(results)}

    def _group(self, arms: Sequence[ArmResult]) -> list[dict[str, Any]]:
        """The multi-armed row of a group, a row an objective and a row an algorithm.

        Arms without an objective, those that have no choice of one, take part in the row of every objective. The paper
        calls these rows single-armed; they can lie below that of all arms, as they have fewer positives (remark in
        section 5.2.1).
        """
        rows = [{**self._row(arms), "curve": self._curve(arms)}]
        if self.settings.published:
            found = published_curve(self.natural, *self._stacked(arms))
            rows[0]["published"] = found and {"auroc": found.auroc, "fpr_at_95_tpr": found.fpr_at_95_tpr}
        for objective in dict.fromkeys(one.arm.objective for one in arms if one.arm.objective is not None):
            chosen = [one for one in arms if one.arm.objective in (objective, None)]
            rows.append({**self._row(chosen, objective=objective), "curve": self._curve(chosen)})
        for algorithm in dict.fromkeys(one.arm.algorithm for one in arms if one.arm.algorithm is not None):
            rows.append(self._row([one for one in arms if one.arm.algorithm == algorithm], algorithm=algorithm))
        return rows

    def _row(
        self,
        arms: Sequence[ArmResult],
        *,
        scenario: str = "blind",
        objective: str | None = None,
        algorithm: str | None = None,
    ) -> dict[str, Any]:
        """Numbers of these arms together."""
        arm, kept, found = arms[0].arm, self._kept, self._detection(arms)
        scores, success = self._stacked(arms)
        finite, lost = (np.stack([getattr(one, flags) for one in arms]) for flags in ("finite", "lost"))
        non_finite = int((success.any(0) & ~finite.any(0) & kept).sum())
        without = found.auroc
        if non_finite:
            worst = worst_scores(scores, finite)[kept]
            without = detect(self.natural[kept], worst, resamples=0, seed=0).auroc
        whole = objective is None and algorithm is None
        shares = attribution(scores[:, kept], success[:, kept]) if whole else None
        return {
            "group": arm.group,
            "norm": arm.norm,
            "epsilon": arm.epsilon,
            "scenario": scenario,
            "objective": objective,
            "algorithm": algorithm,
            "arms": len(arms),
            "successes_per_sample": float(success.sum() / success.shape[1]) if success.shape[1] else None,
            **found._asdict(),
            "non_finite": non_finite,
            "auroc_without_non_finite": without,
            "not_attacked": int((lost.any(0) & kept).sum()),
            "attribution": None if shares is None else {one.name: float(shares[n]) for n, one in enumerate(arms)},
        }

    def _detection(self, arms: Sequence[ArmResult]) -> Detection:
        (scores, success), kept = self._stacked(arms), self._kept
        resamples, seed = self.settings.resamples, self.settings.seed
        return multi_armed(self.natural[kept], scores[:, kept], success[:, kept], resamples=resamples, seed=seed)

    def _curve(self, arms: Sequence[ArmResult]) -> dict[str, list[float]] | None:
        """The curve of these arms on a grid of false positive rates; None without positives."""
        rates = curve_at(self.natural[self._kept], worst_scores(*self._stacked(arms))[self._kept], _GRID)
        if np.isnan(rates).any():
            return None
        return {"fpr": _GRID.tolist(), "tpr": [round(float(rate), 4) for rate in rates]}

    def _averages(self, results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The paper's averages: of the groups of a norm, and of the norms.

        Groups that do not differ in objective count in the average of each.
        """
        whole = [row for row in results if row["algorithm"] is None]
        norms = [norm for norm in NORMS_IN_ORDER if any(row["norm"] == norm for row in whole)]
        rows = []
        for objective in dict.fromkeys([None, *(row["objective"] for row in whole)]):
            # Rows of objectives come after that of their group.
            of_groups = {row["group"]: row for row in whole if row["objective"] in (None, objective)}.values()
            of_norms = {norm: average([row for row in of_groups if row["norm"] == norm]) for norm in norms}
            means = {**of_norms, "all": average([*of_norms.values()])}
            rows += [
                {"detector": self.detector, "norm": norm, "objective": objective, **found}
                for norm, found in means.items()
            ]
        return rows

    @property
    def _kept(self) -> Bools:
        """A mask of the samples that count."""
        return self.correct if self.settings.naturals == "filtered" else np.ones_like(self.correct)

    def _stacked(self, arms: Sequence[ArmResult]) -> tuple[Floats, Bools]:
        """Scores, and successes, ``(L, N)``."""
        return np.stack([one.scores[self.detector] for one in arms]), np.stack([one.success for one in arms])

    def _slipped(self, one: ArmResult) -> int | None:
        if self.threshold is None:
            return None
        return int((one.success & (one.scores[self.detector] <= self.threshold)).sum())


def arm_row(one: ArmResult, entries: Sequence[Mapping[str, Any]], samples: int) -> dict[str, Any]:
    """One arm in ``result.json``, with its share of the attribution by detector, of their entries."""
    arm, shares = one.arm, {}
    for entry in entries:
        alone = [row for row in (*entry["results"], *entry["white_box"]) if row["scenario"] != "all"]
        found = [row["attribution"][one.name] for row in alone if one.name in (row["attribution"] or ())]
        shares[entry["name"]] = found[0] if found else None
    return {
        "name": one.name,
        **{key: getattr(arm, key) for key in ("group", "norm", "epsilon", "objective", "algorithm")},
        "attack": arm.resolved.description,
        "kind": arm.resolved.traits.kind,
        "adaptive_to": one.adaptive_to,
        "successes": int(one.success.sum()),
        "samples": samples,
        **one.cost,
        "attribution": shares,
    }
