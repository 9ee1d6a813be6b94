"""From what the steps left to ``result.json``: worst cases, the gain over the static model, and warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robust_ext.core.random import derive_seed
from robust_ext.core.statistics import proportion_interval
from robust_ext.engine.context import current_context
from robust_ext.engine.identity import versions
from robust_ext.engine.outcomes import LOST
from robust_ext.engine.run import Outcome, isolated
from robust_ext.evaluations.adaptive.findings import find_faults
from robust_ext.evaluations.adaptive.plan import CATEGORIES
from robust_ext.evaluations.adaptive.protocol import StepRun
from robust_ext.evaluations.caveats import attack_warnings
from robust_ext.evaluations.timing import time_table

Floats = NDArray[np.float64]


def make_content(
    outcomes: Sequence[Outcome[StepRun]], *, cost: Mapping[str, Any], warnings: Sequence[str], begun: float
) -> dict[str, Any]:
    """Everything ``result.json`` holds, of the outcomes of the clean inputs and then the steps.

    ``cost`` is of a prediction, ``warnings`` those that are known already, ``begun`` when this call was.
    """
    ran = [one for one in outcomes if one.refusal is None]
    run = ran[0].run
    defense, model, seed = run.defense, run.given.threat_model, run.settings.seed
    predictions = _predictions(ran, "right")
    defended, worst, left = _side(ran, predictions, _predictions(ran, "finite"))
    sides = (_column(ran, key) for key in ("static", "static_finite"))
    static, _, static_left = _side(ran, *((one, one) for one in sides))
    # How many of the samples that were lost were lost to which step.
    lost = left.mean(1) <= 0.5
    defended["worst_case"]["by"] = {one.run.title: int((lost & (worst == n)).sum()) for n, one in enumerate(ran)}
    content = {
        "kind": "test_time",
        "samples": len(run.given.ids),
        "norm": model.norm,
        "epsilon": model.epsilon,
        "defense": type(defense).__name__,
        "random": defense.random,
        "batch_level": defense.batch_level,
        "static": static,
        "defended": defended,
        "gain": _gain(left.mean(1) - static_left.mean(1), seed),
        "categories": _categories(ran, *predictions),
        "cost": dict(cost),
        "findings": [finding.to_dict() for finding in find_faults(ran)],
        "refused": [{"name": one.run.title, "reason": one.refusal} for one in outcomes if one.refusal is not None],
        "settings": {**run.identity, **current_context().origins},
        "isolated": isolated(outcomes[1:]),
        "versions": versions(),
        "seed": seed,
        "time": time_table(outcomes, begun=begun),
    }
    upper = ", and stand as clean inputs, so that robust accuracy is an upper bound"
    broken = attack_warnings([(one.run.title, one.records) for one in ran], consequence=upper)
    content["warnings"] = [*warnings, *broken, *_warnings(content)]
    return content


def _side(
    ran: Sequence[Outcome[StepRun]], predictions: tuple[Floats, Floats], finite: tuple[Floats, Floats]
) -> tuple[dict[str, Any], NDArray[np.intp], Floats]:
    """What ``result.json`` holds of one of the two models, of what :func:`_predictions` returned of it.

    Beside it are the attack chosen for each sample and predictions on it, see :func:`_worst_case`.
    """
    # What would be left if predictions that are not finite were right.
    first, second = (np.maximum(right, 1 - good) for right, good in zip(predictions, finite, strict=True))
    missed: NDArray[np.bool_] = np.array([[record["outcome"] in LOST for record in one.records] for one in ran])
    worst, left = _worst_case(*predictions)
    attacks = [
        {**_attack(one), **_summary(*rows)}
        for one, *rows in zip(ran[1:], predictions[1][1:], second[1:], missed[1:], strict=True)
    ]
    found = {
        "clean_accuracy": float(predictions[1][0].mean()),
        "attacks": attacks,
        "worst_case": _summary(left, _worst_case(first, second)[1], missed.max(0)),
    }
    return found, worst, left


def _column(ran: Sequence[Outcome[StepRun]], key: str) -> Floats:
    """One number of each record, ``(steps, N, 1)``."""
    return np.array([[record[key] for record in one.records] for one in ran], dtype=np.float64)[:, :, None]


def _predictions(ran: Sequence[Outcome[StepRun]], key: str) -> tuple[Floats, Floats]:
    """Whether predictions were right or finite, ``(steps, N, repeats)``: those to choose by, and those that count."""
    right = np.array([[record[key] for record in one.records] for one in ran], dtype=np.float64)
    run = ran[0].run
    if not run.defense.random:
        return right, right
    return right[:, :, : run.settings.repeats], right[:, :, run.settings.repeats :]


def _worst(right: Floats) -> NDArray[np.intp]:
    """The attack that each sample is least likely to survive, ``(N,)``, by predictions ``(steps, N, repeats)``.

    An attack's share over all samples counts as one more prediction: few predictions of one sample mean little, and
    ties go to the attack that is stronger elsewhere.
    """
    overall = right.mean((1, 2))[:, None]
    found: NDArray[np.intp] = np.argmin((right.sum(2) + overall) / (right.shape[2] + 1), 0)
    return found


def _worst_case(first: Floats, second: Floats) -> tuple[NDArray[np.intp], Floats]:
    """The attack chosen for each sample, ``(N,)``, and fresh predictions on it, ``(N, repeats)``.

    One unlucky draw is no success, so the predictions that choose are not those that count. Where the choice by sample
    does worse than the one attack that is strongest on all, it is that attack everywhere: no worst case lies above a
    single attack.
    """
    worst = _worst(first)
    rows = np.arange(second.shape[1])
    strongest = int(np.argmin(second.mean((1, 2))))
    if second[strongest].mean() < second[worst, rows].mean():
        worst = np.full_like(worst, strongest)
    return worst, second[worst, rows]


def _attack(one: Outcome[StepRun]) -> dict[str, Any]:
    step = one.run.step
    assert step is not None
    return {
        "name": step.name,
        "category": step.category,
        "attack": step.attack.description,
        "exposure": step.exposure,
        "outcomes": dict(sorted(Counter(record["outcome"] for record in one.records).items())),
        "seconds": one.spent("attack").seconds,
        "passes": one.spent("attack").passes,
    }


def _summary(right: Floats, unbroken: Floats, missed: NDArray[np.bool_]) -> dict[str, Any]:
    """Robust accuracy of predictions ``(N, repeats)``: their mean, its deviation between repeats, and by majority.

    ``unbroken`` is what they would be without non-finite logits; ``missed`` is which samples were not attacked.
    """
    samples, repeats = right.shape
    majority = int((right.mean(1) > 0.5).sum())
    found = proportion_interval(majority, samples)
    return {
        "robust_accuracy": float(right.mean()),
        "interval": None if found is None else list(found),
        "deviation": float(right.mean(0).std(ddof=1)) if repeats > 1 else 0.0,
        "majority": majority / samples,
        "non_finite": int((unbroken.mean(1) > right.mean(1)).sum()),
        "without_non_finite": float(unbroken.mean()),
        "not_attacked": int((missed & (right.mean(1) > 0.5)).sum()),
    }


def _gain(differences: Floats, seed: int) -> dict[str, Any]:
    """Robust accuracy of the defense less that of the static model, with a bootstrap interval over samples."""
    draw = np.random.default_rng(derive_seed(seed, "test time gain"))
    # A few at a time, so that memory does not grow with a multiple of the samples.
    drawn = (draw.integers(len(differences), size=(50, len(differences))) for _ in range(40))
    means = np.concatenate([differences[rows].mean(1) for rows in drawn])
    low, high = np.quantile(means, [0.025, 0.975])
    return {"robust_accuracy": float(differences.mean()), "interval": [float(low), float(high)]}


def _categories(ran: Sequence[Outcome[StepRun]], first: Floats, second: Floats) -> list[dict[str, Any]]:
    """For each category: what is left under it alone, and what would be left under all others."""
    kinds = ["clean" if one.run.step is None else one.run.step.category for one in ran]
    rows = []
    for kind in dict.fromkeys(kinds[1:]):
        places = {
            "alone": [place for place, other in enumerate(kinds) if other in (kind, "clean")],
            "without": [place for place, other in enumerate(kinds) if other != kind],
        }
        left = {key: float(_worst_case(first[at], second[at])[1].mean()) for key, at in places.items()}
        rows.append({"category": kind, **left})
    return rows


def _warnings(content: Mapping[str, Any]) -> list[str]:
    """Signs that the evaluation, or the defense's own, is not to be trusted (Carlini et al. 2019; section 4)."""
    attacks = content["defended"]["attacks"]
    found = []

    def strongest(chosen: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        return min(chosen, key=lambda attack: float(attack["robust_accuracy"]), default=None)

    def warn(low: Mapping[str, Any] | None, high: Mapping[str, Any] | None, words: str) -> None:
        if low is None or high is None:
            return
        # What is within the noise of a random defense, or one sample, means nothing.
        noise = low["deviation"] + high["deviation"] + 1.5 / content["samples"]
        if low["robust_accuracy"] < high["robust_accuracy"] - noise:
            found.append(words.format(low=low["robust_accuracy"], high=high["robust_accuracy"]))

    by_kind = {kind: strongest([a for a in attacks if a["category"] == kind]) for kind in CATEGORIES}
    warn(
        strongest([a for a in attacks if a["name"].startswith("FGSM")]),
        strongest([a for a in attacks if a["category"] == "white-box" and not a["name"].startswith("FGSM")]),
        "One step (robust accuracy {low:.3f}) is stronger than many ({high:.3f}): the iterative attacks are led "
        "astray; average over more draws, or take smaller steps.",
    )
    warn(
        by_kind["black-box"],
        by_kind["white-box"],
        "Black-box attacks (robust accuracy {low:.3f}) are stronger than white-box ones ({high:.3f}): gradients "
        "through the defense are masked.",
    )
    warn(
        by_kind["transfer"],
        by_kind["white-box"],
        "Transfer from the static model (robust accuracy {low:.3f}) is stronger than white-box attacks ({high:.3f}): "
        "they do not get through the defense.",
    )
    if content["random"] and content["settings"]["draws"] == 1:
        found.append("The defense is random, and gradients are of a single draw: average over several (draws).")
    if content["defended"]["clean_accuracy"] < content["static"]["clean_accuracy"] - 0.1:
        found.append("The defense costs more than ten points of clean accuracy.")
    return found
