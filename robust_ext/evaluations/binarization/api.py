"""The binarization test as one function."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn
from typing_extensions import Unpack

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import make_settings
from robust_ext.core.target import Counted, PassCounter
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_choice, check_inputs, check_integer
from robust_ext.engine.context import current_context
from robust_ext.engine.identity import check_ids, describe, inputs_digest, model_digest
from robust_ext.engine.inputs import as_attacks
from robust_ext.engine.run import run_all
from robust_ext.engine.task import drive
from robust_ext.evaluations.binarization.content import combine_tests, make_content
from robust_ext.evaluations.binarization.defense import EXPOSURES, TESTS, Defense
from robust_ext.evaluations.binarization.options import BinarizationOptions
from robust_ext.evaluations.binarization.preparation import counted_parts, prepare_detector
from robust_ext.evaluations.binarization.protocol import BinarizationRun, load_examples
from robust_ext.evaluations.binarization.result import BinarizationResult
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.models.features import LayerInput


def binarization_test(
    model: object,
    attacks: object,
    inputs: Tensor,
    threat_model: ThreatModel,
    *,
    layer: str | None = None,
    calibrate_on: int = 0,
    detector: object = None,
    detector_data: Tensor | None = None,
    detector_fpr: float = 0.05,
    exposure: str = "classifier",
    sample_ids: Sequence[int] | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: bool = False,
    settings: BinarizationSettings | None = None,
    **options: Unpack[BinarizationOptions],
) -> BinarizationResult:
    """Test whether an attack finds adversarial examples that are known to exist (Zimmermann et al. 2022, section 3.1).

    For each input, a copy of the model with a two-class readout is made in which a random point of the ball is
    adversarial. The attack is run on it, and its candidates are verified. An attack that misses what was planted
    cannot support a claim of robustness of this model.

    Args:
        model: A torch module from inputs in the threat model's bounds to logits, in eval mode; a pair of modules
            ``(features, readout)``; a Foolbox model; an ART ``PyTorchClassifier``.
        attacks: Anything :func:`robust_ext.as_attack` takes, a list of such, or a dict of them by name.
        inputs: Clean samples, float ``(N, ...)`` in bounds. Labels are not needed: the problems bring their own.
        threat_model: The norm, epsilon and bounds that the robustness claim is about.
        layer: Name of the linear layer that makes the logits; found when left out.
        calibrate_on: Number of samples on which the hardness is calibrated first (section 4.3); 0 for no calibration.
        detector: A detector that rejects inputs: anything :func:`robust_ext.as_detector` takes. With one,
            two tests are run (section 3.2): in the *regular* one what is planted goes undetected, in the *inverted* one
            it is detected; an attack has to pass both, and its score is the lower of the two.
        detector_data: Clean inputs ``(M, ...)`` to calibrate a detector that has no threshold.
        detector_fpr: Share of them that it may detect.
        exposure: What attacks on logits are shown of a classifier with a detector: ``"classifier"`` (they ignore the
            detector), ``"reject"`` (being rejected is a class) or ``"margin"`` (class 1 only where both are fooled).
        sample_ids: Ids of the samples, which with the seed decide every draw; ``0 .. N-1`` when left out.
        out: Run folder. With one, records survive a kill and the same call goes on; ``result.json`` and
            ``report.html`` are written there.
        progress: Show a progress bar on stderr.
        settings: All settings at once; the defaults when left out.
        **options: Single settings, see :class:`BinarizationSettings`.

    Returns:
        The result; ``print`` shows its table. With a detector, each attack has ``tests`` with the two results.

    Raises:
        InvalidArgumentError: An argument is outside what is accepted.
        ModelError: The model is no classifier to logits, or cannot be split.
        AttackRefusedError: An attack makes no sense on this target.
        AttackError: An attack raised, or returned no batch of candidates.
        RunFolderError: The folder holds another run.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
        >>> def nothing(model, x, y):
        ...     return x
        >>> threat_model = ThreatModel(norm="linf", epsilon=0.1)
        >>> binarization_test(model.eval(), nothing, torch.rand(12, 1, 4, 4), threat_model, inner_points=50).verdict
        'failed'
    """
    checked = make_settings(BinarizationSettings, options, base=settings, threat_model=threat_model)
    check_integer("calibrate_on", calibrate_on, minimum=0)
    check_choice("exposure", exposure, EXPOSURES)
    inputs = check_inputs("inputs", inputs, bounds=threat_model.bounds)
    run = _prepare(model, attacks, inputs, checked, layer=layer, sample_ids=sample_ids, detected=detector is not None)
    run = replace(run, calibrate_on=calibrate_on, identity={**run.identity, "calibrate_on": calibrate_on})
    runs = [run]
    if detector is not None:
        if calibrate_on:
            expected = "0 with a detector: the pair of tests has one hardness"
            raise InvalidArgumentError("calibrate_on", calibrate_on, expected)
        found, calibration = prepare_detector(
            detector,
            model,
            inputs[:64].to(run.device),
            data=detector_data,
            false_positive_rate=detector_fpr,
            bounds=threat_model.bounds,
            seed=checked.seed,
        )
        shared = {
            "exposure": exposure,
            "detector": type(found).__name__,
            "detector_digest": model_digest(found, nn.Identity()),
            "detector_calibration": None if calibration is None else calibration.to_dict(),
        }
        defense = Defense(detector=found, inverted=False, exposure=exposure, draws=checked.detector_draws)
        runs = [_with_detector(run, replace(defense, inverted=inverted), shared) for inverted in (False, True)]
    outcomes = drive(run_all(runs, out=out, progress=progress, title="binarization", unit="sample"))
    if outcomes is None:
        return BinarizationResult({})
    results = {
        key: BinarizationResult(make_content(left), records=left.records, examples=load_examples(left.store))
        for key, left in outcomes.items()
    }
    if detector is None:
        result = results[run.key]
    else:
        if out is not None:
            for test, one in results.items():
                one.save(Path(out) / test)
        examples = [replace(one, attack=f"{one.attack} ({test})") for test in TESTS for one in results[test].examples]
        contents = {test: results[test].content for test in TESTS}
        described = {key: value for key, value in runs[0].identity.items() if key != "test"}
        result = BinarizationResult(combine_tests(contents, described), examples=examples)
    if out is not None:
        result.save(out)
    return result


def _prepare(
    model: object,
    attacks: object,
    inputs: Tensor,
    settings: BinarizationSettings,
    *,
    layer: str | None,
    sample_ids: Sequence[int] | None,
    detected: bool,
) -> BinarizationRun:
    """The test without a detector and calibration."""
    threat_model, context = settings.threat_model, current_context()
    ids, named = check_ids(sample_ids, len(inputs)), as_attacks(attacks)
    for one in named.values():
        one.check(threat_model=threat_model, detector=detected)
    features, readout, device = counted_parts(model, inputs, threat_model, layer, PassCounter())
    identity = {
        **settings.to_dict(),
        "attacks": {name: describe(one) for name, one in named.items()},
        "target": context.target,
        "samples": len(ids),
        **context.origins,
        "model": model_digest(features, readout),
        "inputs": inputs_digest(inputs, ids),
    }
    return BinarizationRun(
        features=features,
        readout=readout,
        device=device,
        attacks=named,
        inputs=inputs,
        ids=ids,
        given=settings,
        identity=identity,
    )


def _with_detector(run: BinarizationRun, defense: Defense, shared: dict[str, object]) -> BinarizationRun:
    """One of the two tests of a classifier with a detector."""
    features, network = run.features, run.features.module
    if isinstance(network, LayerInput):
        network = network.model
    # What the detector sends through the network is counted where the network is called.
    counted = Counted(features.module, features.counter, counts=network is not defense.detector.classifier)
    return replace(run, features=counted, defense=defense, identity={**run.identity, **shared, "test": defense.test})
