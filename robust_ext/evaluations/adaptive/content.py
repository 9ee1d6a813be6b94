"""From what the steps left to ``result.json``: worst cases, the gain over the static model, and warnings.

Predictions are bool masks ``(steps, N, repeats)``: right or finite, of the clean inputs and then each step, for samples
that it was not run on those of the clean inputs. ``there`` ``(steps, N)`` is which samples each was run on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robust_ext.core.random import derive_seed
from robust_ext.core.statistics import proportion_interval
from robust_ext.engine.run import Outcome
from robust_ext.engine.verify import LOST, OUTCOMES
from robust_ext.evaluations.adaptive.cascade import Bools, Floats, standing_after
from robust_ext.evaluations.adaptive.findings import find_faults, find_signs
from robust_ext.evaluations.adaptive.protocol import StepRun
from robust_ext.evaluations.caveats import attack_warnings, outside_warnings, time_table
from robust_ext.evaluations.result import framed

Outcomes = Sequence[Outcome[StepRun]]
# Of a worst case: the attack chosen for each sample, (N,), and fresh predictions on it, (N, repeats).
WorstCase = tuple[NDArray[np.intp], Floats]


def make_content(
    outcomes: Outcomes,
    *,
    cost: Mapping[str, Any],
    warnings: Sequence[str],
    not_run: Sequence[Mapping[str, str]],
    planned: Sequence[StepRun],
    begun: float,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Everything ``result.json`` holds, of the outcomes of the clean inputs and then the steps, in the order of both.

    ``cost`` is of a prediction, ``warnings`` those that are known already, ``not_run`` the steps that were not begun
    and why, ``planned`` all of them, ``begun`` when this call was. Next to it the result's records.
    """
    known = {one.run.title for one in outcomes}
    # A step with the gradients of another one would add nothing.
    missing = {run.category for run in planned if run.step and run.title not in known and not run.twin}
    ran = [one for one in outcomes if one.refusal is None]
    run = ran[0].run
    defense, model, seed = run.defense, run.given.threat_model, run.settings.seed
    there = _marked(ran, OUTCOMES)
    right, finite, static_right, static_finite = (
        _column(ran, key) for key in ("right", "finite", "static", "static_finite")
    )
    # For the choice, and for the count.
    half = run.settings.repeats if defense.random else None
    choosing, counting = right[:, :, :half], right[:, :, half or 0 :]
    halves = finite[:, :, :half], finite[:, :, half or 0 :]
    defended, worst, left = _side(ran, (choosing, counting), halves, there=there)
    static, _, static_left = _side(ran, (static_right,) * 2, (static_finite,) * 2, there=there)
    # How many of the samples that were lost were lost to which step.
    majority = left.mean(1) <= 0.5
    defended["worst_case"]["by"] = {one.run.title: int((majority & (worst == n)).sum()) for n, one in enumerate(ran)}
    content = framed(
        "test_time",
        run.given,
        outcomes[1:],
        norm=model.norm,
        epsilon=model.epsilon,
        defense=type(defense).__name__,
        random=defense.random,
        batch_level=defense.batch_level,
        static=static,
        defended=defended,
        gain=_gain(left.mean(1) - static_left.mean(1), seed),
        categories=_categories(ran, choosing, counting, there=there, missing=missing),
        cost=dict(cost),
        findings=[finding.to_dict() for finding in find_faults(ran)],
        refused=[{"name": one.run.title, "reason": one.refusal} for one in outcomes if one.refusal is not None],
        not_run=[dict(one) for one in not_run],
        settings={**run.identity, **run.settings.to_dict()},
        seed=seed,
        time=time_table(outcomes, begun=begun),
    )
    upper = ", and stand as clean inputs, so that robust accuracy is an upper bound"
    broken = attack_warnings([(one.run.title, one.records) for one in ran], consequence=upper)
    outside = outside_warnings(
        (one.run.title, one.run.step.attack, model, one.records) for one in ran if one.run.step is not None
    )
    content["warnings"] = [*warnings, *broken, *outside, *find_signs(content, standing_after(ran).broken)]
    return content, _records(ran, counting[0], worst, left)


