"""From what the runs left to ``result.json``, and to the examples of the report."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.detectors.combining import combine
from robust_ext.engine.context import current_context
from robust_ext.engine.identity import versions
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.engine.run import Outcome
from robust_ext.engine.store import Floats
from robust_ext.evaluations.arm_runs import ArmRun, ScoredRun
from robust_ext.evaluations.arms import Arm
from robust_ext.evaluations.detectors import NamedDetector
from robust_ext.evaluations.mead.metric import Bools
from robust_ext.evaluations.mead.settings import MeadSettings
from robust_ext.evaluations.mead.summary import (
    ArmResult,
    ArmScorer,
    DetectorRows,
    arm_row,
    outcomes_of,
    score_detector,
)
from robust_ext.reports import Example

logger = logging.getLogger(__name__)

# Images of what slipped through, in all and of one detector.
_EXAMPLES, _EXAMPLES_EACH = 12, 3

R = TypeVar("R", bound=ScoredRun)
R_co = TypeVar("R_co", bound=ScoredRun, covariant=True)


@dataclass(frozen=True, kw_only=True)
class Scored(Generic[R_co]):
    """What a run left, and the scores of it."""

    outcome: Outcome[R_co]
    scores: Mapping[str, Floats]  # Of each detector, float64 (N,); none where the run was refused
    seconds: Mapping[str, float]  # What they took

    @staticmethod
    def of(outcome: Outcome[R]) -> Scored[R]:
        """With the scores that its store holds."""
        found = {} if outcome.refusal is not None else outcome.run.scores(outcome.store)
        scores = {name: scores for name, (scores, _) in found.items()}
        return Scored(outcome=outcome, scores=scores, seconds={name: took for name, (_, took) in found.items()})


def make_content(
    natural: Scored[ScoredRun],
    left: Sequence[Scored[ArmRun]],
    arms: Sequence[Arm],
    settings: MeadSettings,
    *,
    suite: str,
    detector_data: Tensor | None,
    begun: float,
) -> dict[str, Any]:
    """Everything ``result.json`` holds."""
    run, given = natural.outcome.run, natural.outcome.run.given
    scores = dict(natural.scores)
    results = _arm_results(left, arms)
    detectors = [_detector(one, [natural, *left], settings) for one in run.detectors]
    if settings.combine:
        detectors += _combine(scores, results, run, settings, detector_data)
    scorer = ArmScorer(natural=scores, correct=given.correct, settings=settings)
    rows = {one["name"]: _score(scorer, one, results) for one in detectors}
    attribution = {arm.name: {name: of.attribution.get(arm.name) for name, of in rows.items()} for arm in results}
    return {
        "kind": "mead",
        "samples": len(given.ids),
        "clean_accuracy": float(given.correct.mean()),
        "suite": suite,
        "naturals": settings.naturals,
        "detectors": detectors,
        "averages": [average for of in rows.values() for average in of.averages],
        "arms": [arm_row(one, attribution[one.name], len(given.ids)) for one in results],
        "refused": _refused(left),
        "settings": {
            **settings.to_dict(),
            "combine": list(settings.combine),
            "bounds": list(given.bounds),
            "detectors": {one.name: one.digest for one in run.detectors},
            **given.described,
            **current_context().origins,
        },
        "versions": versions(),
        "seed": settings.seed,
        "seconds": {
            **{phase: sum(one.outcome.total("seconds", phase) for one in left) for phase in ("attack", "verify")},
            "score": sum(entry["seconds"] for entry in detectors),
            # Of this call alone, where the others are of all processes and of earlier calls in the same folder.
            "total": time.perf_counter() - begun,
        },
    }


def _score(scorer: ArmScorer, entry: dict[str, Any], results: Sequence[ArmResult]) -> DetectorRows:
    """The rows of a detector, added to its entry."""
    rows = score_detector(scorer, entry["name"], results, threshold=entry["threshold"])
    entry |= {"results": rows.results, "white_box": rows.white_box, "arms": rows.arms}
    unscored = sum(row["unscored"] for row in rows.results if row["objective"] is row["algorithm"] is None)
    if unscored:
        logger.warning("%s scored NaN %d times; these scores are left out", entry["name"], unscored)
    return rows


def _detector(one: NamedDetector, left: Sequence[Scored[ScoredRun]], settings: MeadSettings) -> dict[str, Any]:
    detector, threshold = one.detector, one.detector.threshold
    shown = ", ".join(f"{name}={value!r}" for name, value in detector.settings.items())
    return {
        "name": one.name,
        "description": f"{type(detector).__name__}({shown})",
        "differentiable": detector.differentiable,
        "random": detector.random,
        "combines": None,
        "seconds": sum(scored.seconds.get(one.name, 0.0) for scored in left),
        "threshold": None if threshold.dim() or bool(threshold.isnan()) else float(threshold),
        "threshold_fpr": settings.detector_fpr if one.calibrated else None,
    }


def _refused(left: Sequence[Scored[ArmRun]]) -> list[dict[str, Any]]:
    return [
        {"arms": [arm.name for arm in run.arms], "detector": run.adaptive_to.name, "reason": one.outcome.refusal}
        for one in left
        if (run := one.outcome.run).adaptive_to is not None and one.outcome.refusal is not None
    ]


def pick_examples(
    left: Sequence[Scored[ArmRun]], given: EvaluationInputs, detectors: Sequence[NamedDetector]
) -> list[Example]:
    """Successful candidates that detectors scored lowest, each of another sample, for the report."""
    examples: list[Example] = []
    for detector in detectors:
        ranked = []
        for one in left:
            for record in one.outcome.records:
                score = float(one.scores[detector.name][record["index"]])
                if record["outcome"] == "found" and score == score:
                    ranked.append((score, record["index"], one.outcome.run.key, one.outcome))
        seen: set[int] = set()
        for _, index, _, outcome in sorted(ranked, key=lambda entry: entry[:3]):
            if index in seen or not given.correct[index]:
                continue
            seen.add(index)
            examples.append(_example(index, outcome, detector.name, given))
            if len(seen) == _EXAMPLES_EACH:
                break
    return examples[:_EXAMPLES]


def _example(index: int, outcome: Outcome[ArmRun], detector: str, given: EvaluationInputs) -> Example:
    rows = next(rows for rows in outcome.run.blocks if index in rows)
    return Example(
        attack=f"{outcome.run.title}, past detector {detector}",
        sample=given.ids[index],
        outcome="found",
        clean=given.inputs[index].cpu().numpy(),
        candidate=outcome.run.points(rows, outcome.store)[index - rows[0]].cpu().numpy(),
        bounds=given.bounds,
    )


def _arm_results(left: Sequence[Scored[ArmRun]], arms: Sequence[Arm]) -> list[ArmResult]:
    """Each arm's part of its runs."""
    results = []
    for arm in arms:
        for one in left:
            outcome, run = one.outcome, one.outcome.run
            if outcome.refusal is not None or not any(arm is other for other in run.arms):
                continue
            success, known = _success(arm, outcome), None if run.adaptive_to is None else run.adaptive_to.name
            # A run that several arms share is split between them.
            alike = len(run.arms)
            cost = {
                "outcomes": outcomes_of(outcome.records, success),
                "seconds": outcome.total("seconds", "attack") / alike,
                "passes": {way: outcome.total("passes", way) / alike for way in ("forward", "backward")},
            }
            name = arm.name if known is None else f"{arm.name}, knowing {known}"
            scores = dict(one.scores)
            results.append(ArmResult(arm=arm, name=name, adaptive_to=known, success=success, scores=scores, cost=cost))
    return results


