"""From what the runs left to ``result.json``, and to the examples of the report."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.detectors.combining import combine
from robust_ext.engine.arm import Arm
from robust_ext.engine.identity import versions
from robust_ext.engine.subject import Finished, RunOutcome, Subject
from robust_ext.evaluations.mead.metric import Bools
from robust_ext.evaluations.mead.roc import Floats
from robust_ext.evaluations.mead.settings import MeadSettings
from robust_ext.evaluations.mead.summary import Judge, Judged, Naturals, arm_row, judge_detector, outcomes_of
from robust_ext.reports import Example

logger = logging.getLogger(__name__)

# Images of what slipped through, in all and of one detector.
_EXAMPLES, _EXAMPLES_EACH = 12, 3


def make_content(
    finished: Finished,
    arms: Sequence[Arm],
    subject: Subject,
    settings: MeadSettings,
    *,
    calibration: Tensor | None,
    described: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything ``result.json`` holds.

    Args:
        finished: What the runs left.
        arms: In the order of the suite.
        subject: What was attacked and judged.
        settings: Of the run.
        calibration: Clean inputs beside the samples, where there are some.
        described: ``suite`` and ``origin`` in words, and ``begun``, the clock when the run began.

    Raises:
        InvalidArgumentError: Detectors are to be combined, and there are no clean inputs for it.
    """
    correct: Bools = (subject.logits.argmax(1) == subject.labels).cpu().numpy()
    natural = dict(finished.natural.scores)
    judged = _judged(finished, arms, subject)
    detectors: list[dict[str, Any]] = [
        {
            "name": one.name,
            "description": _describe(one.detector),
            "differentiable": one.detector.differentiable,
            "random": one.detector.random,
            "combines": None,
            "seconds": sum(left.score_seconds.get(one.name, 0.0) for left in finished.all()),
            "threshold": _threshold(one.detector.threshold),
            "threshold_fpr": settings.detector_fpr if one.calibrated else None,
        }
        for one in subject.watched
    ]
    if settings.combine:
        detectors += _combine(natural, judged, subject, settings, calibration)
    judge = Judge(
        naturals=Naturals(scores=natural, correct=correct, handling=settings.naturals),
        resamples=settings.resamples,
        seed=settings.seed,
        published=settings.published,
    )
    averages: list[dict[str, Any]] = []
    blame: dict[str, dict[str, float | None]] = {one.name: {} for one in judged}
    for entry in detectors:
        rows = judge_detector(judge, entry["name"], judged, threshold=entry["threshold"])
        entry |= {"results": rows.results, "white_box": rows.white_box, "arms": rows.arms}
        averages += rows.averages
        for one in judged:
            blame[one.name][entry["name"]] = rows.blame.get(one.name)
        unscored = sum(row["unscored"] for row in rows.results if row["objective"] is row["algorithm"] is None)
        if unscored:
            logger.warning("%s scored NaN %d times; these scores are left out", entry["name"], unscored)
    content = {
        "kind": "mead",
        "samples": len(subject.samples),
        "clean_accuracy": float(correct.mean()),
        "suite": described["suite"],
        "naturals": settings.naturals,
        "detectors": detectors,
        "averages": averages,
        "arms": [arm_row(one, blame[one.name], len(subject.samples)) for one in judged],
        "refused": [
            {"arms": [arm.name for arm in left.run.arms], "detector": left.run.knows, "reason": left.refusal}
            for left in finished.outcomes.values()
            if left.refusal is not None
        ],
        "settings": {
            **settings.to_dict(),
            "bounds": list(subject.bounds),
            "detectors": {one.name: one.digest for one in subject.watched},
            **subject.described,
            **{f"{name}_origin": words for name, words in described["origin"].items()},
        },
        "versions": versions(),
        "seed": settings.seed,
        "seconds": {},
    }
    content["seconds"] = _seconds(finished, detectors, time.perf_counter() - described["begun"])
    return content


def pick_examples(content: Mapping[str, Any], finished: Finished, subject: Subject) -> list[Example]:
    """Successful candidates that detectors scored lowest, each of another sample, for the report."""
    examples: list[Example] = []
    for watched in subject.watched:
        ranked = []
        for key, left in finished.outcomes.items():
            for record in left.records:
                score = float(left.scores[watched.name][record["index"]])
                if record["outcome"] == "found" and score == score:
                    ranked.append((score, record["index"], key, left))
        seen: set[int] = set()
        for _, index, key, left in sorted(ranked, key=lambda entry: entry[:3]):
            if index in seen or bool(subject.logits[index].argmax() != subject.labels[index]):
                continue
            seen.add(index)
            examples.append(_example(index, key, left, watched.name, finished, subject))
            if len(seen) == _EXAMPLES_EACH:
                break
    return examples[:_EXAMPLES]


