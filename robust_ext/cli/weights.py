"""State dicts from files, read without running what they hold; where only a prefix of the names differs, they fit."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import DataError
from robust_ext.core.printable import printable
from robust_ext.datasets.files import reading

logger = logging.getLogger(__name__)

# Under which checkpoints keep the state dict beside other things.
_ENTRIES = ("state_dict", "model_state_dict", "model", "net")


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a state dict from a ``.safetensors`` or torch file into a model.

    One prefix of all names (``module.``, ``model.``) is taken off, or put on, where all then fit; this is logged.

    Raises:
        DataError: The file cannot be read or holds no state dict, or its names or shapes are not those of the model;
            the text states the prefix by which most of the names differ.
    """
    state, wanted = _state_dict(path), list(model.state_dict())
    found = next(
        ((off, on) for off in _shared(state) for on in _shared(wanted) if _fit(_renamed(state, off, on), wanted)),
        None,
    )
    if found is None:
        raise DataError(printable(f"{path}: the weights do not fit the model: {_difference(state, wanted)}"))
    off, on = found
    if off or on:
        done = [f"{off!r} was taken off"] * bool(off) + [f"{on!r} was put before"] * bool(on)
        logger.warning("--weights: %s", printable(f"{' and '.join(done)} all {len(wanted)} names in {path}"))
    try:
        model.load_state_dict(_renamed(state, off, on))
    except RuntimeError as error:
        raise DataError(f"{path}: the weights do not fit the model: {error}") from error


def _fit(state: Collection[str], wanted: Collection[str]) -> bool:
    """Whether torch loads these names: counters of batch normalisation may be missing, as they once were."""
    counted = {name for name in wanted if name.rpartition(".")[2] == "num_batches_tracked"}
    return set(wanted) - counted <= set(state) <= set(wanted)


def _difference(state: Mapping[str, Tensor], wanted: Collection[str]) -> str:
    """What is missing and what is there in its place, and by which prefix most of the names differ."""

    def fitting(pair: tuple[str, str]) -> int:
        return len(_renamed(state, *pair).keys() & set(wanted))

    pairs = [("", "")]
    pairs += [(off, on) for off in _first(state) for on in _first(wanted) if bool(off) != bool(on)]
    best = max(pairs, key=fitting)
    renamed = _renamed(state, *best)
    missing, unexpected = set(wanted) - renamed.keys(), renamed.keys() - set(wanted)
    text = f"{len(missing)} names missing{_some(missing)} and {len(unexpected)} unexpected{_some(unexpected)}"
    if best != ("", ""):
        how = f"without the prefix {best[0]!r}" if best[0] else f"with the prefix {best[1]!r}"
        text = f"{how}, {fitting(best)} of its {len(state)} names are the model's, which leaves {text}"
    return f"{text}; rename them in the file, or give the model that it was saved from"


def _some(names: Collection[str]) -> str:
    shown = sorted(names)[:3]
    return f" ({', '.join(shown)}{', ...' if len(names) > len(shown) else ''})" if shown else ""


def _shared(names: Collection[str]) -> list[str]:
    """The empty prefix, and those with a dot at their end that all names have, shorter ones first."""
    parts = min(names, key=len, default="").split(".")[:-1]
    prefixes = [".".join(parts[: count + 1]) + "." for count in range(len(parts))]
    return ["", *(prefix for prefix in prefixes if all(name.startswith(prefix) for name in names))]


def _first(names: Collection[str]) -> list[str]:
    """The empty prefix, and the first one of each name."""
    return ["", *dict.fromkeys(name.partition(".")[0] + "." for name in names if "." in name)]


def _renamed(state: Mapping[str, Tensor], off: str, on: str) -> dict[str, Tensor]:
    return {on + name.removeprefix(off): value for name, value in state.items()}


def _state_dict(path: Path) -> dict[str, Tensor]:
    state = _read(path)
    inner = next((state[entry] for entry in _ENTRIES if isinstance(state.get(entry), Mapping)), state)
    if not inner or not all(isinstance(value, Tensor) for value in inner.values()):
        raise DataError(f"{path}: holds no state dict; save model.state_dict()")
    return {str(name): value for name, value in inner.items()}


def _read(path: Path) -> Mapping[str, Any]:
    with reading(path):
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
    return state if isinstance(state, Mapping) else {}
