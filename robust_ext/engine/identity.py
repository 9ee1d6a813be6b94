"""What identifies a run: its attacks in words, its samples, networks and versions."""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor, nn

from robust_ext._version import __version__
from robust_ext.attacks.base import Attack
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.validation import check_integer


def describe(attack: Attack) -> str:
    """An attack in words that are the same in every process: without the addresses of objects."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", attack.description)


def check_ids(sample_ids: Sequence[int] | None, count: int) -> list[int]:
    """One id of at least 0 a sample, all different; ``0 .. count - 1`` when left out."""
    if sample_ids is None:
        return list(range(count))
    listed = all(hasattr(sample_ids, name) for name in ("__len__", "__getitem__"))
    if not listed or isinstance(sample_ids, str) or getattr(sample_ids, "ndim", 1) != 1:
        raise InvalidArgumentError("sample_ids", type(sample_ids).__name__, "a list of integers")
    ids = [check_integer("sample_ids", value, minimum=0, maximum=2**63 - 1) for value in sample_ids]
    if len(ids) != count:
        raise InvalidArgumentError("sample_ids", f"{len(ids)} ids", f"one for each of the {count} inputs")
    if len(set(ids)) < count:
        raise InvalidArgumentError("sample_ids", "an id twice", "different ids, since equal ones draw equal points")
    return ids


def model_digest(*parts: nn.Module) -> str:
    """Fingerprint of a network, or of its parts: weights, and what it is made of."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(str(part).encode())
        for name, tensor in part.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def inputs_digest(inputs: Tensor, samples: Sequence[int]) -> str:
    """Fingerprint of inputs ``(N, ...)`` and their ids."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{tuple(inputs.shape)} {list(samples)}".encode())
    digest.update(inputs.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
    found = {"robust_ext": __version__, "python": platform.python_version()}
    for package in ("torch", "numpy", "foolbox", "adversarial-robustness-toolbox"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
