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

import hashlib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import draw_seed
from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.attacks.running import run_attack
from robust_ext.core.classifier import check_classifier
from robust_ext.core.errors import DataError, InvalidArgumentError
from robust_ext.core.files import make_folder, replace_file
from robust_ext.core.random import stream
from robust_ext.core.specification import did_you_mean
from robust_ext.core.target import Target, module_device
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_bounds, check_choice, check_inputs, check_integer, check_labels
from robust_ext.detectors.base import Detector
from robust_ext.detectors.catalogue import DETECTORS
from robust_ext.detectors.observation import observe
from robust_ext.detectors.training import TrainingSet
from robust_ext.engine.code_digest import code_digest, module_code
from robust_ext.engine.identity import inputs_digest, model_digest
from robust_ext.engine.pool import FunctionCall, call_all

NAMED = tuple(DETECTORS)
SUPERVISED = tuple(name for name, kind in DETECTORS.items() if kind.supervised)
# Parameters that are no settings: fit_detector has its own for them.
_GIVEN = ("self", "classifier", "clean", "adversarial", "inputs", "labels", "references", "bounds", "seed", "channels")
# Adversarial examples that a worker makes at once.
_BATCH = 250


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
    All are returned, float32 ``(N, ...)`` on the device of ``clean``, whether or not the classifier errs on them. Draws
    do not depend on batches, and are those of rows from ``start`` on. The classifier is left as it was.
    """
    low, high = bounds
    threat_model = ThreatModel(norm="linf", epsilon=epsilon * (high - low), bounds=(low, high))
    generator = stream(seed, "training adversarials")
    for _ in range(start):
        draw_seed(generator)
    if not len(clean):
        return clean.clone()
    device, shape = module_device(classifier), tuple(clean.shape[1:])
    attack = ObjectivePGD(objective="ace", algorithm="pgd")
    classes = check_classifier(classifier, clean[:2].to(device)).shape[1]
    target = Target(module=classifier, bounds=(low, high), classes=classes, input_shape=shape, device=device)
    found = []
    for inputs, truth in zip(torch.split(clean, batch_size), torch.split(labels, batch_size), strict=True):
        x, y = inputs.to(device), truth.to(device)
        found.append(run_attack(attack, target, x, y, threat_model=threat_model, generator=generator).to(clean.device))
    return torch.cat(found)


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
    """The detector with the paper's constants for such inputs, not fitted yet, and the settings of its fit."""
    kind, constants = DETECTORS[name], DETECTORS[name].presets
    check_choice("preset", preset, ("auto", *constants))
    if preset == "auto" and clean.dim() == 4:
        preset = {1: "mnist", 3: "cifar10"}.get(clean.shape[1], preset)
    if preset == "auto" and not constants["mnist"].keys() <= settings.keys():
        raise InvalidArgumentError(
            "preset",
            f"'auto' with clean inputs of shape {tuple(clean.shape)}",
            "'mnist' or 'cifar10', as 'auto' is for images of one and three channels only; or settings of "
            f"{name} in their place: {', '.join(constants['mnist'])}",
        )
    made, fitted = (inspect.signature(one).parameters for one in (kind, getattr(kind, "fit", lambda: None)))
    known = [key for key in {**made, **fitted} if key not in _GIVEN]
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        raise InvalidArgumentError("settings", ", ".join(unknown), f"settings of {name}: {', '.join(known)}")
    chosen = {**kind.training_settings(classifier, clean, constants.get(preset, {}), settings), "bounds": bounds}
    detector = kind(classifier, **{key: value for key, value in chosen.items() if key in made})
    if detector.layers:
        # A wrong name is refused before the attack.
        observe(classifier, clean[:1].to(module_device(classifier)), detector.layers)
    return detector, {key: value for key, value in chosen.items() if key in fitted and key not in made}


