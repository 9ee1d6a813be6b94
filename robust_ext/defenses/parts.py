"""Trained parts of defenses in safetensors files: sizes as text, weights as tensors, nothing pickled."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import nn

from robust_ext.core.errors import DataError, InvalidArgumentError
from robust_ext.core.files import replace_file
from robust_ext.defenses.training_contrastive import ContrastiveHead
from robust_ext.defenses.training_pca import Projections
from robust_ext.defenses.training_score import ScoreNetwork
from robust_ext.defenses.training_sodef import StableHead
from robust_ext.defenses.training_views import RandomViews

_KEY = "defense_part"

Part = TypeVar("Part", bound=nn.Module)


@dataclass(frozen=True)
class _Form:
    """How a part is described, and made again.

    Args:
        settings: From the part to what :attr:`make` takes, JSON values.
        make: An untrained part of the same sizes.
    """

    settings: Callable[[Any], dict[str, Any]]
    make: Callable[..., nn.Module]


def _head_settings(head: StableHead) -> dict[str, Any]:
    return {
        "features": head.reduce.in_features,
        "classes": head.readout.out_features,
        "dimension": head.reduce.out_features,
        "hidden": head.field.layers[0].out_features,
    }


def _projection_settings(projections: Projections) -> dict[str, Any]:
    count = len(projections.layers)
    return {"layers": list(projections.layers), "shapes": [list(projections.basis(n).shape) for n in range(count)]}


def _empty_projections(layers: list[str], shapes: list[tuple[int, int]]) -> Projections:
    return Projections(layers, [torch.zeros(*shape) for shape in shapes], [torch.zeros(shape[0]) for shape in shapes])


def _score_settings(network: ScoreNetwork) -> dict[str, Any]:
    convolutions = [layer for layer in network.layers if isinstance(layer, nn.Conv2d)]
    first = convolutions[0]
    return {
        "channels": first.in_channels,
        "width": first.out_channels,
        "depth": len(convolutions) - 1,
        "noise": network.noise,
    }


def _contrastive_settings(head: ContrastiveHead) -> dict[str, Any]:
    first, last = head.get_submodule("layers.0"), head.get_submodule("layers.3")
    return {
        "features": first.in_features,
        "width": first.out_features,
        "dimension": last.out_features,
        "views": {name: getattr(head.views, name) for name in ("area", "flip", "jitter", "grey", "shared")},
    }


def _empty_contrastive(*, features: int, width: int, dimension: int, views: dict[str, Any]) -> ContrastiveHead:
    return ContrastiveHead(features, width=width, dimension=dimension, views=RandomViews(**views))


_FORMS: Mapping[type[nn.Module], _Form] = {
    StableHead: _Form(_head_settings, StableHead),
    Projections: _Form(_projection_settings, _empty_projections),
    ContrastiveHead: _Form(_contrastive_settings, _empty_contrastive),
    ScoreNetwork: _Form(_score_settings, ScoreNetwork),
}


def save_part(part: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write sizes and weights of a trained part to a safetensors file.

    Args:
        part: A :class:`StableHead`, :class:`Projections`, :class:`ContrastiveHead` or :class:`ScoreNetwork`. A
            :class:`~robust_ext.defenses.discriminator.Discriminator` has a ``save`` of its own.
        path: The file; its folder exists.

    Raises:
        InvalidArgumentError: It is none of these.
    """
    form = _FORMS.get(type(part))
    if form is None:
        names = ", ".join(kind.__name__ for kind in _FORMS)
        raise InvalidArgumentError("part", type(part).__name__, f"one of {names}")
    about = {"kind": type(part).__name__, "settings": form.settings(part)}
    state = {name: value.contiguous() for name, value in part.state_dict().items()}
    replace_file(Path(path), safetensors.torch.save(state, metadata={_KEY: json.dumps(about)}))


def load_part(kind: type[Part], path: str | os.PathLike[str]) -> Part:
    """Read what :func:`save_part` wrote; on the CPU, in eval mode, without gradients of its parameters.

    Args:
        kind: What it has to be.
        path: The file.

    Raises:
        DataError: The file cannot be read, or holds something else.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})[_KEY])
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if about["kind"] != kind.__name__:
            raise ValueError(f"it holds a {about['kind']}")
        part = _FORMS[kind].make(**about["settings"])
        part.load_state_dict(state)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, safetensors.SafetensorError) as error:
        raise DataError(f"{path}: no file of a {kind.__name__} written by save_part ({error})") from error
    assert isinstance(part, kind)
    return part.eval().requires_grad_(False)
