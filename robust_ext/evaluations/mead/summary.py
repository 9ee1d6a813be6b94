"""The content of a MEAD run's ``result.json``: rows of the paper's tables, averages, and every arm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from robust_ext.engine.verify import BROKEN
from robust_ext.evaluations.arms import Arm
from robust_ext.evaluations.mead.metric import ArmLabel, Bools, MultiArmed, multi_armed, published_curve, worst_scores
from robust_ext.evaluations.mead.roc import Detection, Floats, average, curve_at, detect
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


@dataclass(frozen=True, kw_only=True)
class ArmScorer:
    """The scores of detectors by arm."""

    natural: Mapping[str, Floats]  # Scores of the clean samples by every detector, float64 (N,)
    correct: Bools  # Which of them are classified correctly, bool (N,)
    settings: MeadSettings

    @property
    def kept(self) -> Bools:
        """A mask of the samples that count."""
        return np.ones_like(self.correct) if self.settings.naturals == "kept" else self.correct

    def multi_armed(self, detector: str, arms: Sequence[ArmResult]) -> MultiArmed:
        """All of these arms against a detector."""
        return multi_armed(
            self.natural[detector],
            *_stacked(arms, detector),
            arms=[ArmLabel(name=one.name, objective=one.arm.objective, algorithm=one.arm.algorithm) for one in arms],
            correct=self.correct,
            naturals=self.settings.naturals,
            resamples=self.settings.resamples,
            seed=self.settings.seed,
        )

    def curve(self, detector: str, arms: Sequence[ArmResult]) -> dict[str, list[float]] | None:
        """The curve of these arms on a grid of false positive rates; None without positives."""
        worst = worst_scores(*_stacked(arms, detector))
        rates = curve_at(self.natural[detector][self.kept], worst[self.kept], _GRID)
        if np.isnan(rates).any():
            return None
        return {"fpr": _GRID.tolist(), "tpr": [round(float(rate), 4) for rate in rates]}

    def without_non_finite(self, detector: str, arms: Sequence[ArmResult]) -> float | None:
        """AUROC of these arms where only successes by finite logits count; None without any."""
        worst = worst_scores(_stacked(arms, detector)[0], np.stack([one.finite for one in arms]))
        return detect(self.natural[detector][self.kept], worst[self.kept], resamples=0, seed=0).auroc


def score_detector(
    scorer: ArmScorer, detector: str, arms: Sequence[ArmResult], *, threshold: float | None
) -> tuple[dict[str, list[dict[str, Any]]], list[dict[str, Any]], dict[str, float]]:
    """Every row of a detector, which flags above its threshold; arms adaptive to another are left out.

    Returns groups of arms that are not adaptive (``results``), of those that are, by themselves and with the others of
    the group (``white_box``), and each arm; the averages over groups by norm and objective; and the attribution by arm.
    """
    blind = _groups(one for one in arms if one.adaptive_to is None)
    adaptive = _groups(one for one in arms if one.adaptive_to == detector)
    whole = {group: scorer.multi_armed(detector, members) for group, members in blind.items()}
    alone = {group: scorer.multi_armed(detector, members) for group, members in adaptive.items()}
    results: list[dict[str, Any]] = []
    for group, members in blind.items():
        results += _entries(scorer, detector, group, members, whole[group])
    white_box: list[dict[str, Any]] = []
    for group, members in adaptive.items():
        white_box.append(
            _entry(scorer, detector, group, members, alone[group].all_arms, alone[group], scenario="white-box")
        )
        if group in blind:
            both = [*blind[group], *members]
            found = scorer.multi_armed(detector, both)
            white_box.append(_entry(scorer, detector, group, both, found.all_arms, found, scenario="all"))
    every = (*whole.values(), *alone.values())
    by_arm = {name: found for one in every for name, found in one.arms.items()}
    single = [
        {"arm": one.name, **by_arm[one.name].to_dict(), "slipped": _slipped(one, detector, threshold)}
        for one in arms
        if one.name in by_arm
    ]
    averages = [{"detector": detector, **row} for row in _averages(blind, whole)]
    shares = {name: share for one in every for name, share in (one.attribution or {}).items()}
    return {"results": results, "white_box": white_box, "arms": single}, averages, shares


def arm_row(one: ArmResult, attribution: Mapping[str, float | None], samples: int) -> dict[str, Any]:
    """One arm in ``result.json``, with its share of the attribution by detector."""
    arm = one.arm
    return {
        "name": one.name,
        **{key: getattr(arm, key) for key in ("group", "norm", "epsilon", "objective", "algorithm")},
        "attack": arm.resolved.description,
        "kind": arm.resolved.traits.kind,
        "adaptive_to": one.adaptive_to,
        "successes": int(one.success.sum()),
        "samples": samples,
        **one.cost,
        "attribution": dict(attribution),
    }


def outcomes_of(records: Sequence[Mapping[str, Any]], success: Bools) -> dict[str, int]:
    """Count the outcomes of an arm; candidates beyond the arm's own budget count by their success."""
    shown = [
        "beyond_epsilon" if record["outcome"] in BROKEN and not good else record["outcome"]
        for record, good in zip(records, success, strict=True)
    ]
    return dict(sorted(Counter(shown).items()))


