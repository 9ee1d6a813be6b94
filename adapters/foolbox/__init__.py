"""Foolbox attacks and models. Importing this imports no Foolbox; using it does."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from robust_ext.adapter import AdaptedModel, Adapter, AttackListing, comes_from
from robust_ext.attacks.base import Attack
from robust_ext.errors import MissingDependencyError


class FoolboxAdapter(Adapter):
    """Foolbox 3.3 with PyTorch."""

    name = "foolbox"

    def list_attacks(self) -> list[AttackListing]:
        """Every attack of ``foolbox.attacks`` that can be run in a norm ball, by its class name."""
        _require()
        from robust_ext.adapters.foolbox.catalogue import list_attacks

        return list_attacks()

    def build_attack(self, attack: str, settings: Mapping[str, Any], *, name: str) -> Attack:
        """Make ``foolbox.attacks.<attack>(**settings)``; aliases such as ``PGD`` are accepted."""
        _require()
        from robust_ext.adapters.foolbox.attack import from_class
        from robust_ext.adapters.foolbox.catalogue import find_class

        return from_class(find_class(attack), settings, name=name)

    def adapt_attack(self, attack: object, *, name: str | None = None) -> Attack | None:
        """Wrap an attack object, an attack class (no settings), or a tuple (attack class, settings)."""
        settings: object = {}
        if isinstance(attack, tuple) and len(attack) == 2 and isinstance(attack[0], type):
            attack, settings = attack
        if not comes_from(attack, "foolbox"):
            return None
        from robust_ext.adapters.foolbox.attack import from_class, from_object

        if isinstance(attack, type):
            return from_class(attack, settings, name=name)
        return from_object(attack, name=name)

    def adapt_model(self, model: object) -> AdaptedModel | None:
        """Wrap a Foolbox model, preprocessing included."""
        if not comes_from(model, "foolbox"):
            return None
        from robust_ext.adapters.foolbox.model import adapt_model

        return adapt_model(model)


def _require() -> None:
    # Looked up, not imported: an import that fails for another reason should say so itself.
    if importlib.util.find_spec("foolbox") is None:
        raise MissingDependencyError('Foolbox is not installed; pip install "robust-ext[foolbox]"')


ADAPTER = FoolboxAdapter()
