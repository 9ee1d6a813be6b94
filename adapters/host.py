"""Adapters of libraries, which are imported only when they are used."""

from __future__ import annotations

import importlib
import importlib.util
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from statistics import fmean
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from robust_ext.attacks.base import Attack, broken_package
from robust_ext.attacks.native import NativeAttack
from robust_ext.core.errors import InvalidArgumentError, MissingDependencyError
from robust_ext.core.foreign import foreign_code
from robust_ext.core.specification import did_you_mean
from robust_ext.models.wrapping import Normalized
from robust_ext.registry.base import AdaptedModel, Adapter, AttackListing, comes_from

if TYPE_CHECKING:
    from robust_ext.detectors.base import Detector

BOUNDS = (0.0, 1.0)


def required(package: str, module: str, *, title: str, install: str) -> ModuleType:
    """Import a module that needs a package; MissingDependencyError with the argument of ``pip install`` otherwise."""
    if importlib.util.find_spec(package) is None:
        raise MissingDependencyError(f"{title} is not installed; pip install {install}")
    try:
        return importlib.import_module(module)
    except Exception as error:
        # Installed for another release of something that it imports, in most cases.
        raise broken_package(title, install, error) from error


class ModelAdapter(Adapter):
    """A library of models that are made by name.

    Attributes:
        title: Its name in texts.
        modules: Modules that it is imported by, the first of which is its package or in it.
        install: Argument of ``pip install``.
    """

    title: ClassVar[str]
    modules: ClassVar[tuple[str, ...]]
    install: ClassVar[str]

    @abstractmethod
    def names(self) -> list[str]:
        """Return names of models; the library has been imported."""

    @abstractmethod
    def build(self, name: str, settings: dict[str, Any]) -> AdaptedModel:
        """Make a model with the normalisation that the library declares inside it; the library has been imported."""

    def list_models(self) -> list[str]:
        """Return names of the library's models."""
        self._import()
        return sorted(self.names())

    def build_model(self, model: str, settings: Mapping[str, Any]) -> AdaptedModel:
        """Make the model of that name."""
        self._import()
        return self.build(model, dict(settings))

    def check_listed(self, name: str, known: Collection[str]) -> None:
        """Raise InvalidArgumentError with the nearest names unless the library has a model of this name."""
        if name not in known:
            expected = f"one of its {len(known)} models{did_you_mean(name, known) or f', as {sorted(known)[0]}'}"
            raise InvalidArgumentError("model", f"{self.name}:{name}", expected)

    def making(
        self, name: str, hint: str = "check its settings", *, fetched: str | None = None
    ) -> AbstractContextManager[None]:
        """Explain what the library raises while it makes a model; ``fetched`` is the setting that loads weights."""
        if fetched is not None:
            hint = (
                "these weights have to be in the library's own cache, or within reach of a network for it to fetch "
                f"them; without {fetched} they are random, and a state dict of yours is loaded by --weights"
            )
        return foreign_code("model", f"{self.name}:{name}", hint=hint)

    def _import(self) -> None:
        for module in self.modules:
            required(self.modules[0].split(".")[0], module, title=self.title, install=self.install)


def normalized(
    network: nn.Module, *, mean: Sequence[float], std: Sequence[float], input_shape: tuple[int, ...]
) -> AdaptedModel:
    """Put the normalisation that a library declares in front of its network, in eval mode, for inputs in [0, 1].

    With another number of channels than the library's, each is normalised by the mean of its numbers.
    """
    if len(mean) != input_shape[0]:
        mean, std = [fmean(mean)], [fmean(std)]
    module = Normalized(network, mean=tuple(mean), std=tuple(std)).eval()
    return AdaptedModel(module=module, bounds=BOUNDS, input_shape=input_shape)


class HostAdapter(Adapter):
    """A library of attacks, adapted by modules of ``robust_ext.adapters.<name>``.

    Its module ``entries`` has ``ENTRIES``, and ``attack`` has ``CATALOGUE`` (see
    :class:`robust_ext.adapters.catalogue.Catalogue`), ``from_class(class, settings, name=)`` and
    ``from_object(attack, name=)``. A library with models has a module
    ``model`` with ``adapt_model(model)``, one with detectors a module ``detector`` with
    ``adapt_detector(detector, classifier)``.
    """

    def __init__(self, name: str, *, title: str, install: str, parts: tuple[str, ...] = ()) -> None:
        self.name = name
        self.title = title
        self.install = install
        self.parts = parts  # Which of "model" and "detector" it has

    def _part(self, module: str) -> Any:
        return importlib.import_module(f"robust_ext.adapters.{self.name}.{module}")

    def _attacks(self) -> Any:
        module = f"robust_ext.adapters.{self.name}.attack"
        return required(self.name, module, title=self.title, install=self.install)

    def list_attacks(self) -> list[AttackListing]:
        """List every attack of the library, unusable ones included."""
        listed: list[AttackListing] = self._attacks().CATALOGUE.listings()
        return listed

    def attack_names(self) -> list[str]:
        """Return the names of its listed attacks; most libraries are not imported for it."""
        return list(self._part("entries").ENTRIES)

    def build_attack(self, attack: str, settings: Mapping[str, Any], *, name: str) -> Attack:
        """Make the attack of that name or alias, with these settings."""
        part = self._attacks()
        built: Attack = part.from_class(part.CATALOGUE.find(attack), settings, name=name)
        return built

    def adapt_attack(self, attack: object, *, name: str | None = None) -> Attack | None:
        """Wrap an attack object, an attack class (no settings), or a tuple (attack class, settings).

        An object that is bound to a model is built for each target, with the settings that differ from the
        defaults of its class.
        """
        settings: object = {}
        if isinstance(attack, tuple) and len(attack) == 2 and isinstance(attack[0], type):
            attack, settings = attack
        if not comes_from(attack, self.name):
            return None
        adapted: Attack
        if isinstance(attack, type):
            adapted = self._part("attack").from_class(attack, settings, name=name)
            return adapted
        # Unwrap this project's own attacks from the library's classes.
        native = getattr(attack, "native", None)
        core = native() if callable(native) else None
        if isinstance(core, NativeAttack):
            return core.named(name or type(attack).__name__)
        adapted = self._part("attack").from_object(attack, name=name)
        return adapted

    def adapt_model(self, model: object) -> AdaptedModel | None:
        """Wrap a model of the library, preprocessing included."""
        if "model" not in self.parts or not comes_from(model, self.name):
            return None
        adapted: AdaptedModel | None = self._part("model").adapt_model(model)
        return adapted

    def adapt_detector(self, detector: object, classifier: nn.Module) -> Detector | None:
        """Wrap a detector of the library."""
        if "detector" not in self.parts or not comes_from(detector, self.name):
            return None
        adapted: Detector | None = self._part("detector").adapt_detector(detector, classifier)
        return adapted
