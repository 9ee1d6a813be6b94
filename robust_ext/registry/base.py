"""Adapters, which make attacks and models of other libraries usable here, and helpers to resolve objects.

An adapter is one object, published under the entry-point group ``robust_ext.adapters``, built-in ones included. It
imports its library only to adapt something.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import Attack, AttackTraits
from robust_ext.core.errors import InvalidArgumentError, RobustExtError
from robust_ext.core.foreign import foreign_code
from robust_ext.core.objects import resolve_object
from robust_ext.core.specification import FORM, did_you_mean, parse_call

if TYPE_CHECKING:
    from robust_ext.detectors.base import Detector

GROUP = "robust_ext.adapters"


@dataclass(frozen=True, kw_only=True)
class AttackListing:
    """One attack of a library: a line of ``robust-ext attacks``.

    Args:
        name: As written in an attack string, without the library.
        traits: What it needs and how it treats the samples of a batch, with its default settings.
        aliases: Other names of the same attack.
        reason: Why it cannot be used, and what to use instead; empty if it can.
        trial: Settings with which it runs fast, and finds something where it can, for ``robust-ext attacks --matrix``.
        trial_norm: Norm of that trial; if left out, linf, or else the first norm that the attack has.
        misses: Why that trial finds nothing on one of the targets; empty if it does.
        channels: Fewest channels of the images it takes.
        defect: A known defect of the library's attack; empty without one.
    """

    name: str = ""
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
        bounds: The bounds that the library declares, if any.
        input_shape: Shape of one input ``(C, H, W)`` that the library declares, if any.
    """

    module: nn.Module
    bounds: tuple[float, float] | None
    input_shape: tuple[int, ...] | None = None


class Adapter:
    """A library of attacks, models or detectors; every method is optional.

    Attributes:
        name: Prefix of its names, as in ``foolbox:LinfPGD(steps=40)`` or ``timm:resnet18(num_classes=10)``.
    """

    name: str

    def list_attacks(self) -> list[AttackListing]:
        """Return every attack of the library, unusable ones with the reason.

        Raises:
            MissingDependencyError: The library is not installed.
        """
        return []

    def attack_names(self) -> list[str]:
        """Return the names of its attacks, for shell completion."""
        return [one.name for one in self.list_attacks()]

    def build_attack(self, attack: str, settings: Mapping[str, Any], *, name: str) -> Attack:
        """Make the attack called ``attack`` with these settings; ``name`` is how tables call it."""
        expected = f"an attack of another library; {self.name} has none"
        raise InvalidArgumentError("attack", f"{self.name}:{attack}", expected)

    def adapt_attack(self, attack: object, *, name: str | None = None) -> Attack | None:
        """Wrap an attack object of the library; None when it is not one."""
        return None

    def list_models(self) -> list[str]:
        """Return the sorted names of the library's models, without the library.

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
    """Return all installed adapters by name.

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
    """Return whether ``obj``'s class or a base of it is defined in ``package``, without importing that."""
    family = obj.__mro__ if isinstance(obj, type) else type(obj).__mro__
    return any(base.__module__.split(".")[0] == package for base in family)


def named_object(text: str, *, accepted: str, argument: str) -> object:
    """Return the object of ``package.module:object`` or ``file.py:object``; text in parentheses calls it.

    InvalidArgumentError if there is no such object, or it is text itself; DataError if its import or call raised.
    """
    found: object = resolve_object(text, argument=argument)
    if isinstance(found, str):
        raise InvalidArgumentError(argument, text, f"the name of {accepted}; it names a string")
    return found


def named_call(text: str, known: Collection[str], *, argument: str, otherwise: str) -> tuple[str, dict[str, Any]]:
    """Parse a name of a catalogue with settings or without, as in ``hd(steps=5)``; names may have hyphens."""
    name, opening, rest = text.strip().partition("(")
    if name.strip() not in known:
        expected = f"one of {', '.join(map(repr, known))}, or {otherwise}{did_you_mean(name.strip(), known)}"
        raise InvalidArgumentError(argument, repr(text), expected)
    try:
        return name.strip(), dict(parse_call(f"named:call{opening}{rest}", argument=argument).arguments)
    except InvalidArgumentError as error:
        got, expected = str(error.got).replace("named:call", name.strip()), str(error.expected)
        if expected == FORM:
            expected = f"a name, or a name with settings as in {name.strip()}(setting=5)"
        raise InvalidArgumentError(argument, got, expected) from error


def takes_classifier(obj: object) -> bool:
    """Return whether ``obj`` is a function that makes something of a classifier, by the name of its first parameter."""
    if isinstance(obj, nn.Module) or not callable(obj):
        return False
    try:
        first = next(iter(inspect.signature(obj).parameters), "")
    except (TypeError, ValueError):
        return False
    return first in ("classifier", "model", "network", "static")


def made_by(factory: Any, classifier: nn.Module, *, accepted: str, argument: str) -> Any:
    """Call a factory with the classifier.

    Raises:
        InvalidArgumentError: It cannot be called with the classifier alone, or made text, a class or another factory.
        DataError: It raised.
    """
    name = getattr(factory, "__name__", type(factory).__name__)
    try:
        inspect.signature(factory).bind(classifier)
    except ValueError:  # Some classes written in C show no signature.
        pass
    except TypeError as error:
        expected = f"what can be called with the classifier alone ({error}); call it yourself, and pass the result"
        raise InvalidArgumentError(argument, f"{name}{inspect.signature(factory)}", expected) from error
    with foreign_code(argument, name, hint="it is called with the classifier alone; call it yourself if it needs more"):
        made = factory(classifier)
    if isinstance(made, (str, type)) or takes_classifier(made):
        shown = f"the class {made.__name__}" if isinstance(made, type) else repr(made)
        raise InvalidArgumentError(argument, f"{name}, which made {shown}", accepted)
    return made


def same_logits(first: nn.Module, second: nn.Module, inputs: Tensor) -> bool:
    """Return whether two classifiers agree in their logits of inputs ``(n, ...)``, up to rounding."""
    with torch.no_grad(), foreign_code("classifier", type(first).__name__, hint="it must take the same inputs"):
        a, b = first(inputs), second(inputs)
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5 * (1 + float(b.abs().max())))
