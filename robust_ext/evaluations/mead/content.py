"""From what the runs left to ``result.json``, and to the examples of the report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robust_ext.core.cost import Spent
from robust_ext.core.errors import InvalidArgumentError, warn
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.detectors.combining import combine
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.engine.run import Outcome
from robust_ext.engine.store import Floats
from robust_ext.engine.verify import BROKEN, LOST
from robust_ext.evaluations.arm_runs import ArmRun
from robust_ext.evaluations.arms import Arm
from robust_ext.evaluations.causes.attaching import OF_LABELS, find_causes, of_arm, prober
from robust_ext.evaluations.causes.finding import Finding
from robust_ext.evaluations.causes.pasting import Caller
from robust_ext.evaluations.causes.setup import find_setup
from robust_ext.evaluations.caveats import Part, attack_warnings, outside_warnings, time_table
from robust_ext.evaluations.detectors import NamedDetector, has_threshold
from robust_ext.evaluations.mead.metric import Bools
from robust_ext.evaluations.mead.settings import MeadSettings
from robust_ext.evaluations.mead.summary import (
    ArmResult,
    ArmScorer,
    arm_row,
    outcomes_of,
    score_detector,
)
from robust_ext.evaluations.result import framed
from robust_ext.evaluations.scored_runs import ScoredRun
from robust_ext.reports import Example


def find_faults(run: ScoredRun, left: Sequence[Outcome[ArmRun]]) -> list[Finding]:
    """Find faults of arms, without comparing them; ranked."""
    given = run.given
    probe = prober(given.module, given.inputs, given.labels, threat_model=given.threat_model, seed=run.seed)
    ran = {one.run.title: one for one in left if one.refusal is None}
    budgets = [one.run.threat_model for one in ran.values() if one.run.arms[0].epsilon is not None]
    found = find_setup(given, seed=run.seed, budgets=budgets) or find_causes(
        [of_arm(one, name=name) for name, one in ran.items()], probe, compared=False
    )
    # By design an objective without labels and one of detectors do not end where the label's does.
    others = {
        name
        for name, one in ran.items()
        if one.run.adaptive_to is not None or one.run.arms[0].objective not in (None, "ace")
    }
    caller = Caller(
        module=given.module,
        attacks={name: one.run.attack for name, one in ran.items()},
        arms={name: one.run.threat_model for name, one in ran.items() if one.run.arms[0].epsilon is not None},
        images=given.inputs.dim() == 4,
    )
    return caller.addressed(one for one in found if one.attack not in others or one.code not in OF_LABELS)


# Images of what slipped through, in all and of one detector.
_EXAMPLES, _EXAMPLES_EACH = 12, 3


def make_content(
    natural: Outcome[ScoredRun],
    left: Sequence[Outcome[ArmRun]],
    arms: Sequence[Arm],
    settings: MeadSettings,
    *,
    suite: str,
    detector_data: Tensor | None,
    begun: float,
) -> dict[str, Any]:
    """Everything ``result.json`` holds."""
    run, given = natural.run, natural.run.given
    of_clean, *of_arms = scored = [_scores(one) for one in (natural, *left)]
    scores, results = {name: found for name, (found, _) in of_clean.items()}, _arm_results(left, of_arms, arms)
    detectors = [_detector(one, sum(of[one.name][1] for of in scored if of), settings) for one in run.detectors]
    if settings.combine:
        detectors += _combine(scores, results, run, settings, detector_data)
    scorer = ArmScorer(natural=scores, correct=given.correct, settings=settings)
    averages, attribution = [], {}
    for entry in detectors:
        rows, of_norms, shares = score_detector(scorer, entry["name"], results, threshold=entry["threshold"])
        entry |= rows
        averages += of_norms
        attribution[entry["name"]] = shares
        unscored = sum(row["unscored"] for row in rows["results"] if row["objective"] is row["algorithm"] is None)
        if unscored:
            warn(f"{entry['name']} scored NaN {unscored} times; these scores are left out")
    return framed(
        "mead",
        given,
        left,
        suite=suite,
        naturals=settings.naturals,
        detectors=detectors,
        averages=averages,
        arms=[
            arm_row(one, {name: shares.get(one.name) for name, shares in attribution.items()}, len(given.ids))
            for one in results
        ],
        refused=_refused(left),
        findings=[finding.to_dict() for finding in find_faults(run, left)],
        warnings=attack_warnings(
            [(one.run.title, one.records) for one in left],
            consequence=", and count as no success, so that detection is an upper bound",
        )
        + outside_warnings((one.run.title, one.run.attack, one.run.threat_model, one.records) for one in left),
        settings={**settings.to_dict(), "detectors": {one.name: one.digest for one in run.detectors}},
        seed=settings.seed,
        time=time_table(
            [natural, *left],
            begun=begun,
            others=[Part("scores", entry["name"], Spent(seconds=entry["seconds"])) for entry in detectors],
        ),
    )


def _scores(one: Outcome[ScoredRun]) -> dict[str, tuple[Floats, float]]:
    """Each detector's scores of a run, float64 ``(N,)``, and their seconds; none where the run was refused."""
    return {} if one.refusal is not None else one.run.scores(one.store)


