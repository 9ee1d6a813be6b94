"""The five detectors of MEAD, made and fitted by name with the constants of their papers.

Source: Granese et al., "MEAD: A Multi-Armed Approach for Evaluation of Adversarial Examples Detectors" (2022), section
5.1.3: supervised detectors learn from PGD in the linf ball of .03125 on training images.

The supervised detectors, ``"nss"``, ``"kd-bu"`` and ``"lid"``, are trained on clean rows and on adversarial ones made
from them. Rows of ``clean`` that are not trained on are the references of KD-BU (if there are at least as many as are
trained on) and of LID (if there are at least ``size``); otherwise these set some of the rows apart. FS is not trained.
MagNet learns from all clean rows, in steps of 32 images at a learning rate of .01, until it has seen 100,000 images or
its epochs are over; the paper's training, which takes an hour or more on one core, is ``batch_size=256,
learning_rate=0.001`` and ``epochs=100`` (MNIST) or ``350`` (CIFAR-10).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import draw_seed
from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.attacks.running import run_attack
from robust_ext.core.classifier import check_classifier
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.random import stream
from robust_ext.core.target import Target, module_device
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import (
    check_bounds,
    check_choice,
    check_inputs,
    check_integer,
    check_labels,
    check_number,
)
from robust_ext.detectors.base import Detector
from robust_ext.detectors.catalogue import DETECTORS
from robust_ext.detectors.observation import observe
from robust_ext.detectors.training import TrainingSet


def training_adversarials(
    classifier: nn.Module,
    clean: Tensor,
    labels: Tensor,
    *,
    epsilon: float = 0.03125,
    bounds: Sequence[float] = (0.0, 1.0),
    seed: int = 0,
    batch_size: int = 250,
    start: int = 0,
) -> Tensor:
    """The adversarial inputs that MEAD's supervised detectors learn from (Granese et al. 2022, section 5.1.3).

    Where PGD on the cross-entropy in an linf ball ends: 100 steps of .01 from a random start, see
    :class:`~robust_ext.attacks.objective_pgd.ObjectivePGD`; epsilon and steps are shares of the width of the bounds.
    All are returned, float32 ``(N, ...)`` on the device of ``clean``, whether or not the classifier errs on them;
    cutting into batches makes no difference to the draws. The inputs may be those from row ``start`` on of more, which
    have the same draws there. The classifier is left as it was.
    """
    check_integer("batch_size", batch_size, minimum=1)
    check_integer("start", start, minimum=0)
    low, high = check_bounds(bounds)
    share = check_number("epsilon", epsilon, minimum=0, open_minimum=True)
    threat_model = ThreatModel(norm="linf", epsilon=share * (high - low), bounds=(low, high))
    clean = check_inputs("clean", clean, bounds=(low, high))
    generator = stream(seed, "training adversarials")
    for _ in range(start):
        draw_seed(generator)
    if not len(clean):
        check_labels("labels", labels, samples=0)
        return clean.clone()
    device = module_device(classifier)
    classes = check_classifier(classifier, clean[:2].to(device)).shape[1]
    labels = check_labels("labels", labels, samples=len(clean), classes=classes)
    shape, attack = tuple(clean.shape[1:]), ObjectivePGD(objective="ace", algorithm="pgd")
    target = Target(module=classifier, bounds=(low, high), classes=classes, input_shape=shape, device=device)
    found = []
    for inputs, truth in zip(torch.split(clean, batch_size), torch.split(labels, batch_size), strict=True):
        x, y = inputs.to(device), truth.to(device)
        found.append(run_attack(attack, target, x, y, threat_model=threat_model, generator=generator).to(clean.device))
    return torch.cat(found)


NAMED = tuple(DETECTORS)
SUPERVISED = tuple(name for name, kind in DETECTORS.items() if kind.supervised)
# Parameters that are no settings: fit_detector has its own for them.
_GIVEN = ("self", "classifier", "clean", "adversarial", "inputs", "labels", "references", "bounds", "seed")


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

    What each learns from, and how long, stands at the top of :mod:`robust_ext.evaluations.mead.fitting`.

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
        seed: Seed of the rows, the adversarial inputs and the draws of the fit.
        **settings: Keyword arguments of the detector's class or of its ``fit``, in place of the above. Left out,
            LID's ``layers`` are all that describe an input, and KD-BU's ``layer`` is the one before the logits.

    Raises:
        InvalidArgumentError: There is no such detector, preset or setting, these are no such tensors, the layer before
            the logits is not found, or constants must be chosen for such inputs.
        RobustExtError: A class has no reference (KD-BU), a package is missing, or the classifier is in train mode.

    Example:
        >>> from robust_ext.datasets import load_dataset
        >>> from robust_ext.demo.network import digits_network
        >>> clean, labels = load_dataset("digits", split="train").take(range(60))
        >>> fit_detector("fs", digits_network(), clean, labels).calibrate(clean).achieved
        0.05
    """
    check_choice("name", name, DETECTORS)
    check_integer("rows", rows, minimum=2)
    check_integer("seed", seed, minimum=0)
    low, high = check_bounds(bounds)
    attack = partial(training_adversarials, bounds=(low, high), seed=seed)
    clean, labels, adversarial = _checked(classifier, clean, labels, adversarial, (low, high))
    detector, fitting = _made(name, classifier, clean, preset, settings, (low, high))
    data = TrainingSet(clean=clean, labels=labels, adversarial=adversarial, attack=attack, rows=rows)
    detector.fit_to(data, fitting, seed=seed)
    return detector


def load_detector(name: str, path: str | os.PathLike[str], classifier: nn.Module) -> Detector:
    """Read one of the five detectors from a file that :meth:`Detector.save` wrote; DataError for anything else."""
    return DETECTORS[check_choice("name", name, DETECTORS)].load(path, classifier)


def _checked(
    classifier: nn.Module, clean: Tensor, labels: Tensor, adversarial: Tensor | None, bounds: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor | None]:
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
    return clean, labels, adversarial


def _made(
    name: str,
    classifier: nn.Module,
    clean: Tensor,
    preset: str,
    settings: dict[str, Any],
    bounds: tuple[float, float],
) -> tuple[Detector, dict[str, Any]]:
    """The detector, not fitted yet, and the settings of its fit."""
    kind = DETECTORS[name]
    constants = _constants(name, preset, clean, settings)
    made, fitted = _parameters(kind), _parameters(getattr(kind, "fit", lambda: None))
    known = [key for key in {**made, **fitted} if key not in _GIVEN and key != "channels"]
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        raise InvalidArgumentError("settings", ", ".join(unknown), f"settings of {name}: {', '.join(known)}")
    chosen = {**kind.training_settings(classifier, clean, constants, settings), "bounds": bounds}
    detector = kind(classifier, **{key: value for key, value in chosen.items() if key in made})
    if detector.layers:
        # A wrong name is refused before the attack.
        observe(classifier, clean[:1].to(module_device(classifier)), detector.layers)
    return detector, {key: value for key, value in chosen.items() if key in fitted and key not in made}


def _constants(name: str, preset: str, clean: Tensor, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The paper's constants for such inputs."""
    choices = DETECTORS[name].presets
    check_choice("preset", preset, ("auto", *choices))
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
        f"'mnist' or 'cifar10', as 'auto' is for images of one and three channels only; or settings of {name} in their "
        f"place: {', '.join(choices['mnist'])}",
    )


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters
