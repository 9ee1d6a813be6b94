"""The network of a binarization test in parts, and its detector, made ready."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robust_ext.core.classifier import check_classifier
from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.core.target import Counted, PassCounter, module_device
from robust_ext.detectors.base import Detector, rejected
from robust_ext.detectors.calibration import Calibration
from robust_ext.engine.classifiers import as_classifier, parts_in_precision
from robust_ext.engine.inputs import PROBES, bounded_module, check_model
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.detectors import calibrate_detector, has_threshold
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.adaptive_features import split_defense
from robust_ext.models.features import as_parts, split
from robust_ext.registry.detector import as_detector
from robust_ext.registry.model import as_module


def counted_parts(
    model: object, inputs: Tensor, settings: BinarizationSettings, counter: PassCounter
) -> tuple[Counted, nn.Module, torch.device]:
    """The network's features (counted) and readout, verified, and its device.

    Models of no known kind or of other bounds, and features that the settings' readout does not take, raise
    InvalidArgumentError, models that cannot be split ModelError.
    """
    threat_model, layer = settings.threat_model, settings.layer
    if not len(inputs):
        raise InvalidArgumentError("inputs", "no samples", "at least one sample")
    pair = as_parts(model)
    given = bounded_module(model, threat_model) if pair is None else nn.ModuleList(pair)
    device = module_device(given)
    probes = inputs[:PROBES].to(device)
    module: nn.Module | tuple[nn.Module, nn.Module]
    if pair is None:
        module = classifier = as_classifier(given, probes)
    else:
        module = pair = parts_in_precision(pair, probes)
        classifier = nn.Sequential(*pair)
        classifier.training = any(part.training for part in pair)
    random = settings.draws > 1
    check_classifier(classifier, probes)
    check_model(classifier, probes, bounds=threat_model.bounds, draws=True, random=random)
    if isinstance(module, AdaptiveDefense):
        if random:
            expected = "1 for a test-time defense, of which one draw is held"
            raise InvalidArgumentError("draws", settings.draws, expected)
        parts = split_defense(module, probes, layer=layer)
    else:
        parts = split(module, probes, layer=layer)
    settings.fitting.shown.check(parts.shape)
    return Counted(parts.features, counter), parts.readout, device


def prepare_detector(
    detector: object, model: object, inputs: Tensor, *, data: Tensor | None, settings: BinarizationSettings
) -> tuple[Detector, Calibration | None]:
    """A detector of a model with a threshold, and how it got that here, where clean inputs ``data`` gave it one.

    Without a threshold and data, InvalidArgumentError; where it detects all of the inputs, ModelError.
    """
    pair = as_parts(model)
    if pair is None:
        network = as_classifier(as_module(model).module, inputs[:PROBES])
    else:
        network = nn.Sequential(*parts_in_precision(pair, inputs[:PROBES])).eval()
    found, calibration = as_detector(detector, network, inputs=inputs[:PROBES]), None
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
            f"scored NaN on {int(margins.isnan().sum())} of {len(some)} clean inputs; mend its score, which divides by "
            "zero or overflows there"
        )
    detected = rejected(margins)
    if len(some) >= 10 and bool(detected.all()):
        raise ModelError(
            f"detector {type(found).__name__}: rejects all of {len(some)} clean inputs, so that no attack is "
            "needed; calibrate it on clean inputs like these"
        )
    return found, calibration
