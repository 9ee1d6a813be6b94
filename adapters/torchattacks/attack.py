"""torchattacks' attacks as attacks of this project: made for each target, because an object is bound to its model."""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from robust_ext.adapters.torchattacks.catalogue import NORM_NAMES, NORM_VALUES, UNKNOWN, Entry, find_class, find_entry
from robust_ext.adapters.torchattacks.objects import is_attack, settings_of, training_of
from robust_ext.adapters.torchattacks.subject import Subject, check_shape
from robust_ext.adapters.unit_space import UnitSpace
from robust_ext.attacks.base import Attack, AttackTraits, draw_seed
from robust_ext.core.errors import AttackError, InvalidArgumentError
from robust_ext.core.random import seeded_globals
from robust_ext.core.specification import check_keywords, parse_call
from robust_ext.core.target import Target, frozen
from robust_ext.core.threat import ThreatModel

_LOGGER = logging.getLogger(__name__)
_EPSILONS = ("eps", "max_epsilon")


class TorchattacksAttack(Attack):
    """A torchattacks class with settings, made anew for each target and threat model and run in [0, 1].

    torchattacks takes inputs in [0, 1] for granted, so targets with other bounds are rescaled, and ``eps``, ``alpha``
    and the like are in units of [0, 1]. Settings that are left out follow the threat model where the class has them:
    ``eps`` (or ``max_epsilon``) is epsilon and ``norm`` the norm. ``alpha`` is torchattacks' default as long as that is
    below epsilon, and otherwise the larger of a tenth of epsilon and 2.5 epsilon over the steps, at most epsilon
    (FFGSM: 1.25 epsilon, as in its paper). ``seed`` is drawn from the generator; ``n_classes`` is at most the target's
    number of classes; ``verbose`` is False.

    Args:
        attack_class: The class.
        settings: Keyword arguments of its constructor, without the model; ``attacks`` of a MultiAttack may hold names
            with settings, classes, tuples (class, settings), and objects.
        name: How tables call it.
        training: What ``set_model_training_mode`` is told; nothing where empty.
    """

    def __init__(
        self, attack_class: type, settings: Mapping[str, Any], *, name: str, training: Mapping[str, bool] | None = None
    ) -> None:
        self.attack_class = attack_class
        self.settings = dict(settings)
        self.name = name
        self.training = dict(training or {})
        self.parts = tuple(_part(value) for value in self.settings.pop("attacks", ()))
        self.entry = _entry(find_entry(attack_class), self.settings, self.parts)
        self.traits = self.entry.traits
        loss = self.settings.get("loss", "")
        self.positive: bool = self.entry.positive_for == loss or any(part.positive for part in self.parts)
        self._parameters = inspect.signature(attack_class).parameters

    @property
    def description(self) -> str:
        """The class and the settings that were given."""
        shown = [f"{key}={_shown(value)}" for key, value in sorted({**self.settings, **self.training}.items())]
        if self.parts:
            shown.append(f"attacks=[{', '.join(part.description for part in self.parts)}]")
        return f"torchattacks {self.attack_class.__name__}({', '.join(shown)})"

    def generate(
        self,
        target: Target,
        inputs: Tensor,
        labels: Tensor,
        *,
        threat_model: ThreatModel,
        generator: torch.Generator,
    ) -> Tensor:
        """Run the attack on the whole batch, see :meth:`robust_ext.attacks.base.Attack.generate`.

        Raises:
            InvalidArgumentError: The class does not accept these settings.
            AttackError: Inputs have a shape it does not work on, torchattacks raised, or returned something else than
                one image for each input.
        """
        self._check_shape(target.input_shape, threat_model.norm)
        space = UnitSpace(target, threat_model)
        follows = any(part.training for part in (self, *self.parts))
        channels = 3 if self.entry.three_channels else 1
        subject = Subject(space.target, channels=channels, positive=self.positive, follows=follows)
        images = subject.enter(space.enter(inputs))
        with seeded_globals(draw_seed(generator)), frozen(target.module), warnings.catch_warnings():
            # SparseFool hands a tensor to numpy, and numpy 2 has a new way of asking for it.
            warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torchattacks\.")
            attack = self._make(subject, space)
            try:
                out = attack(images, labels.clone())
            except Exception as error:
                raise AttackError(f"{self.name}: torchattacks raised {type(error).__name__}: {error}") from error
        if not isinstance(out, Tensor):
            raise AttackError(f"{self.name}: returned {type(out).__name__}, expected a tensor of candidates")
        if out.shape != images.shape:
            raise AttackError(f"{self.name}: returned shape {tuple(out.shape)} for images {tuple(images.shape)}")
        # EAD can leave [0, 1], see the catalogue; the others stay in it.
        return space.leave(subject.leave(out.detach().clamp(0, 1)), inputs)

    def _check_shape(self, shape: tuple[int, ...], norm: str) -> None:
        entry = self.entry
        check_shape(self.name, shape, norm=norm, three_channels=entry.three_channels, square=entry.square)
        for part in self.parts:
            part._check_shape(shape, norm)

    def _make(self, subject: Subject, space: UnitSpace) -> Any:
        """The attack object, bound to the subject."""
        settings = self._completed(space)
        try:
            if self.parts:
                attack = self.attack_class([part._make(subject, space) for part in self.parts], **settings)
            else:
                attack = self.attack_class(subject, **settings)
        except InvalidArgumentError:
            raise
        except Exception as error:
            shown = ", ".join(f"{key}={_shown(value)}" for key, value in settings.items())
            expected = f"settings it accepts; torchattacks raised {type(error).__name__}: {error}"
            raise InvalidArgumentError("attack", f"{self.attack_class.__name__}({shown})", expected) from error
        if self.training:
            attack.set_model_training_mode(**self.training)
        if self.entry.next_class:
            classes = space.target.classes
            attack.set_mode_targeted_by_function(lambda _, labels: (labels + 1) % classes, quiet=True)
        return attack

    def _completed(self, space: UnitSpace) -> dict[str, Any]:
        epsilon, norm = space.threat_model.epsilon, space.threat_model.norm
        settings = dict(self.settings)
        wanted = {**dict.fromkeys(_EPSILONS, epsilon), "norm": NORM_VALUES[norm], "verbose": False}
        for key in [key for key in wanted if key in self._parameters]:
            settings.setdefault(key, wanted[key])
            self._compare(key, settings[key], wanted[key])
        if "alpha" in self._parameters:
            settings.setdefault("alpha", self._alpha(settings))
        if "seed" in self._parameters and settings.get("seed") is None:
            settings["seed"] = int(torch.randint(2**31, ()))
        if "n_classes" in self._parameters:
            settings["n_classes"] = min(self._value(settings, "n_classes"), space.target.classes)
        return settings

    def _compare(self, key: str, chosen: Any, wanted: Any) -> None:
        same = math.isclose(chosen, wanted, rel_tol=1e-6) if isinstance(chosen, (int, float)) else chosen == wanted
        if key in (*_EPSILONS, "norm") and not same:
            message = "%s: %s=%r was set and differs from the threat model's %r; candidates are judged by the latter"
            _LOGGER.warning(message, self.name, key, chosen, wanted)

    def _alpha(self, settings: Mapping[str, Any]) -> Any:
        epsilon, default = settings.get("eps"), self._parameters["alpha"].default
        if not isinstance(epsilon, (int, float)) or not isinstance(default, (int, float)) or default < epsilon:
            return default
        if self.entry.first_step is not None:
            return self.entry.first_step * epsilon
        steps = self._value(settings, "steps") if "steps" in self._parameters else 0
        return min(epsilon, max(epsilon / 10, 2.5 * epsilon / steps if steps else 0.0))

    def _value(self, settings: Mapping[str, Any], key: str) -> Any:
        return settings.get(key, self._parameters[key].default)


