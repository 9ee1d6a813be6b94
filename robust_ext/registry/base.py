"""Adapters: how attacks and models of other libraries become this project's, found through entry points.

An adapter is one object, published under the entry-point group ``robust_ext.adapters``; the built-in ones are found
in the same way as anyone else's. Nothing of it is imported until something is adapted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from torch import nn

from robust_ext.attacks.base import Attack, AttackTraits
from robust_ext.core.errors import InvalidArgumentError, RobustExtError

if TYPE_CHECKING:
    from robust_ext.detectors.base import Detector

GROUP = "robust_ext.adapters"


@dataclass(frozen=True, kw_only=True)
class AttackListing:
    """What is known of one attack of a library: a line of ``robust-ext attacks``.

    Args:
        name: As written in an attack string, without the library.
        traits: What it needs and how it treats the samples of a batch, with its default settings.
        aliases: Other names of the same attack.
        reason: Why it cannot be used, and what to use instead; empty where it can.
        trial: Settings with which it runs fast, and finds something where it can, for ``robust-ext attacks --matrix``.
        trial_norm: Norm of that trial; linf where it can be run for it, else l2, when left out.
        misses: Why that trial finds nothing on one of the targets, in words; empty where it does.
        channels: Fewest channels of the images it takes.
        defect: What is wrong with it in the library, in words; empty where nothing is known.
    """

    name: str
    traits: AttackTraits = field(default_factory=AttackTraits)
    aliases: tuple[str, ...] = ()
    reason: str = ""
    trial: Mapping[str, Any] = field(default_factory=dict)
    trial_norm: str = ""
    misses: str = ""
    channels: int = 1
    defect: str = ""


@dataclass(frozen=True, kw_only=True)
class AdaptedModel:
    """A model of another library as a module.

    Args:
        module: From inputs in ``bounds`` to logits, preprocessing included.
        bounds: The bounds the library's model states, or None where it states none.
        input_shape: Shape of one input that the library states, ``(C, H, W)``, or None where it states none.
    """

    module: nn.Module
    bounds: tuple[float, float] | None
    input_shape: tuple[int, ...] | None = None


class Adapter:
    """What a library offers here: attacks, models, detectors, or some of these; by default none.

    Attributes:
        name: Prefix of its names, as in ``foolbox:LinfPGD(steps=40)`` or ``timm:resnet18(num_classes=10)``.
    """

    name: str

    def list_attacks(self) -> list[AttackListing]:
        """Every attack of the library, those that cannot be used included, with the reason.

        Raises:
            MissingDependencyError: The library is not installed.
        """
        return []

    def attack_names(self) -> list[str]:
        """Names of its attacks, for a shell to complete."""
        return [one.name for one in self.list_attacks()]

    def build_attack(self, attack: str, settings: Mapping[str, Any], *, name: str) -> Attack:
        """Make the attack called ``attack`` with these settings; ``name`` is how tables call it."""
        expected = f"an attack of another library; {self.name} has none"
        raise InvalidArgumentError("attack", f"{self.name}:{attack}", expected)

    def adapt_attack(self, attack: object, *, name: str | None = None) -> Attack | None:
        """Wrap an attack object of the library; None when it is not one."""
        return None

    def list_models(self) -> list[str]:
        """Names of the library's models, without the library, sorted.

        Raises:
            MissingDependencyError: The library is not installed.
        """
        return []

    def build_model(self, model: str, settings: Mapping[str, Any]) -> AdaptedModel:
        """Make the model called ``model`` with these settings, in eval mode; its weights are random by default.

        Raises:
            InvalidArgumentError: The library has no such model, or it takes no such settings.
            MissingDependencyError: The library is not installed.
            DataError: The library raised while it made the model, as for weights that are not on this machine.
        """
        expected = f"a model of another library; {self.name} has none by name"
        raise InvalidArgumentError("model", f"{self.name}:{model}", expected)

    def adapt_model(self, model: object) -> AdaptedModel | None:
        """Wrap a model of the library; None when it is not one."""
        return None

    def adapt_detector(self, detector: object, classifier: nn.Module) -> Detector | None:
        """Wrap a detector of the library that watches ``classifier``; None when it is not one."""
        return None


@cache
def adapters() -> dict[str, Adapter]:
    """All installed adapters by name.

    Raises:
        RobustExtError: An entry point does not lead to an :class:`Adapter`, or two have the same name.
    """
    found: dict[str, Adapter] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda p: p.name):
        adapter = point.load()
        if not isinstance(adapter, Adapter):
            raise RobustExtError(
                f"entry point {point.name!r} of {GROUP}: {point.value} is no robust_ext.registry.base.Adapter"
            )
        if adapter.name in found and type(found[adapter.name]) is not type(adapter):
            raise RobustExtError(f"two installed adapters are called {adapter.name!r}; remove one of them")
        found[adapter.name] = adapter
    return found


def comes_from(obj: object, package: str) -> bool:
    """Whether a class in ``obj``'s family is defined in ``package``; imports nothing."""
    family = obj.__mro__ if isinstance(obj, type) else type(obj).__mro__
    return any(base.__module__.split(".")[0] == package for base in family)
