"""ART attacks and classifiers. Importing this imports no ART; using it does."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from robust_ext.adapter import AdaptedModel, Adapter, AttackListing, comes_from
from robust_ext.attacks.base import Attack
from robust_ext.errors import MissingDependencyError


class ArtAdapter(Adapter):
    """The Adversarial Robustness Toolbox 1.20 with PyTorch."""

    name = "art"

    def list_attacks(self) -> list[AttackListing]:
        """Every attack of ``art.attacks.evasion`` that can be run on images or vectors in a norm ball."""
        _require()
        from robust_ext.adapters.art.catalogue import list_attacks

        return list_attacks()

    def build_attack(self, attack: str, settings: Mapping[str, Any], *, name: str) -> Attack:
        """Make ``art.attacks.evasion.<attack>(estimator, **settings)``, with the estimator of the target."""
        _require()
        from robust_ext.adapters.art.attack import from_class
        from robust_ext.adapters.art.catalogue import find_class

        return from_class(find_class(attack), settings, name=name)

    def adapt_attack(self, attack: object, *, name: str | None = None) -> Attack | None:
        """Wrap an attack class (no settings), a tuple (attack class, settings), or an attack object.

        An object is bound to an estimator; it is made anew for each target, with the settings that differ from the
        defaults of its class.
        """
        settings: object = {}
        if isinstance(attack, tuple) and len(attack) == 2 and isinstance(attack[0], type):
            attack, settings = attack
        if not comes_from(attack, "art"):
            return None
        from robust_ext.adapters.art.attack import from_class, from_object

        if isinstance(attack, type):
            return from_class(attack, settings, name=name)
        return from_object(attack, name=name)

    def adapt_model(self, model: object) -> AdaptedModel | None:
        """Wrap a ``PyTorchClassifier``, preprocessing included."""
        if not comes_from(model, "art"):
            return None
        from robust_ext.adapters.art.model import adapt_model

        return adapt_model(model)


def _require() -> None:
    # Looked up, not imported: an import that fails for another reason should say so itself.
    if importlib.util.find_spec("art") is None:
        raise MissingDependencyError('ART is not installed; pip install "robust-ext[art]"')


ADAPTER = ArtAdapter()
