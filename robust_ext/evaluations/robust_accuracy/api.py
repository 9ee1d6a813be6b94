"""Robust accuracy as one function, and the content of its result."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import Unpack

from robust_ext.attacks.base import Attack
from robust_ext.core.cost import Spent
from robust_ext.core.settings import make_settings
from robust_ext.core.statistics import proportion_interval
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import Array
from robust_ext.engine.executors import ExecutorLike
from robust_ext.engine.identity import describe
from robust_ext.engine.inputs import EvaluationInputs, as_attacks, prepare_inputs
from robust_ext.engine.run import Outcome
from robust_ext.engine.running import attack_worker, run_all
from robust_ext.engine.store import Floats
from robust_ext.engine.task import Worker, drive
from robust_ext.engine.verify import BROKEN, LOST
from robust_ext.evaluations.arm_runs import ArmRun, plan_clean, plan_runs
from robust_ext.evaluations.arms import Arm, check_arms
from robust_ext.evaluations.callbacks import Callback, listening
from robust_ext.evaluations.causes.attaching import find_causes, of_arm, prober
from robust_ext.evaluations.causes.pasting import Caller
from robust_ext.evaluations.causes.setup import find_setup
from robust_ext.evaluations.caveats import attack_warnings, outside_warnings, time_table
from robust_ext.evaluations.result import framed
from robust_ext.evaluations.robust_accuracy.options import RobustAccuracyOptions
from robust_ext.evaluations.robust_accuracy.settings import RobustAccuracyResult, RobustAccuracySettings


def make_content(
    outcomes: Sequence[Outcome[ArmRun]], names: Sequence[str], epsilons: Sequence[float], *, begun: float
) -> dict[str, Any]:
    """Everything ``result.json`` holds."""
    run, given = outcomes[0].run, outcomes[0].run.given
    values = given.inputs[0].numel()
    # What a candidate may lie beyond each budget, as its verification allowed.
    slack = [replace(run.threat_model, epsilon=epsilon).tolerance(values) for epsilon in epsilons]
    whole = _Known.of(outcomes, given.correct, epsilons)
    attacks, records = [], []
    for name in names:
        mine = [left for left in outcomes if left.run.arms[0].short == name]
        known = _Known.of(mine, given.correct, epsilons)
        attacks.append(_attack(name, mine, known.smallest, known.curve(epsilons, slack=slack)))
        records.append((name, [record for left in mine for record in left.records]))
    upper = ", and count as not broken, so that robust accuracy is an upper bound"
    for entry, difference in zip(attacks, differences([one["robust_accuracy"] for one in attacks]), strict=True):
        entry["difference"] = difference
    outside = [(one.run.arms[0].short, one.run.attack, one.run.threat_model, one.records) for one in outcomes]
    return framed(
        "robust_accuracy",
        given,
        outcomes,
        norm=run.threat_model.norm,
        findings=_findings(outcomes),
        attacks=attacks,
        worst_case=whole.curve(epsilons, slack=slack),
        warnings=attack_warnings(records, consequence=upper) + outside_warnings(outside),
        settings={"epsilons": list(epsilons), "batch_size": run.batch_size, "seed": run.seed},
        seed=run.seed,
        time=time_table(outcomes, begun=begun),
    )


def _findings(outcomes: Sequence[Outcome[ArmRun]]) -> list[dict[str, Any]]:
    run = outcomes[0].run
    given = run.given
    probe = prober(given.module, given.inputs, given.labels, threat_model=given.threat_model, seed=run.seed)
    attacked = [of_arm(left, name=left.run.arms[0].short) for left in outcomes]
    caller = Caller(
        module=given.module, attacks={one.name: one.attack for one in attacked}, images=given.inputs.dim() == 4
    )
    # What a wrong setup does to an attack is no fault of the attack.
    found = find_setup(given, seed=run.seed) or find_causes(attacked, probe)
    return [finding.to_dict() for finding in caller.addressed(found)]


def _attack(name: str, mine: Sequence[Outcome[ArmRun]], smallest: Floats, rows: list[dict[str, Any]]) -> dict[str, Any]:
    attack = mine[0].run.attack
    spent = Spent.total(left.spent("attack") for left in mine)
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


@dataclass(frozen=True, kw_only=True)
class _Known:
    """The smallest perturbation of each sample that some runs found, ``(N,)``, as :func:`curve` takes it."""

    smallest: Floats
    finite: Floats  # The same where only points with finite logits count
    lost: NDArray[np.bool_]  # Which samples were not attacked by one of the runs of each budget, (E, N)

    @classmethod
    def of(cls, outcomes: Sequence[Outcome[ArmRun]], correct: NDArray[np.bool_], epsilons: Sequence[float]) -> _Known:
        """Return the smallest perturbations of these runs."""
        lost = np.zeros((len(epsilons), len(correct)), dtype=np.bool_)
        for left in outcomes:
            budgets = [epsilons.index(arm.epsilon) for arm in left.run.arms if arm.epsilon in epsilons]
            lost[budgets] |= [record["outcome"] in LOST for record in left.records]
        smallest, finite = (_smallest(outcomes, correct, counted) for counted in (BROKEN, ("found",)))
        return cls(smallest=smallest, finite=finite, lost=lost)

    def curve(self, epsilons: Sequence[float], *, slack: Sequence[float]) -> list[dict[str, Any]]:
        """Robust accuracy at each budget, and what it rests on."""
        rows = curve(self.smallest, epsilons, slack=slack)
        without = curve(self.finite, epsilons, slack=slack)
        for row, other, more, lost in zip(rows, without, slack, self.lost, strict=True):
            robust = self.smallest > row["epsilon"] + more
            row["non_finite"] = int((~robust & (self.finite > row["epsilon"] + more)).sum())
            row["without_non_finite"] = other["robust_accuracy"]
            row["not_attacked"] = int((robust & lost).sum())
            row["robust"] = "".join("01"[one] for one in robust.astype(int))
        return rows


def _smallest(mine: Sequence[Outcome[ArmRun]], correct: NDArray[np.bool_], counted: Sequence[str]) -> Floats:
    """The smallest perturbation of each sample that any of the runs found, of candidates with these outcomes."""
    smallest: Floats = np.where(correct, np.inf, 0.0)
    for left in mine:
        found = [record["distance"] if record["outcome"] in counted else np.inf for record in left.records]
        smallest = np.minimum(smallest, np.array(found, dtype=np.float64))
    return smallest


def curve(smallest: Floats, epsilons: Sequence[float], *, slack: Sequence[float]) -> list[dict[str, Any]]:
    """Robust accuracy at each budget: the share of samples without a known perturbation of at most that size.

    ``smallest`` ``(N,)`` is 0 for samples that are misclassified as they are, infinity where no perturbation is known;
    ``slack`` is what each budget may be exceeded by, for rounding.

    Example:
        >>> rows = curve(np.array([0.0, 0.2, np.inf, 0.4]), [0.1, 0.3], slack=[0.0, 0.0])
        >>> [row["robust_accuracy"] for row in rows]
        [0.75, 0.5]
    """
    rows = []
    for epsilon, more in zip(epsilons, slack, strict=True):
        robust = int((smallest > epsilon + more).sum())
        found = proportion_interval(robust, len(smallest))
        rows.append(
            {
                "epsilon": epsilon,
                "robust_accuracy": robust / len(smallest) if len(smallest) else None,
                "interval": None if found is None else list(found),
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


def robust_accuracy(
    model: object,
    attacks: object,
    inputs: Array,
    labels: Array,
    threat_model: ThreatModel,
    *,
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
        model: A torch module from inputs in bounds to logits, in eval mode; a Foolbox model; an ART
            ``PyTorchClassifier``.
        attacks: Anything :func:`robust_ext.as_attack` takes, a list of such, or a dict of them by name.
        inputs: Clean samples, a tensor or numpy array of floats ``(N, ...)`` in bounds.
        labels: Their classes, integers ``(N,)``, or one-hot ``(N, K)``.
        threat_model: The norm, epsilon and bounds.
        device: Where to run it, on a copy of a model that lies elsewhere; the model's own device when left out.
        sample_ids: Ids of the samples, which with the seed decide every draw; ``0 .. N-1`` when left out.
        out: Run folder, in which the same call resumes a killed run; gets result and report.
        isolate: Run each attack in a process of its own, which has what an attacker has, see docs/threats.md.
        attack_timeout: Seconds an attack may then take for a batch; None for any time.
        executor: What runs the blocks, see docs/clusters.md; this process when left out.
        devices: The devices that its workers use; the model's own when left out.
        progress: Show a progress bar on stderr.
        callbacks: Told of the result, and of records as they come, see :class:`robust_ext.Callback`.
        settings: All settings at once; the defaults when left out.
        **options: Single settings, see :class:`RobustAccuracySettings`.

    Raises:
        RobustExtError: An argument, the model, an attack or the run folder is not as described; see its subclasses.

    Example:
        >>> import torch
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3)).eval()
        >>> x, threat_model = torch.rand(8, 1, 4, 4), ThreatModel(norm="linf", epsilon=1e-6)
        >>> y = network(x).argmax(1)
        >>> robust_accuracy(network, "robust_ext:APGD(steps=10)", x, y, threat_model).robust_accuracy(1e-6)
        1.0
    """
    with listening(callbacks) as tell:
        checked = make_settings(RobustAccuracySettings, options, base=settings)
        given = prepare_inputs(
            model,
            inputs,
            labels,
            threat_model=threat_model,
            sample_ids=sample_ids,
            batch_size=checked.batch_size,
            device=device,
        )
        workers = attack_worker(isolate=isolate, attack_timeout=attack_timeout, executor=executor, devices=devices)
        with workers as worker:
            return tell(_evaluate(as_attacks(attacks), given, checked, out=out, progress=progress, worker=worker))


def _evaluate(
    attacks: Mapping[str, Attack],
    given: EvaluationInputs,
    settings: RobustAccuracySettings,
    *,
    out: str | os.PathLike[str] | None,
    progress: bool,
    worker: Worker,
) -> RobustAccuracyResult:
    begun, norm = time.perf_counter(), given.threat_model.norm
    budgets = sorted({given.threat_model.epsilon, *(settings.epsilons or ())})
    arms = check_arms(
        Arm(attack=one, norm=norm, epsilon=epsilon, label=name) for name, one in attacks.items() for epsilon in budgets
    )
    runs = plan_runs(arms, plan_clean(given, batch_size=settings.batch_size, seed=settings.seed))
    outcomes = drive(run_all(runs, out=out, progress=progress, title="robust accuracy"), worker)
    content = make_content(list(outcomes.values()), list(attacks), budgets, begun=begun)
    return RobustAccuracyResult(content).saved(out)