def from_class(attack_class: type, settings: object, *, name: str | None = None) -> TorchattacksAttack:
    """Make an attack from a torchattacks class and the keyword arguments of its constructor, without the model.

    Raises:
        InvalidArgumentError: The class cannot be used here, a keyword is unknown, or a value is not accepted.
    """
    entry = find_entry(attack_class)
    if not isinstance(settings, Mapping):
        raise InvalidArgumentError(
            "attack", f"settings of type {type(settings).__name__}", "a dict of keyword arguments"
        )
    label = attack_class.__name__
    check_keywords(attack_class, settings, argument="attack", label=label, hidden=("self", "model"))
    for key, least in entry.least.items():
        if settings.get(key, least) < least:
            raise InvalidArgumentError("attack", f"{label}({key}={settings[key]})", f"{key} of at least {least}")
    return TorchattacksAttack(attack_class, settings, name=name or label)


def from_object(attack: Any, *, name: str | None = None) -> TorchattacksAttack:
    """Make an attack from an object: its class, and its settings that differ from the class's defaults.

    Its model, device, normalization and number of classes are left out: those of the target take their place.

    Raises:
        InvalidArgumentError: It is of a class that cannot be used here, or in a targeted mode.
    """
    find_entry(type(attack))
    made = from_class(type(attack), settings_of(attack), name=name)
    made.training = training_of(attack)
    return made


