"""Trained parts of the named defenses, read from their files and tried on the classifier they are for."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from robust_ext.core.errors import DataError, InvalidArgumentError, ModelError
from robust_ext.core.target import module_device
from robust_ext.defenses.discriminator import Discriminator
from robust_ext.defenses.parts import load_part
from robust_ext.defenses.training_contrastive import ContrastiveEncoder, ContrastiveHead
from robust_ext.defenses.training_pca import Projections, edited_inputs
from robust_ext.defenses.training_score import ScoreNetwork
from robust_ext.defenses.training_sodef import StableHead
from robust_ext.detectors.observation import observe
from robust_ext.models.features import split

File = str | os.PathLike[str]
Part = TypeVar("Part", bound=nn.Module)


def load_for_imf(file: File, classifier: nn.Module, inputs: Tensor) -> dict[str, Any]:
    """The discriminator of the classifier's logits."""
    judge = _read(Discriminator.load, file, classifier)
    if judge.layers:
        raise InvalidArgumentError("weights", f"{file}, a discriminator of layers", "one of logits, trained for imf")
    _tried(file, lambda: judge(classifier(inputs)))
    return {"discriminator": judge}


def load_for_aid(file: File, classifier: nn.Module, inputs: Tensor) -> dict[str, Any]:
    """The discriminator of some layers of the classifier."""
    judge = _read(Discriminator.load, file, classifier)
    if not judge.layers:
        raise InvalidArgumentError("weights", f"{file}, a discriminator of logits", "one of layers, trained for aid")
    _tried(file, lambda: judge(*(observe(classifier, inputs, judge.layers).layers[name] for name in judge.layers)))
    return {"discriminator": judge}


def load_for_sodef(file: File, classifier: nn.Module, inputs: Tensor) -> dict[str, Any]:
    """The features of the classifier, and the head on them."""
    head = _read(partial(load_part, StableHead), file, classifier)
    features = split(classifier, inputs).features
    found = _tried(file, lambda: head.readout(head.reduce(features(inputs))))
    with torch.no_grad():
        classes = classifier(inputs).shape[1]
    if found.shape[1] != classes:
        raise InvalidArgumentError("weights", f"{file}, a head of {found.shape[1]} classes", f"one of {classes}")
    return {"features": features, "head": head}


def load_for_clc(file: File, classifier: nn.Module, inputs: Tensor) -> dict[str, Any]:
    """The projections of the classifier's activations."""
    projections = _read(partial(load_part, Projections), file, classifier)

    def seen(number: int, value: Tensor) -> Tensor:
        projections.off_plane(number, value, own_mean=False)
        return value

    def run() -> Tensor:
        with edited_inputs(classifier, projections.layers, seen):
            out: Tensor = classifier(inputs)
        return out

    _tried(file, run)
    return {"projections": projections}


def load_for_reverse(file: File, classifier: nn.Module, inputs: Tensor) -> dict[str, Any]:
    """The contrastive encoder on the classifier's features, and the views that it was trained on."""
    head = _read(partial(load_part, ContrastiveHead), file, classifier)
    encoder = ContrastiveEncoder(split(classifier, inputs).features, head)
    _tried(file, lambda: encoder(inputs))
    return {"encoder": encoder, "augment": head.views}


def load_for_adp(file: File, classifier: nn.Module, inputs: Tensor) -> dict[str, Any]:
    """The score network."""
    score = _read(partial(load_part, ScoreNetwork), file, classifier)
    _tried(file, lambda: score(inputs))
    return {"score": score}


def _read(load: Callable[[File], Part], file: File, classifier: nn.Module) -> Part:
    if not Path(file).is_file():
        raise DataError(f"{file}: no such file; examples/train_defense.py writes files of trained parts")
    return load(file).to(module_device(classifier))


def _tried(file: File, run: Callable[[], Tensor]) -> Tensor:
    """What parts say on a few inputs; parts of another classifier cannot be run on them."""
    try:
        with torch.no_grad():
            return run()
    except (RuntimeError, ModelError, InvalidArgumentError) as error:
        raise InvalidArgumentError(
            "weights", f"{file}, which does not fit ({error})", "parts that were trained for this classifier"
        ) from error
