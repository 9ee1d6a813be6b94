"""The identity of a run: its attacks as text, its samples, networks and versions."""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext._version import __version__
from robust_ext.attacks.base import Attack
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.reached import is_library
from robust_ext.core.validation import check_integer
from robust_ext.models.adaptive import AdaptiveDefense

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_PACKAGES = (
    *("torch", "numpy", "foolbox", "adversarial-robustness-toolbox", "torchattacks", "adv-lib"),
    *("torchvision", "timm", "transformers", "robustbench"),
)
# Attributes of any module.
_TORCHS = set(vars(nn.Module()))
# Where a defense stands, not what it does.
_STATE = ("draw", "fixed")


def describe(attack: Attack) -> str:
    """An attack as text that is the same in every process: without the addresses of objects."""
    return _ADDRESS.sub("", attack.description)


def check_ids(sample_ids: Sequence[int] | None, count: int) -> list[int]:
    """One id of at least 0 a sample, all different; ``0 .. count - 1`` when left out."""
    if sample_ids is None:
        return list(range(count))
    listed = all(hasattr(sample_ids, name) for name in ("__len__", "__getitem__"))
    if not listed or isinstance(sample_ids, (str, bytes, Mapping)) or getattr(sample_ids, "ndim", 1) != 1:
        raise InvalidArgumentError("sample_ids", type(sample_ids).__name__, "a list of integers")
    ids = [check_integer("sample_ids", value, minimum=0, maximum=2**63 - 1) for value in sample_ids]
    if len(ids) != count:
        raise InvalidArgumentError("sample_ids", f"{len(ids)} ids", f"one for each of the {count} inputs")
    if len(set(ids)) < count:
        raise InvalidArgumentError("sample_ids", "an id twice", "different ids, since equal ones draw equal points")
    return ids


def model_digest(*parts: nn.Module) -> str:
    """Fingerprint of a network, or of its parts: weights, buffers, what it is made of, and plain attributes."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(_ADDRESS.sub("", str(part)).encode())
        # Buffers that are not kept with the weights count as well.
        for name, tensor in {**part.state_dict(), **dict(part.named_buffers())}.items():
            digest.update(name.encode())
            digest.update(_state_bytes(tensor))
        digest.update(repr(sorted(plain_settings(part).items())).encode())
    return digest.hexdigest()


def plain_settings(module: nn.Module, *, besides: nn.Module | None = None) -> dict[str, Any]:
    """Return plain settings of a module and its parts by name: numbers, texts, and tuples or lists of them.

    Those of ``besides``, a part of it, are left out.
    """
    return {
        f"{prefix}.{name}" if prefix else name: list(value) if isinstance(value, tuple) else value
        for prefix, part in module.named_modules()
        if part is not besides
        for name, value in attributes(part)
        if is_plain(value)
    }


def attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Attributes of a module besides parameters, buffers, modules and hooks; of installed packages', public ones."""
    private = not is_library(type(module))
    passing = _STATE if isinstance(module, AdaptiveDefense) else ()
    for name, value in list(vars(module).items()):
        if name not in _TORCHS and name not in passing and (private or not name.startswith("_")):
            yield name, value


def is_plain(value: object) -> bool:
    """Return whether a value is a number, a text, None, or a tuple or list of such."""
    if isinstance(value, (tuple, list)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def tensor_bytes(tensor: Tensor) -> bytes:
    """The values of a tensor of any layout."""
    if tensor.is_meta:
        return repr(tensor).encode()
    tensor = tensor.detach().dequantize() if tensor.is_quantized else tensor.detach()
    return tensor.to_dense().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _state_bytes(value: Any) -> bytes:
    """An entry of a state dict; quantized modules have some that are no tensors."""
    if isinstance(value, (tuple, list)):
        return b"".join(map(_state_bytes, value))
    return tensor_bytes(value) if isinstance(value, Tensor) else _ADDRESS.sub("", repr(value)).encode()


def inputs_digest(inputs: Tensor, samples: Sequence[int]) -> str:
    """Fingerprint of inputs ``(N, ...)`` and their ids."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{tuple(inputs.shape)} {list(samples)}".encode())
    digest.update(inputs.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
    installed = {package: found for package in _PACKAGES if (found := _version(package)) is not None}
    return {"robust_ext": __version__, "python": platform.python_version(), **installed}


@cache
def _version(package: str) -> str | None:
    """Return the installed version, read once: every run folder records it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
