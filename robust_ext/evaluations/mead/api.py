"""MEAD as one function."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from typing_extensions import Unpack

from robust_ext.core.settings import make_settings
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import Array, check_inputs
from robust_ext.engine.evaluation_file import with_judge_seed
from robust_ext.engine.executors import ExecutorLike
from robust_ext.engine.inputs import EvaluationInputs, prepare_inputs
from robust_ext.engine.run import Outcome, check_some_ran
from robust_ext.engine.running import attack_worker, run_all
from robust_ext.engine.task import Worker, drive
from robust_ext.evaluations.arm_runs import ArmRun, plan_clean, plan_runs
from robust_ext.evaluations.arms import Arm
from robust_ext.evaluations.callbacks import Callback, listening
from robust_ext.evaluations.detectors import as_detectors
from robust_ext.evaluations.mead.content import make_content, pick_examples
from robust_ext.evaluations.mead.options import MeadOptions
from robust_ext.evaluations.mead.settings import MeadResult, MeadSettings
from robust_ext.evaluations.mead.suites import as_arms


def mead(
    model: object,
    attacks: object,
    inputs: Array,
    labels: Array,
    threat_model: ThreatModel,
    *,
    detectors: object,
    detector_data: Array | None = None,
    device: str | torch.device | None = None,
    sample_ids: Sequence[int] | None = None,
    allow_code: bool = False,
    out: str | os.PathLike[str] | None = None,
    isolate: bool = False,
    attack_timeout: float | None = None,
    executor: ExecutorLike = None,
    devices: Sequence[str] | None = None,
    progress: bool = False,
    callbacks: Sequence[Callback] = (),
    settings: MeadSettings | None = None,
    **options: Unpack[MeadOptions],
) -> MeadResult:
    """Evaluate detectors against many attacks at once (Granese et al. 2022).

    Every detector scores the verified candidates of every attack; it catches a sample only if it flags all of them.

    Args:
        model: A torch module from inputs in bounds to logits, in eval mode; a Foolbox model; an ART
            ``PyTorchClassifier``.
        attacks: Name of a suite (``"quick"``) or TOML file, see :mod:`robust_ext.evaluations.mead.suites`; an
            :class:`Arm`; anything :func:`robust_ext.as_attack` takes, with the threat model's budget; or a list.
        inputs: Clean samples, a tensor or numpy array of floats ``(N, ...)`` in bounds.
        labels: Their classes, integers ``(N,)``, or one-hot ``(N, K)``.
        threat_model: Bounds of inputs; norm and epsilon of attacks that bring none.
        detectors: One detector, a list or a dict of them by name; each anything :func:`robust_ext.as_detector` takes.
        detector_data: Further clean inputs ``(M, ...)``, to calibrate and to combine detectors.
        device: Where to run it, on a copy of a model that lies elsewhere; the model's own device when left out.
        sample_ids: Ids of the samples, which with the seed decide every draw; ``0 .. N-1`` when left out.
        allow_code: Whether suites in files may name code (``file.py:callable``) besides attacks of libraries.
        out: Run folder, in which the same call resumes a killed run; gets result and report.
        isolate: Run each attack in a process of its own, which has what an attacker has, see docs/threats.md.
        attack_timeout: Seconds an attack may then take for a batch; None for any time.
        executor: What runs the blocks, see docs/clusters.md; this process when left out.
        devices: The devices that its workers use; the model's own when left out.
        progress: Show a progress bar on stderr.
        callbacks: Told of the result, and of records as they come, see :class:`robust_ext.Callback`.
        settings: All settings at once; the defaults when left out.
        **options: Single settings, see :class:`MeadSettings`.

    Raises:
        RobustExtError: An argument, the model, an attack or the run folder is not as described; see its subclasses.

    Example:
        >>> import torch
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3)).eval()
        >>> x, threat_model = torch.rand(8, 1, 4, 4), ThreatModel(norm="linf", epsilon=0.5)
        >>> y, spread = network(x).argmax(1), lambda x: x.flatten(1).std(1)
        >>> mead(network, "robust_ext:APGD()", x, y, threat_model, detectors=spread, resamples=0).content["samples"]
        8
    """
    with listening(callbacks) as tell:
        checked = make_settings(MeadSettings, options, base=settings)
        given = prepare_inputs(
            model,
            inputs,
            labels,
            threat_model=threat_model,
            sample_ids=sample_ids,
            batch_size=checked.batch_size,
            device=device,
        )
        data = None if detector_data is None else check_inputs("detector_data", detector_data, bounds=given.bounds)
        workers = attack_worker(isolate=isolate, attack_timeout=attack_timeout, executor=executor, devices=devices)
        with workers as worker:
            checked = with_judge_seed(checked, out=out, worker=worker)
            arms = as_arms(attacks, given.threat_model, allow_code=allow_code)
            return tell(_evaluate(arms, given, detectors, data, checked, out=out, progress=progress, worker=worker))


def _evaluate(
    attacks: tuple[list[Arm], list[str]],
    given: EvaluationInputs,
    detectors: object,
    detector_data: Tensor | None,
    settings: MeadSettings,
    *,
    out: str | os.PathLike[str] | None,
    progress: bool,
    worker: Worker,
) -> MeadResult:
    begun = time.perf_counter()
    arms, suites = attacks
    beside = as_detectors(
        detectors,
        given.module,
        given.inputs,
        data=detector_data,
        false_positive_rate=settings.detector_fpr,
        bounds=given.bounds,
        seed=settings.seed,
        digests=out is not None,
    )
    clean = plan_clean(
        given,
        batch_size=settings.batch_size,
        seed=settings.seed,
        judge_seed=settings.judge_seed,
        detectors=beside,
    )
    runs = plan_runs(arms, clean)
    report = {key: value for key, value in settings.to_dict().items() if key not in clean.identity}
    outcomes = drive(run_all([*runs, clean], out=out, progress=progress, title="mead", settings=report), worker)
    natural, left = outcomes[clean.key], [cast("Outcome[ArmRun]", outcomes[run.key]) for run in runs]
    check_some_ran(left)
    suite = ", ".join(suites) or "arms"
    content = make_content(natural, left, arms, settings, suite=suite, detector_data=detector_data, begun=begun)
    return MeadResult(content, examples=pick_examples(left, given, beside)).saved(out)
