"""torchattacks' attacks as attacks of this project: made for each target, because an object is bound to its model."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.adapters.catalogue import check_ranges
from robust_ext.adapters.torchattacks.catalogue import CATALOGUE, NORM_NAMES, NORM_VALUES, entry_of, torchattacks
from robust_ext.adapters.torchattacks.entries import Entry
from robust_ext.adapters.torchattacks.target import HostModule, check_shape
from robust_ext.adapters.wrapped import (
    MISSING,
    WrappedAttack,
    check_candidates,
    check_settings,
    constructed,
    raised_inside,
    settings_of,
    written,
)
from robust_ext.attacks.base import draw_seed
from robust_ext.attacks.running import UnitSpace
from robust_ext.core.errors import AttackError, InvalidArgumentError, warn
from robust_ext.core.guard import frozen
from robust_ext.core.random import seeded_globals
from robust_ext.core.specification import check_keywords, parse_call
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel

_EPSILONS = ("eps", "max_epsilon")
_MODES = ("model_training", "batchnorm_training", "dropout_training")
# Where an object keeps a setting under another name.
_PLACES: Mapping[tuple[str, str], str] = {
    ("APGD", "rho"): "thr_decr",
    ("APGDT", "rho"): "thr_decr",
    ("Pixle", "max_iterations"): "max_patches",
    ("Pixle", "x_dimensions"): "p1_x_dimensions",
    ("Pixle", "y_dimensions"): "p1_y_dimensions",
    ("Square", "resc_schedule"): "rescale_schedule",
}


class TorchattacksAttack(WrappedAttack):
    """A torchattacks class with settings, built for each target and threat model and run in [0, 1].

    torchattacks takes inputs in [0, 1] for granted, so targets with other bounds are rescaled, and ``eps``, ``alpha``
    and similar ones are in units of [0, 1]. Settings left out follow the threat model where the class has them:
    ``eps`` (or ``max_epsilon``) is epsilon and ``norm`` the norm. ``alpha`` is torchattacks' default as long as that is
    below epsilon, and otherwise the larger of a tenth of epsilon and 2.5 epsilon over the steps, at most epsilon
    (FFGSM: 1.25 epsilon, as in its paper). ``seed`` is drawn from the generator; ``n_classes`` is at most the target's
    number of classes; ``verbose`` is False.

    ``attacks`` of a MultiAttack may hold names with settings, classes, tuples (class, settings), and objects;
    ``training`` are the arguments of ``set_model_training_mode``, which is not called where empty.
    """

    title = "torchattacks"
    entry: Entry

    def __init__(
        self, attack_class: type, settings: Mapping[str, Any], *, name: str, training: Mapping[str, bool] | None = None
    ) -> None:
        own = dict(settings)
        self.training = dict(training or {})
        parts = own.pop("attacks", ())
        if not isinstance(parts, (list, tuple)):
            raise InvalidArgumentError("attacks", parts, "a list of torchattacks' attacks")
        self.parts = tuple(map(_part, parts))
        entry = entry_of(CATALOGUE.entry(attack_class), own, [(part.name, part.entry) for part in self.parts])
        super().__init__(attack_class, own, name=name, entry=entry, traits=entry.traits)
        self.unlisted = not CATALOGUE.owns(attack_class)
        loss = own.get("loss", "")
        self.positive: bool = entry.positive_for == loss or any(part.positive for part in self.parts)

    @property
    def description(self) -> str:
        """The class and the settings that were given."""
        shown = written(self.made_of, {**self.settings, **self.training})[:-1]
        if self.parts:
            separator = "" if shown.endswith("(") else ", "
            shown += f"{separator}attacks=[{', '.join(part.description for part in self.parts)}]"
        return f"torchattacks {shown})"

    def search(
        self, target: Target, inputs: Tensor, labels: Tensor, *, threat_model: ThreatModel, generator: torch.Generator
    ) -> Tensor:
        """Run on the whole batch; AttackError where it does not fit this shape, raised, or returned other shapes."""
        self._check_shape(target.input_shape, threat_model.norm)
        space = UnitSpace(target, threat_model)
        follows = any(part.training for part in (self, *self.parts))
        channels = 3 if self.entry.three_channels else 1
        host = HostModule(space.target, channels=channels, positive=self.positive, follows=follows)
        images = host.enter(space.enter(inputs))
        with seeded_globals(draw_seed(generator)), frozen(target.module), warnings.catch_warnings():
            # SparseFool passes a tensor to numpy in a way that numpy 2 deprecates.
            warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torchattacks\.")
            attack = self._make(host if host.needed else space.target.module, space)
            with raised_inside("torchattacks", self.name):
                out = attack(images, labels.clone())
        candidates = check_candidates(self.name, out)
        if candidates.shape != images.shape:
            raise AttackError(f"{self.name}: returned shape {tuple(out.shape)} for images {tuple(images.shape)}")
        # EAD can leave [0, 1], see its entry; the others stay in it.
        return space.leave(host.leave(candidates.clamp(0, 1)), inputs)

    def _check_shape(self, shape: tuple[int, ...], norm: str) -> None:
        entry = self.entry
        check_shape(self.name, shape, norm=norm, three_channels=entry.three_channels, square=entry.square)
        for part in self.parts:
            part._check_shape(shape, norm)

    def _make(self, module: nn.Module, space: UnitSpace) -> Any:
        """Make the attack object, bound to the module."""
        settings = self._completed(space)
        with constructed("torchattacks", self.made_of, settings):
            bound: Any = [part._make(module, space) for part in self.parts] if self.parts else module
            attack = self.made_of(bound, **settings)
        if self.training:
            attack.set_model_training_mode(**self.training)
        if self.entry.next_class:
            classes = space.target.classes
            attack.set_mode_targeted_by_function(lambda _, labels: (labels + 1) % classes, quiet=True)
        return attack

    def _completed(self, space: UnitSpace) -> dict[str, Any]:
        epsilon, norm = space.threat_model.epsilon, space.threat_model.norm
        settings = dict(self.settings)
        for key in _EPSILONS:
            self._compare(key, epsilon)
        self._compare("norm", norm, NORM_NAMES)
        wanted = {**dict.fromkeys(_EPSILONS, epsilon), "norm": NORM_VALUES[norm], "verbose": False}
        for key in [key for key in wanted if key in self._parameters]:
            settings.setdefault(key, wanted[key])
        if "alpha" in self._parameters and "alpha" not in settings:
            default, first = self._parameters["alpha"].default, self.entry.first_step
            settings["alpha"] = self._step_size(default, settings, steps="steps", first=first, limit=1.0)
        if "seed" in self._parameters and settings.get("seed") is None:
            settings["seed"] = int(torch.randint(2**31, ()))
        if "n_classes" in self._parameters:
            settings["n_classes"] = min(self._value(settings, "n_classes"), space.target.classes)
        return settings


def from_class(attack_class: type, settings: object, *, name: str | None = None) -> TorchattacksAttack:
    """Make an attack from a torchattacks class and the keyword arguments of its constructor, without the model."""
    entry, settings, label = CATALOGUE.entry(attack_class), check_settings(settings), attack_class.__name__
    check_keywords(attack_class, settings, argument="attack", label=label, hidden=("self", "model"))
    check_ranges(attack_class, settings)
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
    CATALOGUE.entry(type(attack))
    made = from_class(type(attack), _settings_of(attack), name=name)
    made.training = _training_of(attack)
    return made


def _settings_of(attack: Any) -> dict[str, Any]:
    """Return an object's settings that differ from its class's defaults, without those of its model.

    The number of classes and the normalization belong to the model the object was bound to and are left out; targets
    take inputs as they are. The device is left out too.

    Raises:
        InvalidArgumentError: It is in a targeted mode.
    """
    if attack.targeted:
        raise InvalidArgumentError(
            "attack",
            f"torchattacks' {type(attack).__name__} in mode {attack.attack_mode!r}",
            "the default mode (set_mode_default()): any class but the true one counts, and labels are true labels",
        )
    if attack.normalization_used is not None:
        warn(
            f"{type(attack).__name__}: set_normalization_used belongs to the model it was bound to and is left out; "
            "targets are attacked on inputs as they take them, and a network that needs normalized ones has to do that "
            "itself"
        )

    def read(key: str, parameter: inspect.Parameter) -> Any:
        if key in ("model", "n_classes"):
            return MISSING
        noise = getattr(attack, "noise_func", None)
        if noise is not None and key in ("noise_type", "noise_sd"):
            return getattr(noise, key)
        return getattr(attack, _PLACES.get((type(attack).__name__, key), key), MISSING)

    return settings_of(attack, read)


def _training_of(attack: Any) -> dict[str, bool]:
    """Return the values of ``set_model_training_mode``; empty where it was not called."""
    modes = {name: bool(getattr(attack, f"_{name}")) for name in _MODES}
    return modes if any(modes.values()) else {}


def _part(value: object) -> TorchattacksAttack:
    if isinstance(value, str):
        spec = parse_call(value if ":" in value.partition("(")[0] else f"torchattacks:{value}", argument="attacks")
        if spec.scope != "torchattacks":
            raise InvalidArgumentError("attacks", value, "names of torchattacks' attacks, as in PGD(steps=3)")
        return from_class(CATALOGUE.find(spec.name), spec.arguments)
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], type):
        return from_class(value[0], value[1])
    if isinstance(value, type):
        return from_class(value, {})
    if isinstance(value, torchattacks.attack.Attack):
        return from_object(value)
    raise InvalidArgumentError("attacks", type(value).__name__, "names, classes or objects of torchattacks' attacks")
