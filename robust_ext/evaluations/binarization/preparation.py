"""What a binarization test is given, made ready: attacks by name, the network in parts, and what identifies a run."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import Attack
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.target import Counted, PassCounter, module_device
from robust_ext.core.threat import ThreatModel
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.adaptive_features import split_defense
from robust_ext.models.features import split
from robust_ext.registry.attack import as_attack
from robust_ext.registry.model import as_module

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
    probes = inputs[:_PROBES].to(device)
    if isinstance(module, AdaptiveDefense):
        parts = split_defense(module, probes, layer=layer)
    else:
        parts = split(module, probes, layer=layer)
    return Counted(parts.features, counter), parts.readout, device
