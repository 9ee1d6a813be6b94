"""The binarization test as one function."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import make_settings
from robust_ext.core.target import PassCounter
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_inputs, check_integer
from robust_ext.engine.identity import check_ids, describe, inputs_digest, model_digest
from robust_ext.evaluations.binarization.pair import prepare_detector, run_pair
from robust_ext.evaluations.binarization.preparation import as_attacks, counted_parts
from robust_ext.evaluations.binarization.result import BinarizationResult
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.binarization.single import Subject, run_test


def binarization_test(
    model: object,
    attack: object,
    inputs: Tensor,
    threat_model: ThreatModel,
    *,
    layer: str | None = None,
    sample_ids: Sequence[int] | None = None,
    out: str | os.PathLike[str] | None = None,
    calibrate_on: int = 0,
    detector: object = None,
    detector_data: Tensor | None = None,
    detector_fpr: float = 0.05,
    view: str = "classifier",
    progress: bool = False,
    target: str = "",
    origin: Mapping[str, str] | None = None,
    shard: tuple[int, int] = (0, 1),
    **settings: Any,
) -> BinarizationResult:
    """Test whether an attack finds adversarial examples that are known to exist (Zimmermann et al. 2022, section 3.1).

    For each input, a copy of the model with a two-class readout is made in which a random point of the ball is
    adversarial. The attack is run on it, and its candidates are verified. An attack that misses what was planted
    cannot support a claim of robustness of this model.

    Args:
        model: A torch module from inputs in the threat model's bounds to logits, in eval mode; a pair of modules
            ``(features, readout)``; a Foolbox model; an ART ``PyTorchClassifier``.
        attack: Anything :func:`robust_ext.as_attack` takes, a list of such, or a dict of them by name.
        inputs: Clean samples, float ``(N, ...)`` in bounds. Labels are not needed: the problems bring their own.
        threat_model: The norm, epsilon and bounds that the robustness claim is about.
        layer: Name of the linear layer that makes the logits; found when left out.
        sample_ids: Ids of the samples, which with the seed decide every draw; ``0 .. N-1`` when left out.
        out: Run folder. With one, records survive a kill and the same call goes on; ``result.json`` and
            ``report.html`` are written there.
        calibrate_on: Number of samples on which the hardness is calibrated first (section 4.3); 0 for no calibration.
        detector: A detector that rejects inputs: anything :func:`robust_ext.as_detector` takes. With one,
            two tests are run (section 3.2): in the *regular* one what is planted goes undetected, in the *inverted* one
            it is detected; an attack has to pass both, and its score is the lower of the two.
        detector_data: Clean inputs ``(M, ...)`` to calibrate a detector that has no threshold.
        detector_fpr: Share of them that it may detect.
        view: What attacks that know logits only are shown of a classifier with a detector: ``"classifier"`` (they
            ignore the detector), ``"reject"`` (being rejected is a class) or ``"margin"`` (class 1 only where both are
            fooled).
        progress: Show a progress bar on stderr.
        target: Words for what is attacked, for tables that hold several targets.
        origin: Where things came from, in words by name (``{"model": "net.py:make"}``), kept with the settings.
        shard: Number of this process, and of how many that share the run folder; a call without it completes them.
        **settings: Of the test, see :class:`BinarizationSettings`.

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
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
        >>> def nothing(model, x, y):
        ...     return x
        >>> threat_model = ThreatModel(norm="linf", epsilon=0.1)
        >>> binarization_test(model.eval(), nothing, torch.rand(12, 1, 4, 4), threat_model, inner_points=50).verdict
        'failed'
    """
    checked = make_settings(BinarizationSettings, settings, threat_model=threat_model)
    inputs = check_inputs("inputs", inputs, bounds=threat_model.bounds)
    samples = check_ids(sample_ids, len(inputs))
    check_integer("calibrate_on", calibrate_on, minimum=0)
    attacks = as_attacks(attack)
    for one in attacks.values():
        one.check(threat_model=threat_model, detector=detector is not None)
    counter = PassCounter()
    features, readout, device = counted_parts(model, inputs, threat_model, layer, counter)
    described = {
        **checked.to_dict(),
        "calibrate_on": calibrate_on,
        "attacks": {name: describe(one) for name, one in attacks.items()},
        "target": target,
        "samples": len(samples),
        **{f"{name}_origin": words for name, words in (origin or {}).items()},
        "model": model_digest(features, readout),
        "inputs": inputs_digest(inputs, samples),
    }
    subject = Subject(
        features=features,
        readout=readout,
        device=device,
        attacks=attacks,
        inputs=inputs,
        samples=samples,
        settings=checked,
        described=described,
    )
    if detector is None:
        return run_test(subject, out=out, calibrate_on=calibrate_on, progress=progress, shard=shard)
    if calibrate_on:
        raise InvalidArgumentError(
            "calibrate_on", calibrate_on, "0 with a detector: the pair of tests has one hardness"
        )
    watching, calibration = prepare_detector(
        detector,
        model,
        inputs,
        data=detector_data,
        false_positive_rate=detector_fpr,
        bounds=threat_model.bounds,
        device=device,
        seed=checked.seed,
    )
    return run_pair(subject, watching, calibration=calibration, view=view, out=out, progress=progress, shard=shard)
