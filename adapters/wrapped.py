"""Shared parts of other libraries' attacks as attacks of this project."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from robust_ext.adapters.catalogue import Catalogue, check_ranges
from robust_ext.attacks._common.rows import over_rows
from robust_ext.attacks.base import DISTRIBUTIONS, Attack, AttackTraits
from robust_ext.core.cost import Cost
from robust_ext.core.criteria import Criterion
from robust_ext.core.errors import AttackError, InvalidArgumentError, MissingDependencyError, warn
from robust_ext.core.objects import qualified_name
from robust_ext.core.specification import check_keywords
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_integer
from robust_ext.registry.base import AttackListing

E = TypeVar("E", bound=AttackListing)
MISSING = object()
# What libraries call the number of steps, and what multiplies it.
_STEPS = ("steps", "max_iter", "num_steps", "n_iter", "nb_iter", "iterations")
_TIMES = ("num_random_init", "n_restarts", "restarts", "random_restarts", "binary_search_steps", "eot_iter")


class WrappedAttack(Attack):
    """A class or function of a library (``made_of``) with settings, built for each target and threat model.

    ``entry`` is what is known of it, ``traits`` what it needs and how it treats a batch with these settings.
    """

    title: ClassVar[str]

    def __init__(
        self, made_of: Callable[..., Any], settings: Mapping[str, Any], *, name: str, entry: Any, traits: AttackTraits
    ) -> None:
        self.made_of = made_of
        self.settings = dict(settings)
        self.name = name
        self.entry = entry
        self.traits = traits
        self._parameters = inspect.signature(made_of).parameters

    @property
    def description(self) -> str:
        """The class or function and the settings that were given."""
        return f"{self.title} {written(self.made_of, self.settings)}"

    def pursues(self, criterion: Criterion) -> bool:
        """See :meth:`Attack.pursues`."""
        return not criterion.ranks if criterion.aims and self._can_aim else super().pursues(criterion)

    @property
    def _can_aim(self) -> bool:
        """True if it is given targets where there are some."""
        return "targeted" in self._parameters

    def cost(self, threat_model: ThreatModel, *, classes: int) -> Cost | None:
        """See :meth:`Attack.cost`."""
        return cost_of_steps(partial(self._value, self.settings), self._parameters, gradients=self.traits.gradients)

    def _compare(self, key: str, wanted: object, names: Mapping[Any, str] | None = None) -> None:
        """Warn where a setting that was given differs from the threat model's."""
        if key not in self.settings:
            return
        given = self.settings[key]
        chosen = given if names is None else names.get(given)
        numbers = isinstance(chosen, (int, float)) and isinstance(wanted, (int, float))
        if not (math.isclose(chosen, wanted, rel_tol=1e-6) if numbers else chosen == wanted):  # type: ignore[arg-type]
            warn(
                f"{self.name}: {key}={given!r} was set and differs from the threat model's {wanted!r}; candidates are "
                "judged by the latter"
            )

    def _value(self, settings: Mapping[str, Any], key: str) -> Any:
        return settings.get(key, self._parameters[key].default)

    def _fill(self, settings: dict[str, Any], wanted: Mapping[str, Any]) -> None:
        """Set settings that are left out, where the class or function has them."""
        for key, value in wanted.items():
            if key in self._parameters:
                settings.setdefault(key, value)

    def _step_size(
        self, default: Any, settings: Mapping[str, Any], *, steps: str, first: float | None, limit: float = math.inf
    ) -> Any:
        """Return the library's default step where it is below epsilon, otherwise one that fits epsilon.

        That is ``first`` times epsilon or, where ``first`` is None, the larger of a tenth of epsilon and 2.5 epsilon
        over the number of steps, at most ``limit`` times epsilon.
        """
        epsilon = settings.get("eps")
        if not isinstance(epsilon, (int, float)) or not isinstance(default, (int, float)) or default < epsilon:
            return default
        if first is not None:
            return first * epsilon
        number = self._value(settings, steps) if steps in self._parameters else 0
        return min(limit * epsilon, max(epsilon / 10, 2.5 * epsilon / number if number else 0.0))


def cost_of_steps(read: Callable[[str], Any], known: Container[str], *, gradients: bool) -> Cost | None:
    """Return the approximate cost of an attack with gradients by its steps; None without such a setting.

    One pass back a step, in each run of it, and one more forward.
    """
    steps = next((read(name) for name in _STEPS if name in known), None) if gradients else None
    times = [read(name) for name in _TIMES if name in known]
    if not all(isinstance(one, int) for one in (steps, *times)) or steps is None:
        return None
    runs = math.prod(max(one, 1) for one in times)
    return Cost((steps + 1) * runs, steps * runs)


def starting_points(
    target: Target, inputs: Tensor, labels: Tensor, *, generator: torch.Generator, tries: int = 200
) -> tuple[Tensor, Tensor]:
    """Search the box for points of another class: noise, and blends of it with the input that come ever closer to it.

    Every query is the whole batch ``(N, ...)`` in order. Noise, uniform and black and white by turns, is drawn (at
    most ``tries`` times) until each sample is misclassified; then each sample goes as far back to its input as it stays
    misclassified (ten halvings). Returned are points ``(N, ...)`` and which of them are adversarial, bool ``(N,)``; the
    others are the inputs.
    """
    check_integer("tries", tries, minimum=1)
    low, high = target.bounds
    points, found = inputs.clone(), torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)
    for number in range(tries):
        noise = torch.rand(inputs.shape, generator=generator)
        drawn = (noise if number % 2 == 0 else noise.round()) * (high - low) + low
        drawn = drawn.to(inputs.device, inputs.dtype).clamp_(low, high)
        new = ~found & _wrong(target, torch.where(over_rows(found, inputs), points, drawn), labels)
        points = torch.where(over_rows(new, inputs), drawn, points)
        found |= new
        if bool(found.all()):
            break
    kept = torch.ones(len(inputs), device=inputs.device)
    left = torch.zeros_like(kept)
    for _ in range(10):
        middle = (kept + left) / 2
        adversarial = _wrong(target, torch.lerp(inputs, points, over_rows(middle, inputs)), labels)
        kept, left = torch.where(adversarial, middle, kept), torch.where(adversarial, left, middle)
    blended = torch.lerp(inputs, points, over_rows(kept, inputs))
    return torch.where(over_rows(found, inputs), blended, inputs), found