def _part(value: object) -> TorchattacksAttack:
    if isinstance(value, str):
        spec = parse_call(value if ":" in value else f"torchattacks:{value}")
        return from_class(find_class(spec.name), spec.arguments)
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], type):
        return from_class(value[0], value[1])
    if isinstance(value, type):
        return from_class(value, {})
    if is_attack(value):
        return from_object(value)
    raise InvalidArgumentError("attacks", type(value).__name__, "names, classes or objects of torchattacks' attacks")


def _entry(entry: Entry, settings: Mapping[str, Any], parts: tuple[TorchattacksAttack, ...]) -> Entry:
    """What is known of a class with these settings."""
    traits = entry.traits
    if parts:
        return _together(entry, parts)
    if entry is not UNKNOWN and "norm" in settings and NORM_NAMES.get(settings["norm"]) not in traits.norms:
        expected = f"a norm among {', '.join(NORM_VALUES[norm] for norm in traits.norms)}"
        raise InvalidArgumentError("attack", f"norm={settings['norm']!r}", expected)
    if settings.get("loss") == "dlr":
        # It compares the largest logit with the third largest.
        traits = replace(traits, minimum_classes=3)
    if settings.get("version") == "rand":
        # Of its parts, APGD with two losses is left.
        traits = replace(traits, batching="any", leaves_ball=False, minimum_classes=3)
        return replace(entry, traits=traits, square={})
    return replace(entry, traits=traits)


def _together(entry: Entry, parts: tuple[TorchattacksAttack, ...]) -> Entry:
    every = [part.traits for part in parts]
    norms = tuple(norm for norm in entry.traits.norms if all(norm in traits.norms for traits in every))
    if not norms:
        listed = ", ".join(f"{part.name} ({' and '.join(part.traits.norms)})" for part in parts)
        raise InvalidArgumentError("attacks", listed, "attacks that have a norm in common")
    # Later parts are given the rows that are left, so none has the full batch in row order for certain.
    near = all(traits.batching != "single" and not (traits.leaves_ball or traits.minimum_norm) for traits in every)
    traits = AttackTraits(
        batching="any" if near else "single",
        batch_dependent=any(traits.batch_dependent for traits in every),
        gradients=any(traits.gradients for traits in every),
        minimum_norm=all(traits.minimum_norm for traits in every),
        norms=norms,
        minimum_classes=max(traits.minimum_classes for traits in every),
        leaves_ball=any(traits.leaves_ball for traits in every),
        failure=entry.traits.failure,
        seeds="setting" if any(traits.seeds == "setting" for traits in every) else "global",
    )
    return replace(entry, traits=traits, three_channels=any(part.entry.three_channels for part in parts))


def _shown(value: object) -> str:
    # The address in a function's text changes from run to run.
    return f"{value.__module__}.{value.__qualname__}" if inspect.isroutine(value) else repr(value)
