"""The network of a binarization test in parts, and its detector, made ready."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robust_ext.core.classifier import check_classifier
from robust_ext.core.devices import on_device, run_device
from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.core.target import Counted, PassCounter
from robust_ext.core.validation import Array, check_labels
from robust_ext.detectors.base import Detector, rejected
from robust_ext.detectors.calibration import Calibration
from robust_ext.engine.classifiers import as_classifier, parts_in_precision
from robust_ext.engine.inputs import PROBES, bounded_module, check_model
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.detectors import calibrate_detector, detector_beside, has_threshold
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.adaptive_features import split_defense
from robust_ext.models.features import as_parts, split
from robust_ext.registry.model import as_module


def counted_parts(
    model: object,
    inputs: Tensor,
    settings: BinarizationSettings,
    counter: PassCounter,
    *,
    labels: Tensor | None = None,
    device: str | torch.device | None = None,
) -> tuple[Counted, nn.Module, torch.device]:
    """The network's features (counted) and readout, verified, and its device.

    Models of no known kind or of other bounds, and features that the settings' readout does not take, raise
    InvalidArgumentError, models that cannot be split ModelError.
    """
    threat_model, layer = settings.threat_model, settings.layer
    if not len(inputs):
        raise InvalidArgumentError("inputs", "no samples", "at least one sample")
    pair = as_parts(model)
    module: nn.Module | tuple[nn.Module, nn.Module]
    if pair is None:
        given = bounded_module(model, threat_model, device=device)
        where = run_device(given, device)
        probes = inputs[:PROBES].to(where)
        module = classifier = as_classifier(given, inputs.to(where), None if labels is None else labels.to(where))
    else:
        where = run_device(nn.ModuleList(pair), device)
        probes = inputs[:PROBES].to(where)
        module = parts_in_precision((on_device(pair[0], where), on_device(pair[1], where)), probes)
        classifier = nn.Sequential(*module)
        classifier.training = any(part.training for part in module)
    random = settings.draws > 1
    logits = check_classifier(classifier, probes)
    if labels is not None:
        check_labels("labels", labels, samples=len(inputs), classes=logits.shape[1])
    check_model(classifier, probes, bounds=threat_model.bounds, draws=True, random=random)
    if isinstance(module, AdaptiveDefense):
        if random:
            expected = "1 for a test-time defense, of which one draw is held"
            raise InvalidArgumentError("draws", settings.draws, expected)
        parts = split_defense(module, probes, layer=layer)
    else:
        parts = split(module, probes, layer=layer)
    settings.fitting.shown.check(parts.shape)
    return Counted(parts.features, counter), parts.readout, where


def prepare_detector(
    detector: object,
    model: object,
    inputs: Tensor,
    *,
    data: Array | None,
    settings: BinarizationSettings,
    labels: Tensor | None = None,
) -> tuple[Detector, Calibration | None]:
    """A detector of a model with a threshold, and how it got that here, where clean inputs ``data`` gave it one.

    Without a threshold and data, InvalidArgumentError; where it detects all of the inputs, ModelError.
    """
    pair = as_parts(model)
    if pair is None:
        network = as_classifier(
            on_device(as_module(model).module, inputs.device),
            inputs,
            None if labels is None else labels.to(inputs.device),
        )
    else:
        parts = (on_device(part, inputs.device) for part in pair)
        network = nn.Sequential(*parts_in_precision((next(parts), next(parts)), inputs[:PROBES])).eval()
    found, calibration = detector_beside(detector, network, inputs[:PROBES]), None
    if not has_threshold(found):
        if data is None:
            raise InvalidArgumentError(
                "detector_data",
                "nothing, and a detector without a threshold",
                "clean inputs to calibrate it on, or a detector whose calibrate() was called",
            )
        rate, bounds = settings.detector_fpr, settings.threat_model.bounds
        calibration = calibrate_detector(found, data, false_positive_rate=rate, bounds=bounds, seed=settings.seed)
    some = inputs[:64]
    with seeded_globals(derive_seed(settings.seed, "detector probe")), torch.no_grad():
        margins = found.score_margin(some)
    if bool(margins.isnan().any()):
        raise found.error(
            f"scored NaN on {int(margins.isnan().sum())} of {len(some)} clean inputs; fix its score, which divides by "
            "zero or overflows there"
        )
    detected = rejected(margins)
    if len(some) >= 10 and bool(detected.all()):
        raise ModelError(
            f"detector {type(found).__name__}: rejects all of {len(some)} clean inputs, so that no attack is "
            "needed; calibrate it on clean inputs like these"
        )
    return found, calibration
