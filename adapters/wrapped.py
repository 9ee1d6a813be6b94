"""Shared parts of other libraries' attacks as attacks of this project."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from robust_ext.attacks.base import DISTRIBUTIONS, Attack, AttackTraits
from robust_ext.core.cost import Cost
from robust_ext.core.errors import AttackError, InvalidArgumentError, MissingDependencyError, warn
from robust_ext.core.objects import qualified_name
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_integer


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
    shape = (-1, *[1] * (inputs.dim() - 1))
    points, found = inputs.clone(), torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)
    for number in range(tries):
        noise = torch.rand(inputs.shape, generator=generator)
        drawn = (noise if number % 2 == 0 else noise.round()) * (high - low) + low
        drawn = drawn.to(inputs.device, inputs.dtype).clamp_(low, high)
        new = ~found & _wrong(target, torch.where(found.view(shape), points, drawn), labels)
        points = torch.where(new.view(shape), drawn, points)
        found |= new
        if bool(found.all()):
            break
    kept = torch.ones(len(inputs), device=inputs.device)
    left = torch.zeros_like(kept)
    for _ in range(10):
        middle = (kept + left) / 2
        adversarial = _wrong(target, torch.lerp(inputs, points, middle.view(shape)), labels)
        kept, left = torch.where(adversarial, middle, kept), torch.where(adversarial, left, middle)
    return torch.where(found.view(shape), torch.lerp(inputs, points, kept.view(shape)), inputs), found


def _wrong(target: Target, points: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        wrong: Tensor = target.module(points).argmax(1) != labels
    return wrong


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


def written(made_of: Callable[..., Any], settings: Mapping[str, Any]) -> str:
    """Write a class or function with settings as text, the same in every process."""
    shown = ", ".join(f"{key}={_shown(value)}" for key, value in sorted(settings.items()))
    return f"{made_of.__name__}({shown})"


def check_settings(settings: object) -> Mapping[str, Any]:
    """Return the settings of a tuple (attack, settings); InvalidArgumentError unless they are a mapping."""
    if not isinstance(settings, Mapping):
        raise InvalidArgumentError(
            "attack", f"settings of type {type(settings).__name__}", "a dict of keyword arguments"
        )
    return settings


def settings_of(attack: Any, read: Callable[[str, inspect.Parameter], Any]) -> dict[str, Any]:
    """Return an attack object's settings that differ from its class's defaults; ``read`` returns MISSING for none."""
    settings = {}
    for key, parameter in inspect.signature(type(attack)).parameters.items():
        value = read(key, parameter)
        if value is not MISSING and not _same(value, parameter.default):
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


def check_candidates(name: str, candidates: object) -> Tensor:
    """Return an attack's candidates, detached; AttackError where they are no tensor."""
    if not isinstance(candidates, Tensor):
        raise AttackError(f"{name}: returned {type(candidates).__name__}, expected a tensor of candidates")
    return candidates.detach()


def _missing(name: str, error: ImportError) -> MissingDependencyError:
    package = DISTRIBUTIONS.get(error.name or "", error.name or "the package")
    return MissingDependencyError(f"{name}: {error}; pip install {package}")


def _shown(value: object) -> str:
    # The address in a function's text changes from run to run.
    return qualified_name(value) if inspect.isroutine(value) else repr(value)


def _same(value: Any, default: Any) -> bool:
    if isinstance(value, np.ndarray) or isinstance(default, np.ndarray):
        return np.array_equal(value, default)
    return value is default or (type(value) is type(default) and bool(value == default))


def restore_failed(candidates: Tensor, inputs: Tensor, labels: Tensor, *, target: Target) -> Tensor:
    """Replace candidates ``(N, ...)`` that are not adversarial by their inputs; one forward pass.

    For libraries that return a random start or a black image where they fail, which would pass for a try.
    """
    with torch.no_grad():
        adversarial = target.module(candidates.to(inputs.dtype)).argmax(1) != labels
    return torch.where(adversarial.view(-1, *[1] * (inputs.dim() - 1)), candidates, inputs)
