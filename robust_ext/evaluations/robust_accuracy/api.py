"""Robust accuracy as one function."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

import torch
from typing_extensions import Unpack

from robust_ext.attacks.base import Attack
from robust_ext.core.settings import make_settings
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import Array
from robust_ext.engine.executors import ExecutorLike
from robust_ext.engine.inputs import EvaluationInputs, as_attacks, prepare_inputs
from robust_ext.engine.running import run_all
from robust_ext.engine.task import Worker, drive
from robust_ext.engine.workers import attack_worker
from robust_ext.evaluations.arm_runs import plan_clean, plan_runs
from robust_ext.evaluations.arms import Arm, check_arms
from robust_ext.evaluations.callbacks import Callback, listening
from robust_ext.evaluations.robust_accuracy.content import make_content
from robust_ext.evaluations.robust_accuracy.options import RobustAccuracyOptions
from robust_ext.evaluations.robust_accuracy.result import RobustAccuracyResult
from robust_ext.evaluations.robust_accuracy.settings import RobustAccuracySettings


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
        out: Run folder, in which a run survives a kill and is gone on with by the same call; gets result and report.
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
