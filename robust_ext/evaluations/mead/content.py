"""From what the runs left to ``result.json``, and to the examples of the report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robust_ext.core.cost import Spent
from robust_ext.core.errors import InvalidArgumentError, warn
from robust_ext.core.examples import Example
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.detectors.combining import combine
from robust_ext.engine.run import Outcome
from robust_ext.engine.store import Floats
from robust_ext.engine.verify import BROKEN, LOST
from robust_ext.evaluations.arms import Arm, ArmRun
from robust_ext.evaluations.causes.attaching import OF_LABELS, find_causes, judged_by_label, of_arm, prober
from robust_ext.evaluations.causes.finding import Finding
from robust_ext.evaluations.causes.pasting import Caller
from robust_ext.evaluations.causes.setup import find_setup
from robust_ext.evaluations.caveats import Part, attack_warnings, outside_warnings, time_table
from robust_ext.evaluations.detectors import NamedDetector, has_threshold
from robust_ext.evaluations.mead.settings import MeadSettings
from robust_ext.evaluations.mead.summary import ArmResult, DetectorRows, arm_row
from robust_ext.evaluations.result import framed
from robust_ext.evaluations.scored_runs import ScoredRun

# Images of what slipped through, in all and of one detector.
_EXAMPLES, _EXAMPLES_EACH = 12, 3

Outcomes = Sequence[Outcome[ArmRun]]


def make_content(
    natural: Outcome[ScoredRun],
    left: Outcomes,
    arms: Sequence[Arm],
    settings: MeadSettings,
    *,
    suite: str,
    detector_data: Tensor | None,
    begun: float,
) -> dict[str, Any]:
    """Everything ``result.json`` holds."""
    run, given = natural.run, natural.run.given
    ran = [one for one in left if one.refusal is None]
    of_clean, *of_arms = scored = [one.run.scores(one.store) for one in (natural, *ran)]
    scores = {name: found for name, (found, _) in of_clean.items()}
    results = [
        _arm_result(arm, one, {name: values for name, (values, _) in found.items()})
        for arm in arms
        for one, found in zip(ran, of_arms, strict=True)
        if any(arm is other for other in one.run.arms)
    ]
    detectors = [_detector(one, sum(of[one.name][1] for of in scored), settings) for one in run.detectors]
    if settings.combine:
        detectors += _combine(scores, results, run, settings, detector_data)
    averages = []
    for entry in detectors:
        name, threshold = entry["name"], entry["threshold"]
        rows = DetectorRows(name, scores[name], given.correct, settings, threshold).of(results)
        averages += rows.pop("averages")
        entry |= rows
        unscored = sum(row["unscored"] for row in rows["results"] if row["objective"] is row["algorithm"] is None)
        if unscored:
            warn(f"{name} scored NaN {unscored} times; these scores are left out")
    upper = ", and count as no success, so that detection is an upper bound"
    return framed(
        "mead",
        given,
        left,
        clean_accuracy=float(given.correct.mean()),
        suite=suite,
        naturals=settings.naturals,
        detectors=detectors,
        averages=averages,
        arms=[arm_row(one, detectors, len(given.ids)) for one in results],
        refused=[
            {"arms": [arm.name for arm in one.run.arms], "detector": known.name, "reason": one.refusal}
            for one in left
            if (known := one.run.adaptive_to) is not None and one.refusal is not None
        ],
        findings=[finding.to_dict() for finding in find_faults(run, ran)],
        warnings=attack_warnings([(one.run.title, one.records) for one in left], consequence=upper)
        + outside_warnings((one.run.title, one.run.attack, one.run.threat_model, one.records) for one in left),
        settings={**settings.to_dict(), "detectors": {one.name: one.digest for one in run.detectors}},
        seed=settings.seed,
        time=time_table(
            [natural, *left],
            begun=begun,
            others=[Part("scores", entry["name"], Spent(seconds=entry["seconds"])) for entry in detectors],
        ),
    )


def _arm_result(arm: Arm, outcome: Outcome[ArmRun], scores: dict[str, Floats]) -> ArmResult:
    """An arm's part of its run, whose candidates count within the arm's own budget."""
    run, limit = outcome.run, np.inf
    if arm.epsilon is not None:
        limit = arm.epsilon + run.threat_model.tolerance(run.given.inputs[0].numel())
    outcomes = [record["outcome"] for record in outcome.records]
    near = [record["distance"] is not None and record["distance"] <= limit for record in outcome.records]
    success, finite = (
        np.array([one in counted and inside for one, inside in zip(outcomes, near, strict=True)], dtype=np.bool_)
        for counted in (BROKEN, ("found",))
    )
    pairs = zip(outcomes, success, strict=True)
    shown = Counter("beyond_epsilon" if one in BROKEN and not good else one for one, good in pairs)
    # A run that several arms share is split between them.
    alike, spent = len(run.arms), outcome.spent("attack")
    cost = {
        "outcomes": dict(sorted(shown.items())),
        "seconds": spent.seconds / alike,
        "passes": {way: rows / alike for way, rows in spent.passes.items()},
    }
    known = None if run.adaptive_to is None else run.adaptive_to.name
    return ArmResult(
        arm=arm,
        name=arm.name if known is None else f"{arm.name}, knowing {known}",
        adaptive_to=known,
        success=success,
        finite=finite,
        lost=np.array([one in LOST for one in outcomes]),
        scores=scores,
        cost=cost,
    )


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
    begun, clean, entries = time.perf_counter(), list[Floats](), []
    batches = torch.split(detector_data.to(run.given.inputs.device), run.batch_size)
    for one in run.detectors:
        with seeded_globals(derive_seed(run.seed, "mead calibration scores", one.name)), torch.no_grad():
            clean.append(torch.cat([one.detector.score(batch) for batch in batches]).double().cpu().numpy())
    for method in settings.combine:
        name = f"{method} of {', '.join(members)}"
        for scores in (natural, *(one.scores for one in results)):
            scores[name] = combine(np.stack([scores[member] for member in members]), clean, method=method)
        of_clean = np.sort(combine(np.stack(clean), clean, method=method))[::-1]
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


def find_faults(run: ScoredRun, ran: Outcomes) -> list[Finding]:
    """Find faults of arms, without comparing them; ranked."""
    given = run.given
    budgeted = {one.run.title: one.run.threat_model for one in ran if one.run.arms[0].epsilon is not None}
    found: Sequence[Finding] = find_setup(given, seed=run.seed, budgets=[*budgeted.values()])
    if not found:
        probe = prober(given.module, given.inputs, given.labels, threat_model=given.threat_model, seed=run.seed)
        causes = find_causes([of_arm(one, name=one.run.title) for one in ran], probe, compared=False)
        # The epsilon of the model stands for those of the arms, which were looked at.
        found = [one for one in causes if one.code != "threat_scale"]
    # By design an objective without labels and one of detectors do not end where the label's does.
    others = {
        one.run.title
        for one in ran
        if one.run.adaptive_to is not None or one.run.arms[0].objective not in (None, "ace")
    }
    attacks = {one.run.title: one.run.attack for one in ran}
    caller = Caller(module=given.module, attacks=attacks, arms=budgeted, images=given.inputs.dim() == 4)
    kept = (one for one in found if one.attack not in others or one.code not in OF_LABELS)
    return caller.addressed(one for one in kept if judged_by_label(given, one))


def pick_examples(left: Outcomes, detectors: Sequence[NamedDetector]) -> list[Example]:
    """Successful candidates that detectors scored lowest, each of another sample, for the report."""
    examples: list[Example] = []
    scored = [(one, one.run.scores(one.store)) for one in left if one.refusal is None]
    for name in (detector.name for detector in detectors):
        ranked = [
            (score, record["index"], one.run.key, one)
            for one, scores in scored
            for record in one.records
            if record["outcome"] in BROKEN and one.run.given.correct[record["index"]]
            if not np.isnan(score := float(scores[name][0][record["index"]]))
        ]
        lowest: dict[int, Outcome[ArmRun]] = {}
        for _, index, _, one in sorted(ranked, key=lambda entry: entry[:3]):
            if len(lowest) < _EXAMPLES_EACH:
                lowest.setdefault(index, one)
        examples += [_example(index, one, name) for index, one in lowest.items()]
    return examples[:_EXAMPLES]


def _example(index: int, outcome: Outcome[ArmRun], detector: str) -> Example:
    run, given = outcome.run, outcome.run.given
    rows = next(rows for rows in run.blocks if index in rows)
    return Example(
        attack=f"{run.title}, past detector {detector}",
        sample=given.ids[index],
        outcome=outcome.records[index]["outcome"],
        clean=given.inputs[index].cpu().numpy(),
        candidate=run.points(rows, outcome.store)[index - rows[0]].cpu().numpy(),
        bounds=given.bounds,
    )