def _records(ran: Outcomes, clean: Floats, worst: NDArray[np.intp], left: Floats) -> list[dict[str, Any]]:
    """For each sample, the step that the worst case is ``by``, and shares of right predictions.

    ``right`` is the share on the clean input, ``worst`` that in the worst case.
    """
    columns = zip(ran[0].run.given.ids, clean.mean(1).tolist(), left.mean(1).tolist(), worst, strict=True)
    return [{"id": one, "right": right, "worst": after, "by": ran[n].run.title} for one, right, after, n in columns]


def _marked(ran: Outcomes, outcomes: Collection[str]) -> Bools:
    """Masks of the samples with such a record of each step, ``(steps, N)``."""
    found = np.zeros((len(ran), len(ran[0].records)), dtype=bool)
    for place, one in enumerate(ran):
        found[place, [record["index"] for record in one.records if record["outcome"] in outcomes]] = True
    return found


def _column(ran: Outcomes, key: str) -> Floats:
    """Collect a number (or one for each prediction) of each record, ``(steps, N, ...)``; clean without a step."""
    clean = [record[key] for record in ran[0].records]
    rows = []
    for one in ran:
        own = {record["index"]: record[key] for record in one.records}
        rows.append([own.get(index, before) for index, before in enumerate(clean)])
    found = np.array(rows, dtype=np.float64)
    return found if found.ndim == 3 else found[:, :, None]


def _side(
    ran: Outcomes, predictions: tuple[Floats, Floats], finite: tuple[Floats, Floats], *, there: Bools
) -> tuple[dict[str, Any], NDArray[np.intp], Floats]:
    """One of the two models' entry in ``result.json``, and its worst case; predictions that choose, and that count."""
    choosing, counting = predictions
    # What would be left if predictions that are not finite were right.
    unbroken = [np.maximum(right, 1 - good) for right, good in zip(predictions, finite, strict=True)]
    missed, lost = _marked(ran, LOST), choosing.max(2) == 0

    def summary(places: Sequence[int]) -> dict[str, Any]:
        at = list(places)
        left = _worst_case(choosing[at], counting[at], there[at])[1]
        whole = _worst_case(unbroken[0][at], unbroken[1][at], there[at])[1]
        return _summary(left, whole, missed[at].max(0))

    attacks = []
    for place, one in enumerate(ran[1:], start=1):
        own = summary([0, place])
        if not _is_stated([0, place], there, lost):
            own |= dict.fromkeys(("robust_accuracy", "interval", "deviation", "majority", "without_non_finite"))
        so_far = summary(range(place + 1))["robust_accuracy"]
        attacks.append({**_attack(one), **own, "samples": int(there[place].sum()), "still_robust": so_far})
    clean, whole = float(counting[0].mean()), summary(range(len(ran)))
    found = {"clean_accuracy": clean, "attacks": attacks, "worst_case": whole}
    return found, *_worst_case(choosing, counting, there)


def _is_stated(places: Sequence[int], there: Bools, lost: Bools) -> bool:
    """Return whether all steps broke everything that they would have broken alone."""
    broken = (lost[places] & there[places]).max(0)
    return bool((there[places] | broken).all())


def _worst(right: Floats, there: Bools) -> NDArray[np.intp]:
    """The attack that each sample is least likely to survive, ``(N,)``, by predictions.

    An attack's share over all samples that it was run on counts as one more prediction: few predictions of one sample
    mean little, and ties go to the attack that is stronger elsewhere. One that was not run on a sample took nothing
    from it.
    """
    overall = np.array([one[rows].mean() if rows.any() else 1.0 for one, rows in zip(right, there, strict=True)])
    share = (right.sum(2) + overall[:, None]) / (right.shape[2] + 1)
    found: NDArray[np.intp] = np.argmin(np.where(there, share, np.inf), 0)
    return found


