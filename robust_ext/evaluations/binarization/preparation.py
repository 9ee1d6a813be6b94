"""What a binarization test is given, made ready: attacks by name, the network in parts, and what identifies a run."""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor, nn

from robust_ext._version import __version__
from robust_ext.attacks.base import Attack
from robust_ext.attacks.resolve import as_attack
from robust_ext.errors import InvalidArgumentError
from robust_ext.features import split
from robust_ext.resolve import as_module
from robust_ext.target import Counted, PassCounter, module_device
from robust_ext.threat import ThreatModel
from robust_ext.validation import check_integer

# Enough inputs to tell two modules apart, few enough to cost nothing.
_PROBES = 4


def as_attacks(attack: object) -> dict[str, Attack]:
    """Attacks by name, of one attack, a list of attacks or a dict of them by name.

    Raises:
        InvalidArgumentError: None at all, or two of the same name.
    """
    if isinstance(attack, Mapping):
        found = [as_attack(value, name=str(key)) for key, value in attack.items()]
    elif isinstance(attack, list):
        found = [as_attack(value) for value in attack]
    else:
        found = [as_attack(attack)]
    if not found:
        raise InvalidArgumentError("attack", attack, "at least one attack")
    named = {one.name: one for one in found}
    if len(named) < len(found):
        names = [one.name for one in found]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise InvalidArgumentError(
            "attack", f"several called {', '.join(twice)}", "a dict of attacks by different names"
        )
    return named


def describe(attack: Attack) -> str:
    """An attack in words that are the same in every process: without the addresses of objects."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", attack.description)


def check_ids(sample_ids: Sequence[int] | None, count: int) -> list[int]:
    """One id of at least 0 a sample, all different; ``0 .. count - 1`` when left out."""
    if sample_ids is None:
        return list(range(count))
    ids = [check_integer("sample_ids", value, minimum=0) for value in sample_ids]
    if len(ids) != count:
        raise InvalidArgumentError("sample_ids", f"{len(ids)} ids", f"one for each of the {count} inputs")
    if len(set(ids)) < count:
        raise InvalidArgumentError("sample_ids", "an id twice", "different ids, since equal ones draw equal points")
    return ids


def counted_parts(
    model: object, inputs: Tensor, threat_model: ThreatModel, layer: str | None, counter: PassCounter
) -> tuple[Counted, nn.Module, torch.device]:
    """The network's features (counted) and readout, verified, and its device.

    Raises:
        InvalidArgumentError: The model is of no known kind, or states other bounds than the threat model.
        ModelError: It is no classifier to logits, or cannot be split.
    """
    if not len(inputs):
        raise InvalidArgumentError("inputs", "no samples", "at least one sample")
    whole: nn.Module
    module: nn.Module | tuple[nn.Module, nn.Module]
    if isinstance(model, tuple) and all(isinstance(part, nn.Module) for part in model):
        module, whole = model, nn.ModuleList(model)
    else:
        adapted = as_module(model)
        if adapted.bounds is not None and adapted.bounds != threat_model.bounds:
            raise InvalidArgumentError(
                "threat_model", f"bounds {threat_model.bounds}", f"the bounds the model states, {adapted.bounds}"
            )
        module = whole = adapted.module
    device = module_device(whole)
    parts = split(module, inputs[:_PROBES].to(device), layer=layer)
    return Counted(parts.features, counter), parts.readout, device


def model_digest(features: nn.Module, readout: nn.Module) -> str:
    """Fingerprint of a network: its weights, and what it is made of."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (features, readout):
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