def restore_failed(candidates: Tensor, inputs: Tensor, labels: Tensor, *, target: Target) -> Tensor:
    """Replace candidates ``(N, ...)`` that are not adversarial by their inputs; one forward pass.

    For libraries that return a random start or a black image where they fail, which would pass for a try.
    """
    adversarial = _wrong(target, candidates.to(inputs.dtype), labels)
    return torch.where(over_rows(adversarial, inputs), candidates, inputs)


def _wrong(target: Target, points: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        return target.criterion.adversarial(target.module(points), labels)


def checked(
    catalogue: Catalogue[E],
    member: Any,
    settings: object,
    *,
    accepted: Callable[[Any], Callable[..., Any]] = lambda member: member,
    hidden: tuple[str, ...] = ("self",),
    filled: Callable[[E], Mapping[str, Any]] = lambda entry: {},
) -> tuple[E, Mapping[str, Any], str]:
    """Return the entry of a class or function of a library, its settings, and its name.

    InvalidArgumentError where it cannot be used here, or a setting is none of its own or outside its range. Settings
    are the parameters of what ``accepted`` returns, without ``hidden`` ones; ``filled`` returns those that need not be
    given.
    """
    entry, settings, label = catalogue.entry(member), check_settings(settings), member.__name__
    given = {**filled(entry), **settings}
    check_keywords(accepted(member), given, argument="attack", label=label, hidden=hidden)
    check_ranges(member, settings)
    return entry, settings, label


def check_settings(settings: object) -> Mapping[str, Any]:
    """Return the settings of a tuple (attack, settings); InvalidArgumentError unless they are a mapping."""
    if not isinstance(settings, Mapping):
        got = f"settings of type {type(settings).__name__}"
        raise InvalidArgumentError("attack", got, "a dict of keyword arguments")
    return settings


def refuse_targets(label: str, settings: Mapping[str, Any]) -> None:
    """Raise where an attack that is given true labels is to aim at them."""
    if settings.get("targeted"):
        expected = "targeted=False: attacks aim where the evaluation has targets, criterion=robust_ext.Targeted()"
        raise InvalidArgumentError("attack", f"{label}(targeted=True)", expected)


def written(made_of: Callable[..., Any], settings: Mapping[str, Any]) -> str:
    """Write a class or function with settings as text, the same in every process."""
    # The address in a function's text changes from run to run.
    shown = {key: qualified_name(v) if inspect.isroutine(v) else repr(v) for key, v in sorted(settings.items())}
    return f"{made_of.__name__}({', '.join(f'{key}={value}' for key, value in shown.items())})"


def settings_of(attack: Any, read: Callable[[str, inspect.Parameter], Any]) -> dict[str, Any]:
    """Return an attack object's settings that differ from its class's defaults; ``read`` returns MISSING for none."""
    settings = {}
    for key, parameter in inspect.signature(type(attack)).parameters.items():
        value, default = read(key, parameter), parameter.default
        if isinstance(value, np.ndarray) or isinstance(default, np.ndarray):
            same = np.array_equal(value, default)
        else:
            same = value is default or (type(value) is type(default) and bool(value == default))
        if value is not MISSING and not same:
            settings[key] = value
    return settings


def describe_error(title: str, error: Exception) -> str:
    """Describe an error raised inside a library."""
    return f"{title} raised {type(error).__name__}: {error}"


@contextmanager
def constructed(
    title: str,
    made_of: Callable[..., Any],
    settings: Mapping[str, Any],
    describe: Callable[[str, Exception], str] = describe_error,
) -> Iterator[None]:
    """Explain errors of a library's constructor, called inside: settings that it refuses, or a missing package."""
    try:
        yield
    except InvalidArgumentError:
        raise
    except ImportError as error:
        raise _missing(made_of.__name__, error) from error
    except Exception as error:
        expected = f"settings it accepts; {describe(title, error)}"
        raise InvalidArgumentError("attack", written(made_of, settings), expected) from error


@contextmanager
def raised_inside(title: str, name: str, describe: Callable[[str, Exception], str] = describe_error) -> Iterator[None]:
    """Explain errors of a library's attack, called inside, by AttackError or MissingDependencyError."""
    try:
        yield
    except ImportError as error:
        raise _missing(name, error) from error
    except Exception as error:
        raise AttackError(f"{name}: {describe(title, error)}") from error


def _missing(name: str, error: ImportError) -> MissingDependencyError:
    package = DISTRIBUTIONS.get(error.name or "", error.name or "the package")
    return MissingDependencyError(f"{name}: {error}; pip install {package}")


def check_candidates(name: str, candidates: object) -> Tensor:
    """Return an attack's candidates, detached; AttackError where they are no tensor."""
    if not isinstance(candidates, Tensor):
        raise AttackError(f"{name}: returned {type(candidates).__name__}, expected a tensor of candidates")
    return candidates.detach()
