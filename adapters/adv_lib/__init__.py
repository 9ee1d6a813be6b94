"""Attacks of adv-lib (adversarial-library). Importing this imports no adv-lib; using it does."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from robust_ext.adapters.host import HostAdapter
from robust_ext.attacks.base import Attack
from robust_ext.core.errors import InvalidArgumentError


class AdvLibAdapter(HostAdapter):
    """Adapter of a library whose attacks are functions ``(model, inputs, labels, **settings) -> candidates``."""

    def adapt_attack(self, attack: object, *, name: str | None = None) -> Attack | None:
        """Wrap an attack function, a ``functools.partial`` of one, or a tuple of either and settings."""
        settings: object = {}
        if isinstance(attack, tuple) and len(attack) == 2:
            attack, settings = attack
        positional: tuple[Any, ...] = ()
        if isinstance(attack, functools.partial):
            settings = {**attack.keywords, **settings} if isinstance(settings, Mapping) else settings
            positional, attack = attack.args, attack.func
        # By where it was written: functools.wraps copies __module__ to functions of others.
        home = attack.__globals__.get("__name__", "") if isinstance(attack, FunctionType) else ""
        if str(home).split(".")[0] != self.name:
            return None
        if positional:
            raise InvalidArgumentError("attack", "a partial with positional arguments", "one with keyword arguments")
        adapted: Attack = self._part("attack").from_class(attack, settings, name=name)
        return adapted


ADAPTER = AdvLibAdapter("adv_lib", title="adv-lib", install="--no-deps adv-lib")
