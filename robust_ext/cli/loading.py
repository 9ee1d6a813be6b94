"""Models named on the command line, and their weights; nothing is unpickled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import DataError, InvalidArgumentError
from robust_ext.core.objects import resolve_object
from robust_ext.demo.network import digits_network


def load_model(spec: str, *, weights: str | None = None, device: str | torch.device = "cpu") -> object:
    """A model from text.

    Args:
        spec: ``"digits"`` (the embedded network), or ``package.module:object`` or ``file.py:object``, where the object
            is a model, or a function without arguments that makes one; arguments may follow in parentheses.
        weights: A state dict, ``.safetensors`` or a torch file, which is read with ``weights_only``.
        device: Where a torch module is moved.

    Raises:
        InvalidArgumentError: The text leads to no model.
        DataError: The weights cannot be read, or do not fit.
    """
    made = digits_network() if spec == "digits" else resolve_object(spec, argument="--model")
    if callable(made) and not isinstance(made, nn.Module) and not _is_model(made):
        made = made()
    if weights is not None:
        if not isinstance(made, nn.Module):
            raise InvalidArgumentError("--weights", weights, "no weights for a model that is not a torch module")
        _load_weights(made, Path(weights))
    return made.to(device) if isinstance(made, nn.Module) else made


def _is_model(made: object) -> bool:
    """Whether an object is a model of a library already; functions and classes make models, and are called."""
    return not isinstance(made, type) and (hasattr(made, "bounds") or hasattr(made, "clip_values"))


def _load_weights(model: nn.Module, path: Path) -> None:
    state = _read_state(path)
    inner = state.get("state_dict", state)
    if not isinstance(inner, dict) or not all(isinstance(value, Tensor) for value in inner.values()):
        raise DataError(f"{path}: holds no state dict; save model.state_dict()")
    # DataParallel and DistributedDataParallel put this before every name.
    named = {str(key).removeprefix("module."): value for key, value in inner.items()}
    try:
        model.load_state_dict(named)
    except RuntimeError as error:
        raise DataError(f"{path}: the weights do not fit the model: {error}") from error


def _read_state(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DataError(f"{path}: no such file; --weights takes a .safetensors or torch file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(path))
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Damaged files raise almost anything, safetensors a class of its own without any other base.
        raise DataError(f"{path}: cannot be read as weights ({type(error).__name__}: {error})") from error
    return state if isinstance(state, dict) else {}
