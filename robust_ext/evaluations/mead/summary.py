"""What ``result.json`` of a MEAD run holds: rows of the paper's tables, averages, and every arm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from robust_ext.engine.arm import Arm
from robust_ext.evaluations.mead.averages import average
from robust_ext.evaluations.mead.metric import ArmLabel, Bools, MultiArmed, multi_armed, worst_scores
from robust_ext.evaluations.mead.published import published_curve
from robust_ext.evaluations.mead.roc import Detection, Floats, curve_at

NORMS_IN_ORDER = ("l1", "l2", "linf", None)
_GRID = np.array([0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, *np.arange(0.1, 1.0001, 0.05).round(2)])


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One arm's results.

    Args:
        arm: The arm.
        name: Unlike others; arms that know a detector are named with it.
        knows: Name of the detector it attacks too.
        success: Where its candidate is misclassified and allowed, bool ``(N,)``.
        scores: Of its candidates by every detector, float64 ``(N,)``.
        cost: What its run took, and how its candidates fared, for ``result.json``.
    """

    arm: Arm
    name: str
    knows: str | None
    success: Bools
    scores: dict[str, Floats]
    cost: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Naturals:
    """The clean samples.

    Args:
        scores: By every detector, float64 ``(N,)``.
        correct: Which are classified correctly, bool ``(N,)``.
        handling: ``"kept"`` or ``"filtered"``, see :func:`multi_armed`.
    """

    scores: Mapping[str, Floats]
    correct: Bools
    handling: str


@dataclass(frozen=True, kw_only=True)
class Judge:
    """How arms are judged.

    Args:
        naturals: The clean samples.
        resamples: For the intervals.
        seed: Of the resamples.
        published: Whether to compute what the public code would.
    """

    naturals: Naturals
    resamples: int
    seed: int
    published: bool

    def multi_armed(self, detector: str, arms: Sequence[Judged]) -> MultiArmed:
        """All of these arms against a detector."""
        return multi_armed(
            self.naturals.scores[detector],
            _stacked(arms, detector),
            np.stack([one.success for one in arms]),
            arms=[ArmLabel(name=one.name, objective=one.arm.objective, algorithm=one.arm.algorithm) for one in arms],
            correct=self.naturals.correct,
            naturals=self.naturals.handling,
            resamples=self.resamples,
            seed=self.seed,
        )

    def curve(self, detector: str, arms: Sequence[Judged]) -> dict[str, list[float]] | None:
        """The curve of these arms on a grid of false positive rates; None without positives."""
        kept = np.ones_like(self.naturals.correct) if self.naturals.handling == "kept" else self.naturals.correct
        worst = worst_scores(_stacked(arms, detector), np.stack([one.success for one in arms]))
        rates = curve_at(self.naturals.scores[detector][kept], worst[kept], _GRID)
        if np.isnan(rates).any():
            return None
        return {"fpr": _GRID.tolist(), "tpr": [round(float(rate), 4) for rate in rates]}

    def as_published(self, detector: str, arms: Sequence[Judged]) -> dict[str, object] | None:
        """What the public code computes."""
        found = published_curve(
            self.naturals.scores[detector], _stacked(arms, detector), np.stack([one.success for one in arms])
        )
        return None if found is None else found.to_dict()


@dataclass(frozen=True, kw_only=True)
class DetectorRows:
    """What is known of one detector.

    Args:
        results: Groups of arms that do not know it, for ``result.json``.
        white_box: Groups of arms that know it: by themselves, and together with the others of the group.
        arms: Each arm by itself.
        averages: Over groups, a norm and an objective.
        blame: By name of the arm, in its group.
    """

    results: list[dict[str, Any]]
    white_box: list[dict[str, Any]]
    arms: list[dict[str, Any]]
    averages: list[dict[str, Any]]
    blame: dict[str, float]


def judge_detector(judge: Judge, detector: str, judged: Sequence[Judged], *, threshold: float | None) -> DetectorRows:
    """Every row that a detector has.

    Args:
        judge: How arms are judged.
        detector: Its name.
        judged: All arms; those that know another detector are left out.
        threshold: Above which it flags inputs; None where it has none.
    """
    blind = _groups(one for one in judged if one.knows is None)
    aware = _groups(one for one in judged if one.knows == detector)
    whole = {group: judge.multi_armed(detector, arms) for group, arms in blind.items()}
    results: list[dict[str, Any]] = []
    for group, arms in blind.items():
        results += _entries(judge, detector, group, arms, whole[group])
    white_box: list[dict[str, Any]] = []
    alone = {group: judge.multi_armed(detector, arms) for group, arms in aware.items()}
    for group, arms in aware.items():
        white_box.append(_entry(group, arms, alone[group].all_arms, alone[group], scenario="white-box"))
        if group in blind:
            both = [*blind[group], *arms]
            found = judge.multi_armed(detector, both)
            white_box.append(_entry(group, both, found.all_arms, found, scenario="all"))
    by_arm = {name: found for one in (*whole.values(), *alone.values()) for name, found in one.arms.items()}
    blame = {name: share for one in (*whole.values(), *alone.values()) for name, share in (one.blame or {}).items()}
    return DetectorRows(
        results=results,
        white_box=white_box,
        arms=[
            {"arm": one.name, **by_arm[one.name].to_dict(), "slipped": _slipped(one, detector, threshold)}
            for one in judged
            if one.name in by_arm
        ],
        averages=[{"detector": detector, **row} for row in _averages(blind, whole)],
        blame=blame,
    )