def _success(arm: Arm, outcome: Outcome[ArmRun]) -> Bools:
    """Where a candidate is misclassified and within the arm's own budget."""
    limit = np.inf
    if arm.epsilon is not None:
        limit = arm.epsilon + outcome.run.threat_model.tolerance(outcome.run.given.inputs[0].numel())
    return np.array([record["outcome"] == "found" and record["distance"] <= limit for record in outcome.records])


def _combine(
    natural: dict[str, Floats],
    results: Sequence[ArmResult],
    run: ScoredRun,
    settings: MeadSettings,
    detector_data: Tensor | None,
) -> list[dict[str, Any]]:
    """Detectors made of all detectors; their scores are added to those given."""
    members = [one.name for one in run.detectors]
    if detector_data is None:
        raise InvalidArgumentError(
            "detector_data", "nothing, and detectors to combine", "clean inputs, whose scores put theirs on one scale"
        )
    if len(members) < 2:
        raise InvalidArgumentError("combine", f"{len(members)} detector", "at least two detectors to combine")
    begun, clean, entries = time.perf_counter(), _clean_scores(run, detector_data), []
    for method in settings.combine:
        name = f"{method} of {', '.join(members)}"
        combined = partial(combine, clean=clean, method=method)
        natural[name] = combined(np.stack([natural[member] for member in members]))
        for one in results:
            one.scores[name] = combined(np.stack([one.scores[member] for member in members]))
        of_clean = np.sort(combined(np.stack(clean)))[::-1]
        entries.append(
            {
                "name": name,
                "description": f"{method} of the ranks among clean scores",
                "differentiable": all(one.detector.differentiable for one in run.detectors),
                "random": any(one.detector.random for one in run.detectors),
                "combines": members,
                "seconds": time.perf_counter() - begun,
                "threshold": float(of_clean[min(int(settings.detector_fpr * len(of_clean)), len(of_clean) - 1)]),
                "threshold_fpr": settings.detector_fpr,
            }
        )
        begun = time.perf_counter()
    return entries


def _clean_scores(run: ScoredRun, detector_data: Tensor) -> list[Floats]:
    """Scores of the clean inputs beside the samples, of each detector."""
    clean, batches = [], torch.split(detector_data.to(run.given.inputs.device), run.batch_size)
    for one in run.detectors:
        seed = derive_seed(run.seed, "mead calibration scores", one.name)
        with seeded_globals(seed), torch.no_grad():
            clean.append(torch.cat([one.detector.score(batch) for batch in batches]).double().cpu().numpy())
    return clean