def _detector(one: NamedDetector, seconds: float, settings: MeadSettings) -> dict[str, Any]:
    detector, threshold = one.detector, one.detector.threshold
    shown = ", ".join(f"{name}={value!r}" for name, value in detector.settings.items())
    return {
        "name": one.name,
        "description": f"{type(detector).__name__}({shown})",
        "differentiable": detector.differentiable,
        "random": detector.random,
        "combines": None,
        "seconds": seconds,
        "threshold": None if threshold.dim() or bool(threshold.isnan()) else float(threshold),
        "threshold_fpr": settings.detector_fpr if has_threshold(detector) else None,
    }


def _refused(left: Sequence[Outcome[ArmRun]]) -> list[dict[str, Any]]:
    return [
        {"arms": [arm.name for arm in run.arms], "detector": run.adaptive_to.name, "reason": one.refusal}
        for one in left
        if (run := one.run).adaptive_to is not None and one.refusal is not None
    ]


def pick_examples(
    left: Sequence[Outcome[ArmRun]], given: EvaluationInputs, detectors: Sequence[NamedDetector]
) -> list[Example]:
    """Successful candidates that detectors scored lowest, each of another sample, for the report."""
    examples: list[Example] = []
    scored = [_scores(one) for one in left]
    for detector in detectors:
        ranked = []
        for one, scores in zip(left, scored, strict=True):
            for record in one.records:
                score = float(scores[detector.name][0][record["index"]])
                if record["outcome"] in BROKEN and score == score:
                    ranked.append((score, record["index"], one.run.key, one))
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
        outcome=outcome.records[index]["outcome"],
        clean=given.inputs[index].cpu().numpy(),
        candidate=outcome.run.points(rows, outcome.store)[index - rows[0]].cpu().numpy(),
        bounds=given.bounds,
    )


def _arm_results(
    left: Sequence[Outcome[ArmRun]], scored: Sequence[Mapping[str, tuple[Floats, float]]], arms: Sequence[Arm]
) -> list[ArmResult]:
    """Each arm's part of its runs."""
    results = []
    for arm in arms:
        for outcome, found in zip(left, scored, strict=True):
            run = outcome.run
            if outcome.refusal is not None or not any(arm is other for other in run.arms):
                continue
            success, finite = (_success(arm, outcome, counted) for counted in (BROKEN, ("found",)))
            lost = np.array([record["outcome"] in LOST for record in outcome.records])
            known = None if run.adaptive_to is None else run.adaptive_to.name
            # A run that several arms share is split between them.
            alike = len(run.arms)
            spent = outcome.spent("attack")
            cost = {
                "outcomes": outcomes_of(outcome.records, success),
                "seconds": spent.seconds / alike,
                "passes": {way: rows / alike for way, rows in spent.passes.items()},
            }
            name = arm.name if known is None else f"{arm.name}, knowing {known}"
            scores = {detector: values for detector, (values, _) in found.items()}
            found_by = {"success": success, "finite": finite, "lost": lost}
            results.append(ArmResult(arm=arm, name=name, adaptive_to=known, scores=scores, cost=cost, **found_by))
    return results


def _success(arm: Arm, outcome: Outcome[ArmRun], counted: Sequence[str]) -> Bools:
    """Return a mask of candidates with one of these outcomes within the arm's own budget."""
    limit = np.inf
    if arm.epsilon is not None:
        limit = arm.epsilon + outcome.run.threat_model.tolerance(outcome.run.given.inputs[0].numel())
    return np.array([record["outcome"] in counted and record["distance"] <= limit for record in outcome.records])


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
    """Scores of the clean inputs next to the samples, of each detector."""
    clean, batches = [], torch.split(detector_data.to(run.given.inputs.device), run.batch_size)
    for one in run.detectors:
        seed = derive_seed(run.seed, "mead calibration scores", one.name)
        with seeded_globals(seed), torch.no_grad():
            clean.append(torch.cat([one.detector.score(batch) for batch in batches]).double().cpu().numpy())
    return clean