def arm_row(one: Judged, blame: Mapping[str, float | None], samples: int) -> dict[str, Any]:
    """One arm in ``result.json``.

    Args:
        one: The arm.
        blame: Its share, by detector.
        samples: How many there were.
    """
    arm = one.arm
    return {
        "name": one.name,
        "group": arm.group,
        "norm": arm.norm,
        "epsilon": arm.epsilon,
        "objective": arm.objective,
        "algorithm": arm.algorithm,
        "attack": arm.resolved.description,
        "kind": arm.resolved.traits.kind,
        "knows": one.knows,
        "successes": int(one.success.sum()),
        "samples": samples,
        **one.cost,
        "blame": dict(blame),
    }


def outcomes_of(records: Sequence[Mapping[str, Any]], success: Bools) -> dict[str, int]:
    """How the candidates of an arm fared; what is adversarial beyond the arm's own budget counts as such."""
    shown = [
        "beyond_epsilon" if record["outcome"] == "found" and not good else record["outcome"]
        for record, good in zip(records, success, strict=True)
    ]
    return dict(sorted(Counter(shown).items()))


def _groups(judged: Iterable[Judged]) -> dict[str, list[Judged]]:
    found: dict[str, list[Judged]] = {}
    for one in judged:
        found.setdefault(one.arm.group, []).append(one)
    return found


def _stacked(arms: Sequence[Judged], detector: str) -> Floats:
    stacked: Floats = np.stack([one.scores[detector] for one in arms])
    return stacked


def _entries(judge: Judge, detector: str, group: str, arms: list[Judged], whole: MultiArmed) -> list[dict[str, Any]]:
    """The multi-armed row of a group, a row an objective and a row an algorithm."""
    entries = [{**_entry(group, arms, whole.all_arms, whole), "curve": judge.curve(detector, arms)}]
    if judge.published:
        entries[0]["published"] = judge.as_published(detector, arms)
    for objective, found in whole.objectives.items():
        chosen = [one for one in arms if one.arm.objective in (objective, None)]
        entries.append(
            {**_entry(group, chosen, found, None, objective=objective), "curve": judge.curve(detector, chosen)}
        )
    for algorithm, found in whole.algorithms.items():
        chosen = [one for one in arms if one.arm.algorithm == algorithm]
        entries.append(_entry(group, chosen, found, None, algorithm=algorithm))
    return entries


def _entry(
    group: str,
    arms: Sequence[Judged],
    found: Detection,
    whole: MultiArmed | None,
    *,
    objective: str | None = None,
    algorithm: str | None = None,
    scenario: str = "blind",
) -> dict[str, Any]:
    arm = arms[0].arm
    successes = np.stack([one.success for one in arms])
    return {
        "group": group,
        "norm": arm.norm,
        "epsilon": arm.epsilon,
        "scenario": scenario,
        "objective": objective,
        "algorithm": algorithm,
        "arms": len(arms),
        "successes_per_sample": float(successes.sum() / successes.shape[1]) if successes.shape[1] else None,
        **found.to_dict(),
        "blame": None if whole is None else whole.blame,
    }


def _averages(groups: Mapping[str, Sequence[Judged]], whole: Mapping[str, MultiArmed]) -> list[dict[str, Any]]:
    """The paper's averages: of the groups of a norm, and of the norms.

    Groups that do not differ in objective count in the average of each.
    """
    objectives = list(dict.fromkeys(name for found in whole.values() for name in found.objectives))
    norms = [norm for norm in NORMS_IN_ORDER if any(arms[0].arm.norm == norm for arms in groups.values())]
    rows = []
    for objective in (None, *objectives):

        def of_group(found: MultiArmed, objective: str | None = objective) -> Detection:
            return found.all_arms if objective is None else found.objectives.get(objective, found.all_arms)

        of_norms = {
            norm: average([of_group(whole[group]) for group, arms in groups.items() if arms[0].arm.norm == norm])
            for norm in norms
        }
        rows += [{"norm": norm, "objective": objective, **found.to_dict()} for norm, found in of_norms.items()]
        rows.append({"norm": "all", "objective": objective, **average(list(of_norms.values())).to_dict()})
    return rows


def _slipped(one: Judged, detector: str, threshold: float | None) -> int | None:
    if threshold is None:
        return None
    return int((one.success & (one.scores[detector] <= threshold)).sum())
