"""Adapters whose parts are modules of their own, imported only when the library is used."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from robust_ext.attacks.base import Attack, broken_package
from robust_ext.attacks.native import NativeAttack
from robust_ext.core.errors import MissingDependencyError
from robust_ext.registry.base import AdaptedModel, Adapter, AttackListing, comes_from

if TYPE_CHECKING:
    from torch import nn

    from robust_ext.detectors.base import Detector


class LibraryAdapter(Adapter):
    """Adapter of a library by modules of ``robust_ext.adapters.<name>``.

    ``package`` is the package to import, ``install`` the argument of ``pip install``.
    """

    def __init__(self, *, name: str, title: str, package: str, install: str) -> None:
        self.name = name
        self.title = title
        self.package = package
        self.install = install

    def _has(self, module: str) -> bool:
        return importlib.util.find_spec(f"robust_ext.adapters.{self.name}.{module}") is not None

    def _part(self, module: str) -> ModuleType:
        return importlib.import_module(f"robust_ext.adapters.{self.name}.{module}")

    def _require(self, module: str) -> ModuleType:
        """Import the module that imports the library; MissingDependencyError where that fails."""
        if importlib.util.find_spec(self.package) is None:
            raise MissingDependencyError(f"{self.title} is not installed; pip install {self.install}")
        try:
            return self._part(module)
        except Exception as error:
            # Installed for another release of something that it imports, in most cases.
            raise broken_package(self.title, self.install, error) from error


class ModelAdapter(LibraryAdapter):
    """Adapter of a library of models, whose module ``zoo`` has ``names()`` and ``build(name, settings)``."""

    def list_models(self) -> list[str]:
        """Return names of the library's models."""
        names: list[str] = self._require("zoo").names()
        return sorted(names)

    def build_model(self, model: str, settings: Mapping[str, Any]) -> AdaptedModel:
        """Make the model of that name, with the normalisation that the library declares inside it."""
        adapted: AdaptedModel = self._require("zoo").build(model, dict(settings))
        return adapted


class HostAdapter(LibraryAdapter):
    """Adapter of a library of attacks.

    Its module ``catalogue`` has ``CATALOGUE``, a :class:`robust_ext.adapters.catalogue.Catalogue`; ``attack`` has
    ``from_class(class, settings, name=)`` and ``from_object(attack, name=)``. A library with models has a module
    ``model`` with ``adapt_model(model)``, one with detectors a module ``detector`` with
    ``adapt_detector(detector, classifier)``.
    """

    def list_attacks(self) -> list[AttackListing]:
        """List every attack of the library, unusable ones included."""
        listed: list[AttackListing] = self._require("catalogue").CATALOGUE.listings()
        return listed

    def attack_names(self) -> list[str]:
        """Return the names of its listed attacks; most libraries are not imported for it."""
        return list(self._part("entries").ENTRIES)

    def build_attack(self, attack: str, settings: Mapping[str, Any], *, name: str) -> Attack:
        """Make the attack of that name or alias, with these settings."""
        found = self._require("catalogue").CATALOGUE.find(attack)
        built: Attack = self._part("attack").from_class(found, settings, name=name)
        return built

    def adapt_attack(self, attack: object, *, name: str | None = None) -> Attack | None:
        """Wrap an attack object, an attack class (no settings), or a tuple (attack class, settings).

        An object that is bound to a model is built for each target, with the settings that differ from the
        defaults of its class.
        """
        settings: object = {}
        if isinstance(attack, tuple) and len(attack) == 2 and isinstance(attack[0], type):
            attack, settings = attack
        if not comes_from(attack, self.package):
            return None
        # Unwrap this project's own attacks from the library's classes.
        native = None if isinstance(attack, type) else getattr(attack, "native", None)
        core = native() if callable(native) else None
        if isinstance(core, NativeAttack):
            return core.named(name or type(attack).__name__)
        part = self._part("attack")
        made = isinstance(attack, type)
        adapted: Attack = part.from_class(attack, settings, name=name) if made else part.from_object(attack, name=name)
        return adapted

    def adapt_model(self, model: object) -> AdaptedModel | None:
        """Wrap a model of the library, preprocessing included."""
        if not comes_from(model, self.package) or not self._has("model"):
            return None
        adapted: AdaptedModel | None = self._part("model").adapt_model(model)
        return adapted

    def adapt_detector(self, detector: object, classifier: nn.Module) -> Detector | None:
        """Wrap a detector of the library."""
        if not comes_from(detector, self.package) or not self._has("detector"):
            return None
        adapted: Detector | None = self._part("detector").adapt_detector(detector, classifier)
        return adapted
