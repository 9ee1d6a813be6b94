"""The model of a command: by name or from a file, with its weights and normalisation, in eval mode."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from robust_ext.core.errors import DataError, InvalidArgumentError, printable
from robust_ext.core.foreign import foreign_code
from robust_ext.core.objects import resolve_object
from robust_ext.core.specification import check_keywords
from robust_ext.datasets.base import reading
from robust_ext.demo.network import digits_network
from robust_ext.models.forms import evaluable
from robust_ext.models.wrapping import Normalized, unwrapped
from robust_ext.registry.base import Adapter, adapters
from robust_ext.registry.model import as_module

logger = logging.getLogger(__name__)

# Under which checkpoints store the state dict, next to other things.
_ENTRIES = ("state_dict", "model_state_dict", "model", "net")


@dataclass(frozen=True)
class LoadedModel:
    """A model, with the bounds and the input shape ``(C, H, W)`` that its library declares, if any."""

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
    """Load a model as it is written on the command line; a torch module is in eval mode and on the device.

    Args:
        spec: ``digits`` (the embedded network), a model of a library as in ``timm:resnet18(num_classes=10)``, or
            ``file.py:object`` or ``package.module:object``: a model or a function that makes one, whose arguments may
            follow in parentheses.
        weights: A state dict in ``.safetensors`` or a torch file, which is read with ``weights_only``.
        mean: Normalisation of the inputs, with ``std``; replaces that of a library.
        std: See ``mean``.
        device: Of the model.
    """
    found = _made(spec)
    if not isinstance(found.model, nn.Module):
        for option, given in (("--weights", weights), ("--mean", mean), ("--std", std)):
            if given is not None:
                raise InvalidArgumentError(option, given, "none for a model that is not a torch module")
        return found
    # The results of torch.compile and torch.export take neither weights nor modes.
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


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a state dict from a ``.safetensors`` or torch file into a model, without running code of the file.

    If all names fit after one prefix (``module.``, ``model.``) is exchanged for another, the weights are loaded and
    this is logged. Counters of batch normalisation may be missing, as torch allows.

    Raises:
        DataError: The file cannot be read or holds no state dict, or its names or shapes are not those of the model;
            the text names the prefix with which most names fit.
    """
    state, wanted = _state_dict(path), set(model.state_dict())
    pairs = [(off, on) for off in _prefixes(state) for on in _prefixes(wanted)]
    off, on = max(pairs, key=lambda pair: len(_renamed(state, *pair).keys() & wanted))
    renamed = _renamed(state, off, on)
    missing, unexpected = wanted - renamed.keys(), renamed.keys() - wanted
    counters = all(name.rpartition(".")[2] == "num_batches_tracked" for name in missing)
    if unexpected or not counters or not all(name.startswith(off) for name in state):
        text = f"{len(missing)} names missing{_some(missing)} and {len(unexpected)} unexpected{_some(unexpected)}"
        if off or on:
            how = [f"without the prefix {off!r}"] * bool(off) + [f"with the prefix {on!r}"] * bool(on)
            fitting = len(renamed) - len(unexpected)
            text = f"{' and '.join(how)}, {fitting} of its {len(state)} names are the model's, which leaves {text}"
        text += "; rename them in the file, or give the model that it was saved from"
        raise DataError(printable(f"{path}: the weights do not fit the model: {text}"))
    if off or on:
        done = [f"{off!r} was taken off"] * bool(off) + [f"{on!r} was put before"] * bool(on)
        logger.warning("--weights: %s", printable(f"{' and '.join(done)} all {len(wanted)} names in {path}"))
    try:
        model.load_state_dict(renamed)
    except RuntimeError as error:
        raise DataError(f"{path}: the weights do not fit the model: {error}") from error


def _prefixes(names: Collection[str]) -> list[str]:
    """Return the empty prefix and those of the most deeply nested name, each with its dot."""
    parts = max(names, key=lambda name: name.count("."), default="").split(".")[:-1]
    return ["", *(".".join(parts[: count + 1]) + "." for count in range(len(parts)))]


def _renamed(state: Mapping[str, Tensor], off: str, on: str) -> dict[str, Tensor]:
    return {on + name.removeprefix(off): value for name, value in state.items()}


def _some(names: Collection[str]) -> str:
    shown = sorted(names)[:3]
    return f" ({', '.join(shown)}{', ...' if len(names) > len(shown) else ''})" if shown else ""


def _state_dict(path: Path) -> dict[str, Tensor]:
    with reading(path):
        if not path.is_file():
            raise DataError(f"{path}: no such file; --weights takes a .safetensors or torch file")
    try:
        state: Any = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except Exception as error:
        # Damaged files raise almost anything, and safetensors an exception without a common base class.
        raise DataError(f"{path}: cannot be read as weights ({type(error).__name__}: {error})") from error
    state = state if isinstance(state, Mapping) else {}
    inner = next((state[entry] for entry in _ENTRIES if isinstance(state.get(entry), Mapping)), state)
    if not inner or not all(isinstance(value, Tensor) for value in inner.values()):
        raise DataError(f"{path}: holds no state dict; save model.state_dict()")
    return {str(name): value for name, value in inner.items()}