def _worst_case(choosing: Floats, counting: Floats, there: Bools) -> WorstCase:
    """The worst case over steps, the first of which are the clean inputs: samples that are wrong are lost to those.

    One unlucky draw is no success, so the predictions that choose are not those that count. Where the choice by sample
    does worse than one attack next to the clean inputs, or everywhere, or wherever it was run, it is that one: no worst
    case lies above that of a single attack, and none above clean accuracy.
    """
    rows = np.arange(counting.shape[1])
    choices = [_worst(choosing, there)]
    for place in range(len(choosing)):
        pair = [0, place]
        choices += [np.take(pair, _worst(choosing[pair], there[pair])), np.where(there[place], place, 0)]
        choices.append(np.where(there[place], place, choices[0]))
    worst = min(choices, key=lambda choice: counting[choice, rows].mean())
    return worst, counting[worst, rows]


def _attack(one: Outcome[StepRun]) -> dict[str, Any]:
    step, spent = one.run.step, one.spent("attack")
    assert step is not None
    return {
        "name": step.name,
        "category": step.category,
        "attack": step.attack.description,
        "exposure": step.exposure,
        "outcomes": dict(sorted(Counter(record["outcome"] for record in one.records).items())),
        "seconds": spent.seconds,
        "passes": spent.passes,
    }


def _summary(right: Floats, unbroken: Floats, missed: Bools) -> dict[str, Any]:
    """Robust accuracy of predictions ``(N, repeats)``: their mean, its deviation between repeats, and by majority.

    ``unbroken`` is what they would be without non-finite logits; ``missed`` is which samples were not attacked.
    """
    samples, repeats = right.shape
    majority = right.mean(1) > 0.5
    found = proportion_interval(int(majority.sum()), samples)
    return {
        "robust_accuracy": float(right.mean()),
        "interval": None if found is None else list(found),
        "deviation": float(right.mean(0).std(ddof=1)) if repeats > 1 else 0.0,
        "majority": float(majority.mean()),
        "non_finite": int((unbroken.mean(1) > right.mean(1)).sum()),
        "without_non_finite": float(unbroken.mean()),
        "not_attacked": int((missed & majority).sum()),
    }


def _gain(differences: Floats, seed: int) -> dict[str, Any]:
    """Robust accuracy of the defense less that of the static model, with a bootstrap interval over samples."""
    draw = np.random.default_rng(derive_seed(seed, "test time gain"))
    # A few at a time, so that memory does not grow with a multiple of the samples.
    drawn = (draw.integers(len(differences), size=(50, len(differences))) for _ in range(40))
    means = np.concatenate([differences[rows].mean(1) for rows in drawn])
    return {"robust_accuracy": float(differences.mean()), "interval": np.quantile(means, [0.025, 0.975]).tolist()}


def _categories(
    ran: Outcomes, choosing: Floats, counting: Floats, *, there: Bools, missing: Collection[str]
) -> list[dict[str, Any]]:
    """For each category: what is left under it alone, and what would be left under all others.

    None where other categories decided which samples it was run on, or steps were not run of which that depends, which
    are of the ``missing`` categories.
    """
    kinds, lost, rows = [one.run.category for one in ran], choosing.max(2) == 0, []
    for kind in dict.fromkeys(kinds[1:]):
        alone = [place for place, other in enumerate(kinds) if other in (kind, "clean")]
        without = [place for place, other in enumerate(kinds) if other != kind]
        row: dict[str, Any] = {"category": kind, "alone": None, "without": None}
        for key, at, known in (("alone", alone, kind not in missing), ("without", without, not {*missing} - {kind})):
            if known and _is_stated(at, there, lost):
                row[key] = float(_worst_case(choosing[at], counting[at], there[at])[1].mean())
        rows.append(row)
    return rows
