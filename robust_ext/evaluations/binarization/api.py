"""The binarization test as one function."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from robust_ext.attacks.running import refuse_gradients
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import make_settings
from robust_ext.core.target import Counted, PassCounter
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import Array, check_labels
from robust_ext.engine.context import current_context
from robust_ext.engine.executors import ExecutorLike
from robust_ext.engine.identity import check_ids, describe, inputs_digest
from robust_ext.engine.inputs import PROBES, Batches, as_attacks, blocks_of, read_samples
from robust_ext.engine.run import Outcome
from robust_ext.engine.task import drive
from robust_ext.evaluations.binarization.attacking import load_examples
from robust_ext.evaluations.binarization.content import make_content
from robust_ext.evaluations.binarization.defense import TESTS, Defense, counted_parts, prepare_detector
from robust_ext.evaluations.binarization.head import Head, probe_head
from robust_ext.evaluations.binarization.protocol import BinarizationRun
from robust_ext.evaluations.binarization.result import BinarizationResult
from robust_ext.evaluations.binarization.rules import Rules
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.binarization.verdict import combine_tests
from robust_ext.evaluations.callbacks import Callback
from robust_ext.evaluations.caveats import time_table
from robust_ext.evaluations.options import BinarizationOptions
from robust_ext.evaluations.run_keywords import RunKeywords
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.adaptive_features import together
from robust_ext.models.features import Observed
from robust_ext.models.readouts.linear import Linear


def binarization_test(  # noqa: D417
    model: object,
    attacks: object,
    inputs: Array | Batches,
    threat_model: ThreatModel,
    *,
    labels: Array | None = None,
    detector: object = None,
    detector_data: Array | None = None,
    device: str | torch.device | None = None,
    sample_ids: Sequence[int] | None = None,
    out: str | os.PathLike[str] | None = None,
    isolate: bool = False,
    attack_timeout: float | None = None,
    executor: ExecutorLike = None,
    devices: Sequence[str] | None = None,
    progress: bool = False,
    callbacks: Sequence[Callback] = (),
    settings: BinarizationSettings | None = None,
    **options: Unpack[BinarizationOptions],
) -> BinarizationResult:
    """Test whether an attack finds adversarial examples that are known to exist (Zimmermann et al. 2022, section 3.1).

    For each input, a random point of the ball is made adversarial by a two-class readout of the model, and the attack
    is run. One that misses the planted points cannot support a claim of robustness of this model.

    Args:
        model: A torch module from inputs in bounds to logits, in eval mode; a pair ``(features, readout)`` of modules
            or callables; a Foolbox model; an ART ``PyTorchClassifier``.
        attacks: Anything :func:`robust_ext.as_attack` takes, a list of such, or a dict of them by name.
        inputs: Clean samples in bounds, floats ``(N, ...)``; or batches, see :func:`robust_ext.robust_accuracy`.
        threat_model: The norm, epsilon and bounds that the robustness claim is about.
        labels: Classes of the samples, integers ``(N,)`` or one-hot ``(N, K)``, which check the model's outputs.
        detector: A detector that rejects inputs, see :func:`robust_ext.as_detector`. What is planted goes undetected in
            one test and is detected in another (section 3.2); each attack has ``tests`` and has to pass both.
        detector_data: Clean inputs ``(M, ...)`` to calibrate a detector that has no threshold.
        device, sample_ids, out, isolate, attack_timeout, executor, devices, progress, callbacks: How it is run, see
            :class:`robust_ext.evaluations.run_keywords.RunKeywords`.
        settings: All settings at once; the defaults when left out.
        **options: Single settings, see :class:`BinarizationSettings`.

    Raises:
        RobustExtError: An argument, the model, an attack or the run folder is not as described; see its subclasses.

    Example:
        >>> import torch
        >>> from robust_ext.demo.network import digits_network
        >>> x, threat_model = torch.rand(12, 1, 8, 8), ThreatModel(norm="linf", epsilon=0.1)
        >>> binarization_test(digits_network(), lambda model, x, y: x, x, threat_model).verdict
        'failed'
    """
    begun = time.perf_counter()
    run = RunKeywords(device, sample_ids, out, isolate, attack_timeout, executor, devices, progress, callbacks)
    with run.begun() as finish:
        checked = make_settings(BinarizationSettings, options, base=settings, threat_model=threat_model)
        given = read_samples(inputs, labels, threat_model)
        classes = None if given.labels is None else check_labels("labels", given.labels, samples=len(given.inputs))
        tests = _prepare(run, model, attacks, given.inputs, run.judged(checked), detector, detector_data, classes)
        outcomes = drive(run.tasks(tests, title="binarization", unit="sample"), run.worker)
        return finish(_result(outcomes, out, begun=begun))


def _result(
    outcomes: Mapping[str, Outcome[BinarizationRun]], out: str | os.PathLike[str] | None, *, begun: float
) -> BinarizationResult:
    """The result of one test, or of the regular and the inverted one together, each of which is saved by itself."""
    single = list(outcomes) == [""]
    results = {
        key: BinarizationResult(
            make_content(left, begun=begun if single else None),
            records=left.records,
            examples=load_examples(left.store),
        )
        for key, left in outcomes.items()
    }
    if single:
        return results[""]
    for test, result in results.items():
        result.saved(None if out is None else Path(out) / test)
    shared = {key: value for key, value in outcomes[TESTS[0]].run.identity.items() if key != "test"}
    examples = [replace(one, attack=f"{one.attack} ({test})") for test in TESTS for one in results[test].examples]
    taken = time_table(outcomes.values(), begun=begun)
    contents = {test: result.content for test, result in results.items()}
    return BinarizationResult(combine_tests(contents, shared, time=taken), examples=examples)


def _prepare(
    run: RunKeywords,
    model: object,
    attacks: object,
    inputs: Tensor,
    settings: BinarizationSettings,
    detector: object,
    detector_data: Array | None,
    labels: Tensor | None,
) -> list[BinarizationRun]:
    """The test, or the pair of tests of a classifier with a detector."""
    threat_model, context = settings.threat_model, current_context()
    if detector is None and settings.exposure != "classifier":
        raise InvalidArgumentError("exposure", settings.exposure, "'classifier' where there is no detector")
    if detector is None and detector_data is not None:
        raise InvalidArgumentError("detector_data", type(detector_data).__name__, "none where there is no detector")
    threat_model.check_resolution(inputs[:1].numel())
    ids, named = check_ids(run.sample_ids, len(inputs)), as_attacks(attacks)
    for one in named.values():
        one.check(threat_model=threat_model, detector=detector is not None)
    settings = settings.matched(named.values())
    parts = counted_parts(model, inputs, settings, PassCounter(), labels=labels, device=run.device)
    refuse_gradients(named.values(), parts.classifier)
    Rules(settings, len(named)).warn_if_few(len(ids))
    # Rows that are defended together are planted in and attacked together.
    group = together(parts.features)
    settings = replace(settings, batch_size=-(-settings.group_size // group) * group) if group > 1 else settings
    # Readouts of other kinds stand for the model's own, and replace it.
    replaced = isinstance(settings.fitting.shown, Linear)
    test = BinarizationRun(
        key="",
        title="",
        blocks=blocks_of(len(ids), settings.group_size),
        identity={
            **settings.to_dict(),
            "attacks": {name: describe(one) for name, one in named.items()},
            "target": context.target,
            "samples": len(ids),
            **context.origins,
            "inputs": inputs_digest(inputs, ids),
        },
        features=parts.features,
        readout=parts.readout,
        device=parts.device,
        attacks=named,
        inputs=inputs,
        ids=ids,
        given=settings,
        head=probe_head(parts.features.module, parts.readout, inputs[:PROBES].to(parts.device)) if replaced else Head(),
    )
    return [test] if detector is None else _with_detector(test, detector, parts.classifier, detector_data)


def _with_detector(
    run: BinarizationRun, detector: object, classifier: nn.Module, detector_data: Array | None
) -> list[BinarizationRun]:
    """The regular and the inverted test of a classifier with a detector."""
    settings = run.given
    if settings.calibrate_on:
        expected = "0 with a detector: the pair of tests has one hardness"
        raise InvalidArgumentError("calibrate_on", settings.calibrate_on, expected)
    # In front of a test-time defense, a detector watches the classifier behind it.
    watched = classifier.classifier if isinstance(classifier, AdaptiveDefense) else classifier
    found, calibration = prepare_detector(
        detector, watched, run.inputs.to(run.device), data=detector_data, settings=settings
    )
    network = run.features.module.model if isinstance(run.features.module, Observed) else run.features.module
    # What the detector sends through the network is counted where the network is called.
    features = Counted(run.features.module, run.features.counter, counts=network is not found.classifier)
    shared = {
        "detector": type(found).__name__,
        "detector_calibration": None if calibration is None else calibration.to_dict(),
    }
    regular = Defense(detector=found, inverted=False, exposure=settings.exposure, draws=settings.detector_draws)
    return [
        replace(
            run,
            key=test,
            title=test,
            identity={**run.identity, **shared, "test": test},
            features=features,
            defense=replace(regular, inverted=test == "inverted"),
        )
        for test in TESTS
    ]
