"""MEAD as one function."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import cast

import torch
from typing_extensions import Unpack

from robust_ext.core.criteria import Criterion
from robust_ext.core.settings import make_settings
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import Array, check_inputs
from robust_ext.engine.executors import ExecutorLike
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.engine.run import Outcome, check_some_ran
from robust_ext.engine.task import drive
from robust_ext.evaluations.arms import ArmRun, plan_runs
from robust_ext.evaluations.callbacks import Callback
from robust_ext.evaluations.detectors import as_detectors
from robust_ext.evaluations.mead.content import make_content, pick_examples
from robust_ext.evaluations.mead.settings import MeadResult, MeadSettings
from robust_ext.evaluations.mead.suites import as_arms
from robust_ext.evaluations.options import MeadOptions
from robust_ext.evaluations.run_keywords import RunKeywords
from robust_ext.evaluations.scored_runs import plan_clean


def mead(  # noqa: D417
    model: object,
    attacks: object,
    inputs: Array,
    labels: Array,
    threat_model: ThreatModel,
    *,
    detectors: object,
    detector_data: Array | None = None,
    criterion: Criterion | None = None,
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
        model, inputs, labels, criterion: As of :func:`robust_ext.robust_accuracy`.
        device, sample_ids, out, isolate, attack_timeout, executor, devices, progress, callbacks: As of
            :func:`robust_ext.robust_accuracy`.
        attacks: Name of a suite (``"quick"``) or TOML file, see :mod:`robust_ext.evaluations.mead.suites`; an
            :class:`Arm`; anything :func:`robust_ext.as_attack` takes, with the threat model's budget; or a list.
        threat_model: Bounds of inputs; norm and epsilon of attacks that bring none.
        detectors: One detector, a list or a dict of them by name; each anything :func:`robust_ext.as_detector` takes.
        detector_data: Further clean inputs ``(M, ...)``, to calibrate and to combine detectors.
        allow_code: Whether suites in files may name code (``file.py:callable``) besides attacks of libraries.
        settings: All settings at once; the defaults when left out.
        **options: Single settings, see :class:`MeadSettings`.

    Raises:
        RobustExtError: An argument, the model, an attack or the run folder is not as described; see its subclasses.

    Example:
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3)).eval()
        >>> x, threat_model = torch.rand(8, 1, 4, 4), ThreatModel(norm="linf", epsilon=0.5)
        >>> y, spread = network(x).argmax(1), lambda x: x.flatten(1).std(1)
        >>> mead(network, "robust_ext:APGD()", x, y, threat_model, detectors=spread, resamples=0).content["samples"]
        8
    """
    run = RunKeywords(device, sample_ids, out, isolate, attack_timeout, executor, devices, progress, callbacks)
    with run.begun() as finish:
        chosen = make_settings(MeadSettings, options, base=settings)
        given = run.prepare(model, inputs, labels, threat_model, batch_size=chosen.batch_size, criterion=criterion)
        chosen = run.judged(chosen)
        return finish(_evaluate(attacks, given, detectors, detector_data, chosen, run, allow_code=allow_code))


def _evaluate(
    attacks: object,
    given: EvaluationInputs,
    detectors: object,
    detector_data: Array | None,
    settings: MeadSettings,
    run: RunKeywords,
    *,
    allow_code: bool,
) -> MeadResult:
    begun, bounds, seed = time.perf_counter(), given.bounds, settings.seed
    arms, suites = as_arms(attacks, given.threat_model, allow_code=allow_code)
    data = None if detector_data is None else check_inputs("detector_data", detector_data, bounds=bounds)
    beside = as_detectors(
        detectors,
        given.module,
        given.inputs,
        data=data,
        false_positive_rate=settings.detector_fpr,
        bounds=bounds,
        seed=seed,
        digests=run.out is not None,
    )
    judge, size = settings.judge_seed, settings.batch_size
    clean = plan_clean(given, batch_size=size, seed=seed, judge_seed=judge, detectors=beside)
    runs = plan_runs(arms, clean)
    report = {key: value for key, value in settings.to_dict().items() if key not in clean.identity}
    outcomes = drive(run.tasks([*runs, clean], title="mead", settings=report), run.worker)
    natural, left = outcomes[clean.key], [cast("Outcome[ArmRun]", outcomes[one.key]) for one in runs]
    check_some_ran(left)
    suite = ", ".join(suites) or "arms"
    content = make_content(natural, left, arms, settings, suite=suite, detector_data=data, begun=begun)
    return MeadResult(content, examples=pick_examples(left, beside))
