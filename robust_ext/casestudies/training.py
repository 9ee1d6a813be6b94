"""The data of case studies, and trained defenses in run folders."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from robust_ext.casestudies.base import CaseStudy, M
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.files import make_folder
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.detectors.base import Detector
from robust_ext.engine.code_digest import module_code
from robust_ext.evaluations.detectors import calibrate_detector

# Clean test inputs to calibrate detectors on, in addition to the samples, and the share of them that is detected.
_CALIBRATION, _RATE = 300, 0.05


@dataclass(frozen=True, kw_only=True)
class CaseData:
    """Images and labels of a dataset, float32 ``(N, ...)`` in [0, 1] and int64 ``(N,)``."""

    name: str
    train_inputs: Tensor
    train_labels: Tensor
    inputs: Tensor
    labels: Tensor
    ids: list[int]
    calibration: Tensor  # Clean inputs that are neither trained on nor attacked


def load_case_data(name: str, *, root: str | os.PathLike[str] | None, samples: int, images: int, seed: int) -> CaseData:
    """Load training images, test samples and others to calibrate on, the first ones in the seed's order.

    Raises InvalidArgumentError if the test images are too few for the samples.
    """
    train, test = (load_dataset(name, root=root, split=split) for split in ("train", "test"))
    count = min(samples + _CALIBRATION, len(test))
    if count <= samples:
        raise InvalidArgumentError("samples", samples, f"less than the {len(test)} test images of {name}")
    rows = test.choose(count, seed=seed)
    inputs, labels = test.take(rows)
    train_inputs, train_labels = train.take(train.choose(min(images, len(train)), seed=seed))
    return CaseData(
        name=name,
        train_inputs=train_inputs,
        train_labels=train_labels,
        inputs=inputs[:samples],
        labels=labels[:samples],
        ids=[int(row) for row in rows[:samples]],
        calibration=inputs[samples:],
    )


def trained_defense(study: CaseStudy[M], data: CaseData, *, seed: int, folder: Path | None) -> M:
    """Load the defense from ``weights.safetensors`` in a folder, or train it and save it there; return it in eval mode.

    Saved weights are used only if the same code trained them on the same images with the same seed.
    """
    if folder is None:
        return study.trained(data.train_inputs, data.train_labels, seed=seed)
    file = folder / "weights.safetensors"
    module = study.build(tuple(data.train_inputs.shape[1:]), int(data.train_labels.max()) + 1).eval()
    about = {
        "study": study.title,
        "data": data.name,
        "images": str(len(data.train_inputs)),
        "seed": str(seed),
        "code": json.dumps(module_code(module), sort_keys=True),
        "torch": torch.__version__,
    }
    if file.exists():
        with safe_open(str(file), framework="pt") as kept:
            if kept.metadata() == about:
                module.load_state_dict({name: kept.get_tensor(name) for name in kept.keys()})  # noqa: SIM118
                return module
    module = study.trained(data.train_inputs, data.train_labels, seed=seed)
    make_folder(folder)
    draft = file.with_suffix(".draft")
    save_file({name: tensor.contiguous().clone() for name, tensor in module.state_dict().items()}, draft, about)
    draft.replace(file)
    return module


def fitted_detector(
    study: CaseStudy[M], module: M, data: CaseData, threat_model: ThreatModel, *, seed: int
) -> Detector | None:
    """Fit the detector of a trained defense and calibrate it; None if the defense has none."""
    with seeded_globals(derive_seed(seed, study.title, "detector")):
        detector = study.detector(module, data.train_inputs, data.train_labels, seed=seed)
    if detector is not None:
        bounds = threat_model.bounds
        calibrate_detector(detector, data.calibration, false_positive_rate=_RATE, bounds=bounds, seed=seed)
    return detector
