"""The five detectors of MEAD, made and fitted by name with the constants of their papers.

Source: Granese et al., "MEAD: A Multi-Armed Approach for Evaluation of Adversarial Examples Detectors" (2022), section
5.1.3: supervised detectors learn from PGD in the linf ball of .03125 on training images.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.bounds import check_bounds
from robust_ext.core.classifier import check_classifier
from robust_ext.core.errors import InvalidArgumentError, SplitError
from robust_ext.core.random import stream
from robust_ext.core.target import module_device
from robust_ext.core.validation import check_choice, check_inputs, check_integer, check_labels
from robust_ext.detectors import feature_squeezing, magnet
from robust_ext.detectors._features.layers import activation_layers, hidden_layer
from robust_ext.detectors.base import Detector
from robust_ext.detectors.kd_bu import KDBUDetector
from robust_ext.detectors.lid import LIDDetector
from robust_ext.detectors.nss import NSSDetector
from robust_ext.detectors.observation import observe
from robust_ext.evaluations.mead.training import training_adversarials

NAMED = ("nss", "kd-bu", "lid", "fs", "magnet")
SUPERVISED = ("nss", "kd-bu", "lid")
PRESETS = ("mnist", "cifar10")

_CLASSES: dict[str, type[Detector]] = {
    "nss": NSSDetector,
    "kd-bu": KDBUDetector,
    "lid": LIDDetector,
    "fs": feature_squeezing.FeatureSqueezingDetector,
    "magnet": magnet.MagNetDetector,
}
# What the papers choose by data set; NSS knows no such choice.
_CONSTANTS: dict[str, dict[str, dict[str, Any]]] = {
    "nss": {name: {} for name in PRESETS},
    "kd-bu": {"mnist": {"bandwidth": 1.2}, "cifar10": {"bandwidth": 0.26}},
    "lid": {"mnist": {"neighbours": 20}, "cifar10": {"neighbours": 30}},
    "fs": {name: {"squeezers": name} for name in PRESETS},
    "magnet": {name: dict(magnet.PRESETS[name]) for name in PRESETS},
}
# Sigmoid autoencoders learn little in the few steps of 256 images at .001 that there is time for.
_MAGNET_STEPS = {"batch_size": 32, "learning_rate": 0.01}
_MAGNET_IMAGES = 100_000
# Parameters that are no settings: fit_detector has its own for them.
_GIVEN = ("self", "classifier", "clean", "adversarial", "inputs", "labels", "references", "bounds", "seed")


@dataclass(frozen=True)
class _Data:
    """Checked training data; adversarial inputs belong to the first of the clean ones."""

    clean: Tensor
    labels: Tensor
    adversarial: Tensor | None
    bounds: tuple[float, float]


def fit_detector(
    name: str,
    classifier: nn.Module,
    clean: Tensor,
    labels: Tensor,
    *,
    preset: str = "auto",
    adversarial: Tensor | None = None,
    rows: int = 1000,
    bounds: Sequence[float] = (0.0, 1.0),
    seed: int = 0,
    **settings: Any,
) -> Detector:
    """Make one of the five detectors of MEAD and fit it; its threshold is left to :meth:`Detector.calibrate`.

    The supervised detectors, ``"nss"``, ``"kd-bu"`` and ``"lid"``, are trained on clean rows and on adversarial ones
    made from them. Rows of ``clean`` that are not trained on are the references of KD-BU (if there are at least as many
    as are trained on) and of LID (if there are at least ``size``); otherwise these set some of the rows apart. FS is
    not trained. MagNet learns from all clean rows, in steps of 32 images at a learning rate of .01, until it has seen
    100,000 images or its epochs are over; the paper's training, which takes an hour or more on one core, is
    ``batch_size=256, learning_rate=0.001`` and ``epochs=100`` (MNIST) or ``350`` (CIFAR-10).

    Args:
        name: One of :data:`NAMED`.
        classifier: The network to watch, in eval mode.
        clean: Training inputs ``(N, ...)``, floating point, in the bounds.
        labels: Their classes, integers ``(N,)``.
        preset: ``"mnist"`` or ``"cifar10"``: the constants of the papers (KD-BU's bandwidth, LID's neighbours, FS's
            squeezers, MagNet's autoencoders). ``"auto"``: those of MNIST for images of one channel, and those of
            CIFAR-10 for images of three.
        adversarial: Adversarial inputs ``(M, ...)`` of the first M clean ones, in order, for supervised detectors.
            Left out, they are made by :func:`training_adversarials`, which may take longer than the fit.
        rows: How many rows supervised detectors are trained on at most, drawn by the seed. The papers take the whole
            training set. The features are few, so that more rows change little; time grows with them.
        bounds: Of the inputs.
        seed: Of the rows, the adversarial inputs and whatever the fit draws.
        **settings: Keyword arguments of the detector's class or of its ``fit``, in place of the above. LID's ``layers``
            are else those of ``activation_layers``, and KD-BU's ``layer`` that of
            ``hidden_layer``.

    Raises:
        InvalidArgumentError: There is no such detector, preset or setting, or these are no such tensors; the layer
            before the logits is not found; constants must be chosen for such inputs.
        DataError: A class has no reference (KD-BU).
        MissingDependencyError: scikit-learn (supervised detectors) or OpenCV (FS for CIFAR-10) is not installed.
        ModelError: The classifier is not one, or is in train mode.

    Example:
        >>> from robust_ext.datasets import load_dataset
        >>> from robust_ext.demo.network import digits_network
        >>> clean, labels = load_dataset("digits", split="train").take(range(60))
        >>> detector = fit_detector("fs", digits_network(), clean, labels)
        >>> detector.calibrate(clean).achieved
        0.05
    """
    check_choice("name", name, NAMED)
    check_integer("rows", rows, minimum=2)
    check_integer("seed", seed, minimum=0)
    data = _checked(classifier, clean, labels, adversarial, check_bounds(bounds))
    chosen = _constants(name, preset, data.clean, settings)
    if name == "magnet":
        passes = -(-_MAGNET_IMAGES // len(data.clean))
        chosen = {**chosen, **_MAGNET_STEPS, "epochs": min(chosen.get("epochs", passes), passes)}
    made, fitted = _divided(name, {**chosen, **settings}, data.bounds)
    if name in ("kd-bu", "lid"):
        made = _with_layers(name, classifier, data.clean[:2], made)
    detector = _CLASSES[name](classifier, **made)
    if detector.layers:
        # A wrong name is told before the attack.
        observe(classifier, data.clean[:1].to(module_device(classifier)), detector.layers)
    if "seed" in inspect.signature(_fit_of(name)).parameters:
        fitted["seed"] = seed
    if name in SUPERVISED:
        _fit_supervised(detector, data, rows, seed, fitted)
    elif name == "magnet":
        _fit_of(name)(detector, data.clean, **fitted)
    return detector


def load_detector(name: str, path: str | os.PathLike[str], classifier: nn.Module) -> Detector:
    """Read one of the five detectors from the file that :meth:`Detector.save` wrote.

    Args:
        name: One of :data:`NAMED`.
        path: The file.
        classifier: The network that it watched.

    Raises:
        InvalidArgumentError: There is no such detector.
        DataError: The file cannot be read, or holds another detector.
    """
    return _CLASSES[check_choice("name", name, NAMED)].load(path, classifier)


def _checked(
    classifier: nn.Module, clean: Tensor, labels: Tensor, adversarial: Tensor | None, bounds: tuple[float, float]
) -> _Data:
    clean = check_inputs("clean", clean, bounds=bounds)
    if not len(clean):
        raise InvalidArgumentError("clean", f"shape {tuple(clean.shape)}", "training inputs (N, ...), at least one")
    classes = check_classifier(classifier, clean[:2].to(module_device(classifier))).shape[1]
    labels = check_labels("labels", labels, samples=len(clean), classes=classes).to(clean.device)
    if adversarial is not None:
        adversarial = check_inputs("adversarial", adversarial, bounds=bounds).to(clean.device)
        if adversarial.shape[1:] != clean.shape[1:] or not 0 < len(adversarial) <= len(clean):
            raise InvalidArgumentError(
                "adversarial",
                f"shape {tuple(adversarial.shape)} beside clean inputs {tuple(clean.shape)}",
                "one for each clean input, or for each of the first, in order",
            )
    return _Data(clean, labels, adversarial, bounds)


def _constants(name: str, preset: str, clean: Tensor, settings: dict[str, Any]) -> dict[str, Any]:
    """The papers' constants for such inputs."""
    choices = _CONSTANTS[name]
    check_choice("preset", preset, ("auto", *PRESETS))
    channels = clean.shape[1] if clean.dim() == 4 else 0
    if preset == "auto" and channels in (1, 3):
        preset = "mnist" if channels == 1 else "cifar10"
    if preset != "auto":
        return choices[preset]
    if choices["mnist"].keys() <= settings.keys():
        return {}
    raise InvalidArgumentError(
        "preset",
        f"'auto' with clean inputs of shape {tuple(clean.shape)}",
        f"'mnist' or 'cifar10', as 'auto' knows images of one and three channels only; or settings of {name} in their "
        f"place: {', '.join(choices['mnist'])}",
    )


def _divided(name: str, settings: dict[str, Any], bounds: tuple[float, float]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the constructor and those of the fit, with the bounds where they are asked for."""
    constructor = dict(inspect.signature(_CLASSES[name]).parameters)
    fit = dict(inspect.signature(_fit_of(name)).parameters)
    known = [key for key in {**constructor, **fit} if key not in _GIVEN and key != "channels"]
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        raise InvalidArgumentError("settings", ", ".join(unknown), f"settings of {name}: {', '.join(known)}")
    settings = {**settings, "bounds": bounds}
    made = {key: value for key, value in settings.items() if key in constructor}
    return made, {key: value for key, value in settings.items() if key in fit and key not in made}


def _fit_of(name: str) -> Callable[..., Any]:
    """The method that fits; one without parameters where nothing is fitted."""
    found: Callable[..., Any] = getattr(_CLASSES[name], "fit", lambda: None)
    return found


def _with_layers(name: str, classifier: nn.Module, inputs: Tensor, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings, with the layers that were left out."""
    inputs = inputs.to(module_device(classifier))
    if name == "lid":
        return {"layers": activation_layers(classifier, inputs), **settings} if "layers" not in settings else settings
    if settings.get("layer") is not None:
        return settings
    try:
        return {**settings, "layer": hidden_layer(classifier, inputs)}
    except SplitError as error:
        raise InvalidArgumentError(
            "layer", None, f"the name of the layer before the logits, as it was not found ({error})"
        ) from error


def _fit_supervised(detector: Detector, data: _Data, rows: int, seed: int, settings: dict[str, Any]) -> None:
    given = len(data.clean if data.adversarial is None else data.adversarial)
    chosen = torch.randperm(given, generator=stream(seed, "training rows"))[:rows].sort().values.to(data.clean.device)
    clean, labels = data.clean[chosen], data.labels[chosen]
    others = torch.ones(len(data.clean), dtype=torch.bool, device=data.clean.device).index_fill(0, chosen, False)
    if not isinstance(detector, NSSDetector):
        wanted = detector.size if isinstance(detector, LIDDetector) else len(clean)
        enough = int(others.sum()) >= wanted
        if not enough:
            _check_divisible(detector, len(clean), settings.get("folds", 5))
        settings = {**settings, "references": data.clean[others] if enough else None}
        if isinstance(detector, KDBUDetector):
            settings["labels"] = data.labels[others] if enough else labels
    if data.adversarial is None:
        adversarial = training_adversarials(detector.classifier, clean, labels, bounds=data.bounds, seed=seed)
    else:
        adversarial = data.adversarial[chosen]
    fit: Any = detector.fit
    fit(clean, adversarial, **settings)


def _check_divisible(detector: Detector, count: int, folds: int) -> None:
    """Whether a detector that sets references apart from the rows it is trained on has rows left, before the attack."""
    apart = detector.size if isinstance(detector, LIDDetector) else max(count // 2, 1)
    if count < apart + folds:
        raise InvalidArgumentError(
            "clean",
            f"{count} inputs to train on, of which {apart} become references",
            f"at least {folds} beside the references; give more training inputs, or others beside those with "
            "adversarial ones" + (", or a smaller size" if isinstance(detector, LIDDetector) else ""),
        )