def find_detectors(
    names: Sequence[str],
    module: nn.Module,
    clean: Tensor,
    labels: Tensor,
    *,
    attacked: int,
    preset: str,
    bounds: tuple[float, float],
    seed: int,
    folder: Path | None,
    repair: bool = False,
    fit: bool = True,
    report: Callable[[str], None],
) -> dict[str, object]:
    """Detectors by name: those of :data:`NAMED` fitted on clean inputs ``(N, ...)``, others as they were named.

    Supervised ones learn from the first ``attacked`` inputs. Fitted ones are kept in the folder and read from it;
    ``repair`` fits damaged ones again. ``report`` is called with a line before each step that takes time. Without
    ``fit`` nothing is fitted or written, and a score that means nothing stands for what is not there yet.
    """
    identity = ""
    if folder is not None:
        # A few letters that differ for other data, settings or networks.
        network = f"{model_digest(module)} {code_digest(module_code(module))}"
        words = f"{network} {inputs_digest(clean, labels.tolist())} {attacked} {preset} {seed}"
        identity = hashlib.blake2b(words.encode(), digest_size=5).hexdigest()
    # Each in its place, also before it is fitted.
    found: dict[str, object] = {name: _spread if name in NAMED else name for name in names}
    with TemporaryDirectory() as spare:
        place = Path(spare) if folder is None else folder
        files = {name: place / f"{name}-{identity}.safetensors" for name in names if name in NAMED}
        for name in names:
            if name not in NAMED and ":" not in name:
                expected = f"one of {', '.join(NAMED)}, package.module:object or file.py:object"
                raise InvalidArgumentError("detector", name, expected + did_you_mean(name, NAMED))
            if name in NAMED and files[name].exists():
                try:
                    found[name] = load_detector(name, files[name], module)
                except DataError as error:
                    if not repair:
                        raise DataError(f"{error}, or run the same command with --repair") from error
        missing = [name for name in files if found[name] is _spread and fit]
        options = {"module": module, "preset": preset, "rows": attacked, "bounds": bounds, "seed": seed}
        for name, content in _fitted(missing, clean, labels, options, report):
            make_folder(place)
            replace_file(files[name], content)
            found[name] = load_detector(name, files[name], module).to(module_device(module))
    return found


def _fitted(
    names: Sequence[str], clean: Tensor, labels: Tensor, options: dict[str, Any], report: Callable[[str], None]
) -> Iterator[tuple[str, bytes]]:
    """Fitted detectors as the content of files. Workers make adversarial examples and fit what takes none meanwhile."""
    data: dict[str, Any] = {"clean": clean, "labels": labels, **options}
    made: dict[int, Tensor] = {}
    for supervised in (False, True):
        calls: dict[str | int, FunctionCall] = {}
        for name in names:
            if (name in SUPERVISED) is supervised:
                report(f"fitting {name}")
                calls[name] = _fit, {"name": name, **data}
        if not supervised and not set(names).isdisjoint(SUPERVISED):
            report(f"making {options['rows']} adversarial examples to train detectors on")
            for begin in range(0, options["rows"], _BATCH):
                part = slice(begin, min(begin + _BATCH, options["rows"]))
                calls[begin] = _attacked, {"clean": clean[part], "labels": labels[part], "start": begin, **options}
        keys = list(calls)
        for number, value in call_all(list(calls.values()), place=module_device(options["module"])):
            key = keys[number]
            if isinstance(key, str):
                yield key, value
            else:
                made[key] = torch.from_numpy(value)
        if made:
            data["adversarial"] = torch.cat([made[key] for key in sorted(made)]).to(clean.device)


def _fit(name: str, module: nn.Module, clean: Tensor, labels: Tensor, **given: Any) -> bytes:
    with torch.random.fork_rng(devices=[]), TemporaryDirectory() as folder:
        file = Path(folder) / name
        fit_detector(name, module, clean, labels, **given).save(file)
        return file.read_bytes()


def _attacked(module: nn.Module, clean: Tensor, labels: Tensor, *, rows: int, preset: str, **given: Any) -> Any:
    return training_adversarials(module, clean, labels, **given).cpu().numpy()


def _spread(inputs: Tensor) -> Tensor:
    return inputs.flatten(1).std(1)
