"""Attacks that are named as code: loaded in their own process, and known here by what that process states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from robust_ext.attacks.base import Attack, AttackTraits
from robust_ext.core.errors import AttackError, InvalidArgumentError
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.registry.attack import as_attack

# Characters of a description.
_LONGEST = 20_000
Call = Callable[[Callable[[], Any]], Any]


class RemoteAttack(Attack):
    """What the judge has of an attack that it does not load; pickled, it becomes the attack itself."""

    def __init__(self, text: str, name: str, call: Call) -> None:
        stated = call(partial(_describe, text, name))
        try:
            self.name, self.traits, self.text = name, _traits(stated["traits"]), text
            self._described, self._call = str(stated["description"])[:_LONGEST], call
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidArgumentError("attack", text, f"an attack that states its traits ({error})") from error

    @property
    def description(self) -> str:
        """That of the attack."""
        return self._described

    def refusal(self, *, threat_model: ThreatModel, detector: bool = False) -> str | None:
        """That of the attack."""
        found = self._call(partial(_refusal, self.text, self.name, threat_model, detector))
        return None if found is None else str(found)[:_LONGEST]

    def search(
        self,
        target: Target,
        inputs: Tensor,
        labels: Tensor,
        *,
        threat_model: ThreatModel,
        generator: torch.Generator,
    ) -> Tensor:
        """Raise: it is run in its own process alone."""
        raise AttackError(f"{self.name}: is loaded in a process of its own, and cannot be run in this one")

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self.text, self.name)


def _traits(stated: Mapping[str, Any]) -> AttackTraits:
    """Traits of the declared types; what the attack imports is looked for in its own process, see ``_refusal``."""
    found: dict[str, Any] = {}
    for entry in fields(AttackTraits):
        value = stated[entry.name]
        value = tuple(map(str, value)) if isinstance(entry.default, tuple) else value
        if type(value) is not type(entry.default):
            raise TypeError(f"{entry.name} is a {type(value).__name__}")
        found[entry.name] = value
    return AttackTraits(**{**found, "packages": ()})


def _load(text: str, name: str) -> Attack:
    return as_attack(text, name=name)


def _describe(text: str, name: str) -> dict[str, Any]:
    made = _load(text, name)
    return {"traits": vars(made.traits), "description": made.description}


def _refusal(text: str, name: str, threat_model: ThreatModel, detector: bool) -> str | None:
    attack = _load(text, name)
    reason = attack.refusal(threat_model=threat_model, detector=detector)
    if reason is None:
        attack.check(threat_model=threat_model, detector=detector)
    return reason
