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

    def build_attack(self, attack: str, settings: Mapping[str, Any], *, name: str) -> Attack:
        """Make the attack of that function's name, with these settings."""
        self._require()
        function = self._part("catalogue").find_function(attack)
        built: Attack = self._part("attack").from_function(function, settings, name=name)
        return built

    def adapt_attack(self, attack: object, *, name: str | None = None) -> Attack | None:
        """Wrap an attack function, a ``functools.partial`` of one, or a tuple of either and settings."""
        settings: object = {}
        if isinstance(attack, tuple) and len(attack) == 2:
            attack, settings = attack
        fixed: Mapping[str, Any] = {}
        if isinstance(attack, functools.partial):
            positional, fixed, attack = attack.args, attack.keywords, attack.func
        else:
            positional = ()
        if not self._is_own(attack):
            return None
        if positional:
            raise InvalidArgumentError("attack", "a partial with positional arguments", "one with keyword arguments")
        if not isinstance(settings, Mapping):
            kind = type(settings).__name__
            raise InvalidArgumentError("attack", f"settings of type {kind}", "a dict of keyword arguments")
        adapted: Attack = self._part("attack").from_function(attack, {**fixed, **settings}, name=name)
        return adapted

    def _is_own(self, attack: object) -> bool:
        # By where it was written: functools.wraps copies __module__ to functions of others.
        home = attack.__globals__.get("__name__", "") if isinstance(attack, FunctionType) else ""
        return str(home).split(".")[0] == self.package


ADAPTER = AdvLibAdapter(name="adv_lib", title="adv-lib", package="adv_lib", install="--no-deps adv-lib")
