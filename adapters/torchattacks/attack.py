"""torchattacks' attacks as attacks of this project: made for each target, because an object is bound to its model."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.adapters.catalogue import Catalogue
from robust_ext.adapters.torchattacks.entries import ENTRIES, UNTARGETED, UNUSABLE, Entry
from robust_ext.adapters.torchattacks.target import HostModule, image_shape
from robust_ext.adapters.wrapped import (
    MISSING,
    WrappedAttack,
    check_candidates,
    checked,
    constructed,
    raised_inside,
    settings_of,
    written,
)
from robust_ext.attacks.base import AttackTraits, draw_seed
from robust_ext.attacks.running import UnitSpace
from robust_ext.core.errors import AttackError, InvalidArgumentError, warn
from robust_ext.core.guard import frozen
from robust_ext.core.random import seeded_globals
from robust_ext.core.specification import parse_call
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel

# Its requirements (torchvision, requests, torch pins) are not imported by it; its attacks need torch, numpy and scipy.
torchattacks: Any = importlib.import_module("torchattacks")

NORM_VALUES: Mapping[str, str] = {"linf": "Linf", "l2": "L2", "l1": "L1"}
NORM_NAMES: Mapping[Any, str] = {value: norm for norm, value in NORM_VALUES.items()}
CATALOGUE = Catalogue(
    library="torchattacks",
    place="torchattacks",
    members={
        name: getattr(torchattacks, name)
        for name in sorted(torchattacks.__all__)
        if isinstance(getattr(torchattacks, name), type)
    },
    base=torchattacks.attack.Attack,
    entries=ENTRIES,
    unusable=UNUSABLE,
    others=Entry(traits=AttackTraits(batching="single")),
)
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
        entry = CATALOGUE.entry(attack_class)
        entry = _together(entry, self.parts) if self.parts else _with_settings(entry, own)
        super().__init__(attack_class, own, name=name, entry=entry, traits=entry.traits)
        self.unlisted = not CATALOGUE.owns(attack_class)
        self.positive: bool = entry.positive_for == own.get("loss", "") or any(part.positive for part in self.parts)

    @property
    def description(self) -> str:
        """The class and the settings that were given."""
        shown = written(self.made_of, {**self.settings, **self.training})[:-1]
        if self.parts:
            separator = "" if shown.endswith("(") else ", "
            shown += f"{separator}attacks=[{', '.join(part.description for part in self.parts)}]"
        return f"torchattacks {shown})"

    @property
    def _can_aim(self) -> bool:
        return self.made_of.__name__ not in UNTARGETED and not self.unlisted

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
            if target.criterion.aims:
                attack.set_mode_targeted_by_label(quiet=True)
            with raised_inside("torchattacks", self.name):
                out = attack(images, labels.clone())
        candidates = check_candidates(self.name, out)
        if candidates.shape != images.shape:
            raise AttackError(f"{self.name}: returned shape {tuple(out.shape)} for images {tuple(images.shape)}")
        # EAD can leave [0, 1], see its entry; the others stay in it.
        return space.leave(host.leave(candidates.clamp(0, 1)), inputs)

    def _check_shape(self, shape: tuple[int, ...], norm: str) -> None:
        """Raise AttackError where inputs have too many channels for the class, are not square, or are too small."""
        channels, height, width = image_shape(shape)
        if self.entry.three_channels and channels > 3:
            raise AttackError(
                f"{self.name}: works on images of at most 3 channels, and inputs here are {shape}; use MIFGSM or PGD"
            )
        least = self.entry.square.get(norm)
        if least is not None and (height != width or width < least):
            raise AttackError(
                f"{self.name}: works for {norm} on square images of at least {least} x {least}, and inputs here are "
                f"{shape}; use an attack without that limit, such as PGD, PGDL2 or OnePixel"
            )
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
        self._fill(settings, {**dict.fromkeys(_EPSILONS, epsilon), "norm": NORM_VALUES[norm], "verbose": False})
        if "alpha" in self._parameters and "alpha" not in settings:
            default, first = self._parameters["alpha"].default, self.entry.first_step
            settings["alpha"] = self._step_size(default, settings, steps="steps", first=first, limit=1.0)
        if "seed" in self._parameters and settings.get("seed") is None:
            settings["seed"] = int(torch.randint(2**31, ()))
        if "n_classes" in self._parameters:
            settings["n_classes"] = min(self._value(settings, "n_classes"), space.target.classes)
        return settings


def _with_settings(entry: Entry, settings: Mapping[str, Any]) -> Entry:
    """Return the data on a class with these settings; InvalidArgumentError for a norm that it does not work for."""
    traits = entry.traits
    if entry is not CATALOGUE.others and "norm" in settings and NORM_NAMES.get(settings["norm"]) not in traits.norms:
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


def _together(entry: Entry, parts: Sequence[TorchattacksAttack]) -> Entry:
    """Return the data on a MultiAttack; InvalidArgumentError where its parts have no norm in common."""
    every = [part.entry.traits for part in parts]
    norms = tuple(norm for norm in entry.traits.norms if all(norm in traits.norms for traits in every))
    if not norms:
        listed = ", ".join(f"{part.name} ({' and '.join(part.entry.traits.norms)})" for part in parts)
        raise InvalidArgumentError("attacks", listed, "attacks that have a norm in common")
    # Later parts are given the samples that are left, so none has the full batch in order for certain.
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


def from_class(attack_class: type, settings: object, *, name: str | None = None) -> TorchattacksAttack:
    """Make an attack from a torchattacks class and the keyword arguments of its constructor, without the model."""
    entry, settings, label = checked(CATALOGUE, attack_class, settings, hidden=("self", "model"))
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

    made = from_class(type(attack), settings_of(attack, read), name=name)
    modes = {name: bool(getattr(attack, f"_{name}")) for name in _MODES}
    # Where none is set, set_model_training_mode was not called.
    made.training = modes if any(modes.values()) else {}
    return made


def _part(value: object) -> TorchattacksAttack:
    if isinstance(value, str):
        spec = parse_call(value if ":" in value.partition("(")[0] else f"torchattacks:{value}", argument="attacks")
        if spec.scope != "torchattacks":
            raise InvalidArgumentError("attacks", value, "names of torchattacks' attacks, as in PGD(steps=3)")
        return from_class(CATALOGUE.find(spec.name), spec.arguments)
    if isinstance(value, type):
        value = (value, {})
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], type):
        return from_class(value[0], value[1])
    if isinstance(value, torchattacks.attack.Attack):
        return from_object(value)
    raise InvalidArgumentError("attacks", type(value).__name__, "names, classes or objects of torchattacks' attacks")
