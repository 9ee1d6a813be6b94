"""Detectors by name: fitted on training data once, and kept for runs that go on and for other processes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from robust_ext.core.errors import DataError, InvalidArgumentError
from robust_ext.core.files import make_folder, remove_drafts
from robust_ext.core.specification import did_you_mean
from robust_ext.core.target import module_device
from robust_ext.engine.code_digest import code_digest, module_code
from robust_ext.engine.identity import inputs_digest, model_digest
from robust_ext.evaluations.mead.fitting import NAMED, SUPERVISED, fit_detector, load_detector
from robust_ext.evaluations.mead.training import training_adversarials


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

    Supervised ones learn from the first ``attacked`` inputs. Fitted ones are kept in the folder and read from it, and
    fitted again there where they are damaged and ``repair`` is true. ``report`` is called with a line before each step
    that takes time. Without ``fit`` nothing is fitted or written, and a score that means nothing stands for what is not
    there yet.
    """
    if folder is not None and folder.is_dir() and fit:
        remove_drafts(folder)
    found: dict[str, object] = {}
    few, adversarial = slice(0, attacked), None
    network = f"{model_digest(module)} {code_digest(module_code(module))}"
    words = f"{network} {inputs_digest(clean, labels.tolist())} {attacked} {preset} {seed}"
    # A few letters that differ for other data, settings or networks.
    identity = hashlib.blake2b(words.encode(), digest_size=5).hexdigest()
    for name in names:
        if name not in NAMED:
            found[name] = _location(name)
            continue
        file = None if folder is None else folder / f"{name}-{identity}.safetensors"
        if file is not None and file.exists():
            try:
                found[name] = load_detector(name, file, module)
                continue
            except DataError as error:
                if not repair:
                    raise DataError(f"{error}, or run the same command with --repair") from error
        if not fit:
            found[name] = _spread
            continue
        if name in SUPERVISED and adversarial is None:
            report(f"making {attacked} adversarial examples to train detectors on")
            adversarial = training_adversarials(module, clean[few], labels[few], bounds=bounds, seed=seed)
        report(f"fitting {name}")
        given = {"adversarial": adversarial} if name in SUPERVISED else {}
        with torch.random.fork_rng(devices=[]):
            fitted = fit_detector(
                name, module, clean, labels, preset=preset, rows=attacked, bounds=bounds, seed=seed, **given
            ).to(module_device(module))
        if file is not None:
            make_folder(file.parent)
            fitted.save(file)
        found[name] = fitted
    return found


def _location(name: str) -> str:
    """A name that states where a detector is."""
    if ":" not in name:
        expected = f"one of {', '.join(NAMED)}, package.module:object or file.py:object"
        raise InvalidArgumentError("detector", name, expected + did_you_mean(name, NAMED))
    return name


def _spread(inputs: Tensor) -> Tensor:
    return inputs.flatten(1).std(1)
