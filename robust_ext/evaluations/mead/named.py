"""Detectors by name: fitted on training data once, and kept for runs that go on and for other processes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.specification import did_you_mean
from robust_ext.core.target import module_device
from robust_ext.detectors.base import Detector
from robust_ext.engine.identity import inputs_digest, model_digest
from robust_ext.evaluations.mead.fitting import NAMED, SUPERVISED, fit_detector, load_detector
from robust_ext.evaluations.mead.training import training_adversarials


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """What named detectors are fitted on.

    Args:
        clean: Training inputs ``(N, ...)``.
        labels: Their classes, int64 ``(N,)``.
        attacked: How many of them are attacked, to train supervised detectors.
        preset: Of the detectors' constants.
        bounds: Of inputs.
        seed: Of the fits.
    """

    clean: Tensor
    labels: Tensor
    attacked: int
    preset: str
    bounds: tuple[float, float]
    seed: int

    @cached_property
    def _digest(self) -> str:
        return inputs_digest(self.clean, self.labels.tolist())

    def identity(self, module: nn.Module) -> str:
        """A few letters that differ for other data, settings or networks."""
        text = f"{model_digest(module, nn.Module())} {self._digest} {self.attacked} {self.preset} {self.seed}"
        return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()


def find_detectors(
    names: Sequence[str],
    module: nn.Module,
    data: TrainingData,
    *,
    folder: Path | None,
    say: Callable[[str], None],
) -> dict[str, object]:
    """Detectors by name: those of :data:`NAMED` fitted, others as they were named.

    Args:
        names: Of detectors, or of objects.
        module: The classifier.
        data: What they are fitted on.
        folder: Where fitted detectors are kept; None keeps none.
        say: Told what takes time.

    Raises:
        InvalidArgumentError: A name is none.
    """
    found: dict[str, object] = {}
    adversarial: Tensor | None = None
    for name in names:
        if name not in NAMED:
            if ":" not in name:
                expected = f"one of {', '.join(NAMED)}, package.module:object or file.py:object"
                raise InvalidArgumentError("detector", name, expected + did_you_mean(name, NAMED))
            found[name] = name
            continue
        file = None if folder is None else folder / f"{name}-{data.identity(module)}.safetensors"
        if file is not None and file.exists():
            found[name] = load_detector(name, file, module)
            continue
        if name in SUPERVISED and adversarial is None:
            say(f"making {data.attacked} adversarial examples to train detectors on")
            few = slice(0, data.attacked)
            adversarial = training_adversarials(
                module, data.clean[few], data.labels[few], bounds=data.bounds, seed=data.seed
            )
        say(f"fitting {name}")
        fitted = _fit(name, module, data, adversarial)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            fitted.save(file)
        found[name] = fitted
    return found


def _fit(name: str, module: nn.Module, data: TrainingData, adversarial: Tensor | None) -> Detector:
    with torch.random.fork_rng(devices=[]):
        return fit_detector(
            name,
            module,
            data.clean,
            data.labels,
            preset=data.preset,
            adversarial=adversarial if name in SUPERVISED else None,
            rows=data.attacked,
            bounds=data.bounds,
            seed=data.seed,
        ).to(module_device(module))