def _example(index: int, key: str, left: RunOutcome, detector: str, finished: Finished, subject: Subject) -> Example:
    start = index - index % subject.batch_size
    return Example(
        attack=f"{left.run.title}, past detector {detector}",
        sample=subject.samples[index],
        outcome="found",
        clean=subject.inputs[index].cpu().numpy(),
        candidate=finished.stores[key].candidates(start)[index - start].numpy(),
        bounds=subject.bounds,
    )


def _judged(finished: Finished, arms: Sequence[Arm], subject: Subject) -> list[Judged]:
    """Each arm with its own view of its run."""
    judged = []
    for arm in arms:
        for left in finished.outcomes.values():
            if left.refusal is not None or not any(arm is other for other in left.run.arms):
                continue
            success = _success(arm, left, subject)
            alike = len(left.run.arms)
            judged.append(
                Judged(
                    arm=arm,
                    name=arm.name if left.run.knows is None else f"{arm.name}, knowing {left.run.knows}",
                    knows=left.run.knows,
                    success=success,
                    scores=dict(left.scores),
                    cost={
                        "outcomes": outcomes_of(left.records, success),
                        # A run that several arms share is split between them.
                        "seconds": sum(timing["seconds"]["attack"] for timing in left.timings) / alike,
                        "passes": {
                            way: sum(timing["passes"][way] for timing in left.timings) / alike
                            for way in ("forward", "backward")
                        },
                    },
                )
            )
    return judged


def _success(arm: Arm, left: RunOutcome, subject: Subject) -> Bools:
    """Where a candidate is misclassified and within the arm's own budget."""
    limit = np.inf
    if arm.epsilon is not None:
        limit = arm.epsilon + left.run.threat_model.tolerance(subject.inputs[0].numel())
    return np.array([record["outcome"] == "found" and record["distance"] <= limit for record in left.records])


def _combine(
    natural: dict[str, Floats],
    judged: Sequence[Judged],
    subject: Subject,
    settings: MeadSettings,
    calibration: Tensor | None,
) -> list[dict[str, Any]]:
    """Detectors made of all detectors; their scores are added to those given."""
    if calibration is None:
        raise InvalidArgumentError(
            "detector_data", "nothing, and detectors to combine", "clean inputs, whose scores put theirs on one scale"
        )
    members = [one.name for one in subject.watched]
    if len(members) < 2:
        raise InvalidArgumentError("combine", f"{len(members)} detector", "at least two detectors to combine")
    begun, clean = time.perf_counter(), []
    with torch.no_grad():
        for one in subject.watched:
            with seeded_globals(derive_seed(settings.seed, "mead calibration scores", one.name)):
                batches = torch.split(calibration.to(subject.inputs.device), settings.batch_size)
                clean.append(torch.cat([one.detector.score(batch) for batch in batches]).double().cpu().numpy())
    entries = []
    for method in settings.combine:
        name = f"{method} of {', '.join(members)}"

        def combined(scores: Mapping[str, Floats], method: str = method) -> Floats:
            return combine(np.stack([scores[member] for member in members]), clean, method=method)

        natural[name] = combined(natural)
        for arm in judged:
            arm.scores[name] = combined(arm.scores)
        of_clean = np.sort(combine(np.stack(clean), clean, method=method))[::-1]
        entries.append(
            {
                "name": name,
                "description": f"{method} of the ranks among clean scores",
                "differentiable": all(one.detector.differentiable for one in subject.watched),
                "random": any(one.detector.random for one in subject.watched),
                "combines": members,
                "seconds": time.perf_counter() - begun,
                "threshold": float(of_clean[min(int(settings.detector_fpr * len(of_clean)), len(of_clean) - 1)]),
                "threshold_fpr": settings.detector_fpr,
            }
        )
        begun = time.perf_counter()
    return entries


def _describe(detector: Any) -> str:
    shown = ", ".join(f"{name}={value!r}" for name, value in detector.settings.items())
    return f"{type(detector).__name__}({shown})"


def _threshold(threshold: Tensor) -> float | None:
    return None if threshold.dim() or bool(threshold.isnan()) else float(threshold)


def _seconds(finished: Finished, detectors: Sequence[Mapping[str, Any]], total: float) -> dict[str, float]:
    """Seconds by phase, of all processes and of earlier calls in the same folder; ``total`` is of this call alone."""
    timings = [timing for left in finished.outcomes.values() for timing in left.timings]
    return {
        "attack": sum(timing["seconds"]["attack"] for timing in timings),
        "verify": sum(timing["seconds"]["verify"] for timing in timings),
        "score": sum(entry["seconds"] for entry in detectors),
        "total": total,
    }
