"""MEAD as one function."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from tqdm.auto import tqdm

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.core.settings import make_settings
from robust_ext.core.validation import check_inputs
from robust_ext.detectors.base import Detector
from robust_ext.engine.arm import Arm, check_arms, plan_runs
from robust_ext.engine.running import run_everything
from robust_ext.engine.samples import check_samples
from robust_ext.engine.subject import Subject, watch
from robust_ext.evaluations.mead.content import make_content, pick_examples
from robust_ext.evaluations.mead.result import MeadResult
from robust_ext.evaluations.mead.settings import MeadSettings
from robust_ext.evaluations.mead.suites import load_suite
from robust_ext.registry.detector import as_detector

logger = logging.getLogger(__name__)


def mead(
    model: object,
    detectors: object,
    inputs: Tensor,
    labels: Tensor,
    *,
    suite: str | Sequence[str] = "quick",
    arms: Sequence[Arm] = (),
    bounds: tuple[float, float] = (0.0, 1.0),
    sample_ids: Sequence[int] | None = None,
    detector_data: Tensor | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: bool = False,
    origin: Mapping[str, str] | None = None,
    shard: tuple[int, int] = (0, 1),
    **settings: Any,
) -> MeadResult:
    """Evaluate detectors against many attacks at once (Granese et al. 2022).

    Every attack of the suite is run on the classifier once, its candidates are verified and kept, and every detector
    scores them. A detector catches a sample at a threshold only if it flags every successful attack on it.

    Args:
        model: A torch module from inputs in ``bounds`` to logits, in eval mode; a Foolbox model; an ART
            ``PyTorchClassifier``.
        detectors: One detector, a list or a dict of them by name; each anything
            :func:`robust_ext.as_detector` takes. They need a threshold only for attacks that know them.
        inputs: Clean samples, float ``(N, ...)`` in bounds.
        labels: Their classes, int64 ``(N,)``.
        suite: Name of a suite, path of a TOML file, or several of them, see :mod:`robust_ext.evaluations.mead.suites`.
            Attacks that know the detector (suite ``"white-box"``) are reported beside the others.
        arms: Further arms; with ``suite=()`` only these.
        bounds: Lowest and highest valid input value.
        sample_ids: Ids of the samples, which with the seed decide every draw; ``0 .. N-1`` when left out.
        detector_data: Clean inputs ``(M, ...)`` beside the samples, to calibrate detectors without a threshold, and to
            put the scores of detectors that are combined on one scale.
        out: Run folder. With one, arms survive a kill and the same call goes on; further arms and detectors add to what
            is there. ``result.json`` and ``report.html`` are written there.
        progress: Show a progress bar on stderr.
        origin: Where things came from, in words by name, kept with the settings.
        shard: Number of this process, and of how many that share the run folder; a call without it completes them.
        **settings: See :class:`MeadSettings`.

    Returns:
        The result; ``print`` shows its tables.

    Raises:
        InvalidArgumentError: An argument is outside what is accepted.
        ModelError: The model is no classifier to logits, or a detector is of no use.
        AttackRefusedError: An arm makes no sense on this target.
        AttackError: An attack raised, or returned no batch of candidates.
        RunFolderError: The folder holds runs of other samples, settings or networks.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from robust_ext.evaluations.mead import Arm, mead
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval()
        >>> x = torch.rand(8, 1, 4, 4)
        >>> result = mead(
        ...     network,
        ...     {"spread": lambda x: x.flatten(1).std(1)},
        ...     x,
        ...     network(x).argmax(1),
        ...     suite=(),
        ...     arms=[Arm(attack="robust_ext:ObjectivePGD(steps=5)", norm="linf", epsilon=0.5)],
        ...     resamples=0,
        ... )
        >>> result.content["kind"], result.arms["robust_ext:ObjectivePGD(steps=5) linf 0.5"]["samples"]
        ('mead', 8)
    """
    begun = time.perf_counter()
    checked = make_settings(MeadSettings, settings)
    given = check_samples(model, inputs, labels, bounds=bounds, sample_ids=sample_ids, batch_size=checked.batch_size)
    chosen = check_arms([*_suites(suite, bounds), *arms])
    watched = prepare_detectors(
        detectors, given.module, given.inputs, data=detector_data, bounds=bounds, settings=checked
    )
    subject = Subject(
        module=given.module,
        logits=given.logits,
        inputs=given.inputs,
        labels=given.labels,
        samples=given.ids,
        bounds=bounds,
        watched=[watch(name, detector) for name, detector in watched.items()],
        batch_size=checked.batch_size,
        seed=checked.seed,
    )
    runs = plan_runs(chosen, bounds=bounds, values=given.inputs[0].numel(), detectors=list(watched))
    for run in runs:
        # Those that know a detector may be refused by one and not by another, which the result tells.
        if run.knows is None:
            run.attack.check(threat_model=run.threat_model)
    folder = None if out is None else Path(out)
    with tqdm(total=len(runs) * len(given.ids), unit="candidate", disable=not progress, desc="mead") as bar:

        def advance(title: str, count: int) -> None:
            bar.set_postfix_str(title, refresh=False)
            bar.update(count)

        finished = run_everything(runs, subject, folder=folder, wait=shard[1] == 1, advance=advance)
    if shard[1] > 1:
        return MeadResult({"kind": "mead", "detectors": [], "averages": [], "arms": []})
    content = make_content(
        finished,
        chosen,
        subject,
        checked,
        calibration=detector_data,
        described={
            "suite": ", ".join([suite] if isinstance(suite, str) else suite) or "arms",
            "origin": dict(origin or {}),
            "begun": begun,
        },
    )
    result = MeadResult(content, pick_examples(content, finished, subject))
    if folder is not None:
        result.save(folder)
    return result


def prepare_detectors(
    detectors: object,
    module: nn.Module,
    inputs: Tensor,
    *,
    data: Tensor | None,
    bounds: tuple[float, float],
    settings: MeadSettings,
) -> dict[str, Detector]:
    """Detectors by name, with a threshold where there are clean inputs to calibrate them on.

    Args:
        detectors: One, a list, or a dict by name.
        module: The classifier they watch.
        inputs: Some inputs, to see whether they do.
        data: Clean inputs to calibrate on, or None.
        bounds: Of inputs.
        settings: Of the run.

    Raises:
        InvalidArgumentError: There is none, or two have one name.
    """
    named: list[tuple[str | None, object]]
    if isinstance(detectors, Mapping):
        named = [(str(name), one) for name, one in detectors.items()]
    else:
        named = [(None, one) for one in (detectors if isinstance(detectors, (list, tuple)) else [detectors])]
    if not named:
        raise InvalidArgumentError("detectors", detectors, "at least one detector")
    found: dict[str, Detector] = {}
    for name, one in named:
        detector = as_detector(one, module, inputs=inputs[:4])
        name = name or str(getattr(detector, "name", type(detector).__name__))
        if name in found:
            raise InvalidArgumentError("detectors", f"several called {name}", "a dict of detectors by different names")
        if data is not None and bool(detector.threshold.isnan().any()):
            clean = check_inputs("detector_data", data, bounds=bounds)
            with seeded_globals(derive_seed(settings.seed, "detector calibration")):
                detector.calibrate(clean, false_positive_rate=settings.detector_fpr)
        found[name] = detector
    return found


def _suites(suite: str | Sequence[str], bounds: tuple[float, float]) -> list[Arm]:
    names = [suite] if isinstance(suite, str) else list(suite)
    return [arm for name in names for arm in load_suite(name, bounds=bounds)]
