"""The model of a command: by name or from a file, with its weights and normalisation, in eval mode."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from robust_ext.cli.weights import load_weights
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.foreign import foreign_code
from robust_ext.core.objects import resolve_object
from robust_ext.core.specification import check_keywords
from robust_ext.demo.network import digits_network
from robust_ext.models.compiled import evaluable
from robust_ext.models.normalized import Normalized
from robust_ext.models.wrapping import unwrapped
from robust_ext.registry.base import Adapter, adapters
from robust_ext.registry.model import as_module

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model, with the bounds and the shape of an input ``(C, H, W)`` that its library states, or None."""

    model: object
    bounds: tuple[float, float] | None = None
    input_shape: tuple[int, ...] | None = None


def load_model(
    spec: str,
    *,
    weights: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    device: str | torch.device = "cpu",
) -> LoadedModel:
    """A model as it is written on the command line; a torch module is in eval mode and on the device.

    Args:
        spec: ``digits`` (the embedded network), a model of a library as in ``timm:resnet18(num_classes=10)``, or what
            ``file.py:object`` or ``package.module:object`` names: a model or a function that makes one, whose
            arguments may follow in parentheses.
        weights: A state dict in ``.safetensors`` or a torch file, which is read with ``weights_only``.
        mean: Inputs are normalised by it and ``std``, instead of by what a library states.
        std: See ``mean``.
        device: Where it is moved to.
    """
    found = _made(spec)
    if not isinstance(found.model, nn.Module):
        for option, given in (("--weights", weights), ("--mean", mean), ("--std", std)):
            if given is not None:
                raise InvalidArgumentError(option, given, "none for a model that is not a torch module")
        return found
    # Without what torch.compile and torch.export made, which take neither weights nor modes.
    module = evaluable(found.model)
    if weights is not None:
        load_weights(unwrapped(module), Path(weights))
    if (mean is None) != (std is None):
        raise InvalidArgumentError("--mean" if std is None else "--std", mean or std, "both --mean and --std, or none")
    if mean is not None and std is not None:
        module = Normalized(module.module if isinstance(module, Normalized) else module, mean=mean, std=std)
    if any(part.training for part in module.modules()):
        logger.warning("--model: %s was in train mode; it is put into eval mode", spec)
    with foreign_code("--model", f"moving {spec} to {device}", hint="name a device that holds it, --device cpu"):
        return LoadedModel(module.eval().to(device), found.bounds, found.input_shape)


def _made(spec: str) -> LoadedModel:
    if spec == "digits":
        return LoadedModel(digits_network())
    library = adapters().get(spec.partition(":")[0].strip())
    if library is not None and type(library).build_model is not Adapter.build_model:
        named = as_module(spec, argument="--model")
        return LoadedModel(named.module, named.bounds, named.input_shape)
    made = resolve_object(spec, argument="--model")
    # A model of a library may be callable too; functions and classes make models.
    ready = not isinstance(made, type) and (hasattr(made, "bounds") or hasattr(made, "clip_values"))
    if callable(made) and not isinstance(made, nn.Module) and not ready:
        check_keywords(made, {}, argument="--model", label=spec)
        with foreign_code("--model", f"{spec}()", hint="a function that makes a model is called without arguments"):
            made = made()
    return LoadedModel(made)
