"""Robust accuracy as one function, and the content of its result."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import Unpack

from robust_ext.attacks.base import Attack
from robust_ext.core.cost import Spent
from robust_ext.core.criteria import Criterion
from robust_ext.core.settings import make_settings
from robust_ext.core.statistics import proportion_interval
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import Array
from robust_ext.engine.executors import ExecutorLike
from robust_ext.engine.identity import describe
from robust_ext.engine.inputs import Batches, as_attacks
from robust_ext.engine.run import Outcome
from robust_ext.engine.store import Floats
from robust_ext.engine.task import drive
from robust_ext.engine.verify import BROKEN, LOST, UNDONE
from robust_ext.evaluations.arms import Arm, ArmRun, check_arms, plan_runs
from robust_ext.evaluations.callbacks import Callback
from robust_ext.evaluations.causes.attaching import find_causes, judged_by_label, of_arm, prober
from robust_ext.evaluations.causes.pasting import Caller
from robust_ext.evaluations.causes.setup import find_setup
from robust_ext.evaluations.caveats import attack_warnings, outside_warnings, rounding_warnings, time_table
from robust_ext.evaluations.options import RobustAccuracyOptions
from robust_ext.evaluations.result import framed
from robust_ext.evaluations.robust_accuracy.samples import nearest_examples, sample_rows
from robust_ext.evaluations.robust_accuracy.settings import RobustAccuracyResult, RobustAccuracySettings
from robust_ext.evaluations.run_keywords import RunKeywords
from robust_ext.evaluations.scored_runs import plan_clean

Outcomes = Sequence[Outcome[ArmRun]]


def curve(
    smallest: Floats,
    epsilons: Sequence[float],
    *,
    slack: Sequence[float],
    finite: Floats | None = None,
    lost: NDArray[np.bool_] | None = None,
    relaxed: Floats | None = None,
) -> list[dict[str, Any]]:
    """Robust accuracy at each budget, the share of samples without a known perturbation of at most that size.

    ``smallest`` ``(N,)`` is 0 for samples that are misclassified as they are, infinity where no perturbation is known,
    and ``finite`` the same where only points with finite logits count. ``slack`` is what each budget may be exceeded
    by, for rounding; ``lost`` ``(E, N)`` which samples were not attacked by one of the runs of each budget. ``relaxed``
    is as ``smallest`` where entries may take any value and not those of a grid alone.

    Example:
        >>> rows = curve(np.array([0.0, 0.2, np.inf, 0.4]), [0.1, 0.3], slack=[0.0, 0.0])
        >>> [row["robust_accuracy"] for row in rows]
        [0.75, 0.5]
    """
    rows, samples = [], len(smallest)
    for number, (epsilon, more) in enumerate(zip(epsilons, slack, strict=True)):
        robust = smallest > epsilon + more
        unbroken = robust if finite is None else finite > epsilon + more
        found = proportion_interval(int(robust.sum()), samples)
        rows.append(
            {
                "epsilon": epsilon,
                "robust_accuracy": float(robust.mean()) if samples else None,
                "interval": None if found is None else list(found),
                "non_finite": int((~robust & unbroken).sum()),
                "without_non_finite": float(unbroken.mean()) if samples else None,
                "not_attacked": 0 if lost is None else int((robust & lost[number]).sum()),
                "robust": "".join("01"[one] for one in robust.astype(int)),
                **({} if relaxed is None else {"without_rounding": float((relaxed > epsilon + more).mean())}),
            }
        )
    return rows


def differences(curves: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, float | None]]:
    """Return the distance of each curve above the lowest at the same budget: mean and maximum over budgets.

    Source: Croce, Rauber, Hein, "Scaling up the Randomized Gradient-Free Adversarial Attack Reveals Overestimation of
    Robustness Using Established Attacks" (2019), section 5.1 and table 1.
    """
    values = np.array([[row["robust_accuracy"] for row in rows] for rows in curves], dtype=np.float64)
    if not values.size:
        return [{"mean": None, "maximum": None} for _ in curves]
    above = values - values.min(0)
    return [{"mean": float(row.mean()), "maximum": float(row.max())} for row in above]


def robust_accuracy(  # noqa: D417
    model: object,
    attacks: object,
    inputs: Array | Batches,
    labels: Array | None,
    threat_model: ThreatModel,
    *,
    criterion: Criterion | None = None,
    keep_candidates: bool = False,
    device: str | torch.device | None = None,
    sample_ids: Sequence[int] | None = None,
    out: str | os.PathLike[str] | None = None,
    isolate: bool = False,
    attack_timeout: float | None = None,
    executor: ExecutorLike = None,
    devices: Sequence[str] | None = None,
    progress: bool = False,
    callbacks: Sequence[Callback] = (),
    settings: RobustAccuracySettings | None = None,
    **options: Unpack[RobustAccuracyOptions],
) -> RobustAccuracyResult:
    """Robust accuracy of a model at one or several budgets, under each attack and under all of them.

    Attacks that look for the smallest perturbation are run once, the others once for each budget. Every candidate is
    verified. What an attack found with a smaller budget counts for larger ones too, and samples that are misclassified
    as they are count as not robust at any budget.

    Args:
        model: A torch module in eval mode from inputs in bounds to logits; a Foolbox model; an ART classifier.
        attacks: Anything :func:`robust_ext.as_attack` takes, a list of such, or a dict of them by name.
        inputs: Clean samples in bounds, floats ``(N, ...)``. Or batches ``(inputs, labels)`` of them, as a DataLoader
            makes, with labels None: they are read once, into a temporary file, and need not fit into memory.
        labels: Their classes, integers ``(N,)``, or one-hot ``(N, K)``; of several labels zeros and ones ``(N, L)``.
        threat_model: The norm, epsilon and bounds.
        criterion: What counts as success of an attack: :class:`robust_ext.TopK`, :class:`robust_ext.Targeted`,
            :class:`robust_ext.MultiLabel`; misclassification when left out.
        keep_candidates: Whether the result has the nearest adversarial example of each sample as ``candidates``.
        device, sample_ids, out, isolate, attack_timeout, executor, devices, progress, callbacks: How it is run, see
            :class:`robust_ext.evaluations.run_keywords.RunKeywords`.
        settings: All settings at once; the defaults when left out.
        **options: Single settings, see :class:`RobustAccuracySettings`.

    Raises:
        RobustExtError: An argument, the model, an attack or the run folder is not as described; see its subclasses.

    Example:
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3)).eval()
        >>> x, threat_model = torch.rand(8, 1, 4, 4), ThreatModel(norm="linf", epsilon=1e-6)
        >>> y = network(x).argmax(1)
        >>> robust_accuracy(network, "robust_ext:APGD(steps=10)", x, y, threat_model).robust_accuracy(1e-6)
        1.0
    """
    run = RunKeywords(device, sample_ids, out, isolate, attack_timeout, executor, devices, progress, callbacks)
    with run.begun() as finish:
        begun, chosen = time.perf_counter(), make_settings(RobustAccuracySettings, options, base=settings)
        given = run.prepare(model, inputs, labels, threat_model, batch_size=chosen.batch_size, criterion=criterion)
        arms = _arms(as_attacks(attacks), threat_model, chosen)
        runs = plan_runs(arms, plan_clean(given, batch_size=chosen.batch_size, seed=chosen.seed))
        outcomes = drive(run.tasks(runs, title="robust accuracy"), run.worker)
        return finish(_result([*outcomes.values()], begun=begun, keep_candidates=keep_candidates))


def _arms(attacks: Mapping[str, Attack], model: ThreatModel, settings: RobustAccuracySettings) -> list[Arm]:
    budgets = sorted({model.epsilon, *(settings.epsilons or ())})
    named = attacks.items()
    return check_arms(
        Arm(attack=one, norm=model.norm, epsilon=epsilon, label=name) for name, one in named for epsilon in budgets
    )


def _result(outcomes: Outcomes, *, begun: float, keep_candidates: bool) -> RobustAccuracyResult:
    content, rows = make_content(outcomes, begun=begun), sample_rows(outcomes, _budgets(outcomes))
    points = nearest_examples(outcomes) if keep_candidates else None
    return RobustAccuracyResult(content, records=rows, candidates=points)


def _budgets(outcomes: Outcomes) -> list[float]:
    return sorted({arm.epsilon for one in outcomes for arm in one.run.arms if arm.epsilon is not None})


def make_content(outcomes: Outcomes, *, begun: float) -> dict[str, Any]:
    """Everything ``result.json`` holds."""
    run, given = outcomes[0].run, outcomes[0].run.given
    epsilons = _budgets(outcomes)
    by_name: dict[str, list[Outcome[ArmRun]]] = {}
    for one in outcomes:
        by_name.setdefault(one.run.arms[0].short, []).append(one)
    attacks = [_attack(name, mine, epsilons) for name, mine in by_name.items()]
    for entry, difference in zip(attacks, differences([one["robust_accuracy"] for one in attacks]), strict=True):
        entry["difference"] = difference
    records = [(name, [record for one in mine for record in one.records]) for name, mine in by_name.items()]
    upper = ", and count as not broken, so that robust accuracy is an upper bound"
    outside = [(one.run.arms[0].short, one.run.attack, one.run.threat_model, one.records) for one in outcomes]
    worst = _curve_of(outcomes, epsilons)[1]
    return framed(
        "robust_accuracy",
        given,
        outcomes,
        clean_accuracy=float(given.correct.mean()),
        norm=run.threat_model.norm,
        findings=_findings(outcomes),
        attacks=attacks,
        worst_case=worst,
        warnings=attack_warnings(records, consequence=upper) + outside_warnings(outside) + rounding_warnings(worst),
        settings={"epsilons": list(epsilons), "batch_size": run.batch_size, "seed": run.seed},
        seed=run.seed,
        time=time_table(outcomes, begun=begun),
    )


def _findings(outcomes: Outcomes) -> list[dict[str, Any]]:
    run = outcomes[0].run
    given = run.given
    probe = prober(given.module, given.inputs, given.labels, threat_model=given.threat_model, seed=run.seed)
    attacked = [of_arm(left, name=left.run.arms[0].short) for left in outcomes]
    caller = Caller(
        module=given.module, attacks={one.name: one.attack for one in attacked}, images=given.inputs.dim() == 4
    )
    # What a wrong setup does to an attack is no fault of the attack.
    found = find_setup(given, seed=run.seed) or find_causes(attacked, probe)
    return [finding.to_dict() for finding in caller.addressed(found) if judged_by_label(given, finding)]


def _attack(name: str, mine: Outcomes, epsilons: Sequence[float]) -> dict[str, Any]:
    attack, spent = mine[0].run.attack, Spent.total(left.spent("attack") for left in mine)
    smallest, rows = _curve_of(mine, epsilons)
    distances = [float(value) if np.isfinite(value) else None for value in smallest]
    return {
        "name": name,
        "description": describe(attack),
        "kind": attack.traits.kind,
        "robust_accuracy": rows,
        "distances": distances if attack.traits.minimum_norm else None,
        "outcomes": dict(sorted(Counter(record["outcome"] for left in mine for record in left.records).items())),
        "seconds": spent.seconds,
        "passes": spent.passes,
    }


def _curve_of(outcomes: Outcomes, epsilons: Sequence[float]) -> tuple[Floats, list[dict[str, Any]]]:
    """The smallest perturbation of each sample that any of the runs found, ``(N,)``, and the curve that follows."""
    run, given = outcomes[0].run, outcomes[0].run.given
    # What a candidate may lie beyond each budget, as its verification allowed.
    slack = [replace(run.threat_model, epsilon=one).tolerance(given.inputs[0].numel()) for one in epsilons]
    lost = np.zeros((len(epsilons), len(given.ids)), dtype=np.bool_)
    smallest, finite, relaxed = (np.where(given.correct, np.inf, 0.0) for _ in range(3))
    for one in outcomes:
        budgets = [epsilons.index(arm.epsilon) for arm in one.run.arms if arm.epsilon is not None]
        lost[budgets] |= [record["outcome"] in LOST for record in one.records]
        for known, counted in ((smallest, BROKEN), (finite, ("found",)), (relaxed, (*BROKEN, UNDONE))):
            found = [record["distance"] if record["outcome"] in counted else np.inf for record in one.records]
            np.minimum(known, np.array(found, dtype=np.float64), out=known)
    more = relaxed if run.threat_model.discrete else None
    return smallest, curve(smallest, epsilons, slack=slack, finite=finite, lost=lost, relaxed=more)