def _groups(arms: Iterable[ArmResult]) -> dict[str, list[ArmResult]]:
    found: dict[str, list[ArmResult]] = {}
    for one in arms:
        found.setdefault(one.arm.group, []).append(one)
    return found


def _stacked(arms: Sequence[ArmResult], detector: str) -> tuple[Floats, Bools]:
    """Scores by a detector, and successes, ``(L, N)``."""
    return np.stack([one.scores[detector] for one in arms]), np.stack([one.success for one in arms])


def _entries(
    scorer: ArmScorer, detector: str, group: str, arms: list[ArmResult], whole: MultiArmed
) -> list[dict[str, Any]]:
    """The multi-armed row of a group, a row an objective and a row an algorithm."""
    entries = [{**_entry(scorer, detector, group, arms, whole.all_arms, whole), "curve": scorer.curve(detector, arms)}]
    if scorer.settings.published:
        published = published_curve(scorer.natural[detector], *_stacked(arms, detector))
        entries[0]["published"] = None if published is None else published.to_dict()
    for objective, found in whole.objectives.items():
        chosen = [one for one in arms if one.arm.objective in (objective, None)]
        entries.append(
            {
                **_entry(scorer, detector, group, chosen, found, None, objective=objective),
                "curve": scorer.curve(detector, chosen),
            }
        )
    for algorithm, found in whole.algorithms.items():
        chosen = [one for one in arms if one.arm.algorithm == algorithm]
        entries.append(_entry(scorer, detector, group, chosen, found, None, algorithm=algorithm))
    return entries


def _entry(
    scorer: ArmScorer,
    detector: str,
    group: str,
    arms: Sequence[ArmResult],
    found: Detection,
    whole: MultiArmed | None,
    *,
    objective: str | None = None,
    algorithm: str | None = None,
    scenario: str = "blind",
) -> dict[str, Any]:
    arm = arms[0].arm
    successes, finite, lost = (np.stack([getattr(a, flags) for a in arms]) for flags in ("success", "finite", "lost"))
    non_finite = int((successes.any(0) & ~finite.any(0) & scorer.kept).sum())
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
        "non_finite": non_finite,
        "auroc_without_non_finite": scorer.without_non_finite(detector, arms) if non_finite else found.auroc,
        "not_attacked": int((lost.any(0) & scorer.kept).sum()),
        "attribution": None if whole is None else whole.attribution,
    }


def _averages(groups: Mapping[str, Sequence[ArmResult]], whole: Mapping[str, MultiArmed]) -> list[dict[str, Any]]:
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


def _slipped(one: ArmResult, detector: str, threshold: float | None) -> int | None:
    if threshold is None:
        return None
    return int((one.success & (one.scores[detector] <= threshold)).sum())
