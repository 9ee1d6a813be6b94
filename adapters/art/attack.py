"""ART attacks as attacks of this project: made for each target, because ART binds an attack to an estimator."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robust_ext.adapters.art.entries import ENTRIES, UNUSABLE, Entry
from robust_ext.adapters.art.library import art, constructible, repair, seeded_states, without_bars
from robust_ext.adapters.art.model import HostModule, make_estimator, without_new_hooks
from robust_ext.adapters.art.settings import AttackContext, nothing
from robust_ext.adapters.catalogue import Catalogue, classes_in
from robust_ext.adapters.sklearn import fitted_tree
from robust_ext.adapters.wrapped import (
    MISSING,
    WrappedAttack,
    checked,
    constructed,
    raised_inside,
    refuse_targets,
    restore_failed,
    settings_of,
    starting_points,
)
from robust_ext.attacks._common.rows import runner_up
from robust_ext.attacks.base import AttackTraits, draw_seed
from robust_ext.attacks.running import UnitSpace
from robust_ext.core.errors import AttackError, AttackRefusedError, InvalidArgumentError
from robust_ext.core.random import seeded_globals
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel

_ESTIMATORS = ("estimator", "classifier")
NORM_VALUES: Mapping[str, float] = {"linf": float("inf"), "l2": 2, "l1": 1}
NORM_NAMES: Mapping[Any, str] = {"inf": "linf", **{value: norm for norm, value in NORM_VALUES.items()}}
CATALOGUE = Catalogue(
    library="art",
    place="art.attacks.evasion",
    members=classes_in(art.attacks.evasion, art.attacks.EvasionAttack),
    base=art.attacks.EvasionAttack,
    entries=ENTRIES,
    unusable=UNUSABLE,
    others=Entry(traits=AttackTraits(batching="single")),
)


class ArtAttack(WrappedAttack):
    """An ART attack class with settings, built for each target and threat model.

    Settings that are left out follow the threat model where the class has them: ``eps`` is epsilon, ``norm`` the
    norm. ``eps_step`` is ART's default times the width of the bounds as long as that is below epsilon, and otherwise
    the larger of a tenth of epsilon and 2.5 epsilon over the iterations (APGD and its kin, which only shorten their
    steps: epsilon). The batch size is at least the number of inputs, ``targeted`` is False and ``verbose`` is False.
    What ART has no default for, or one that does nothing, is filled in by :mod:`robust_ext.adapters.art.settings`.

    Attacks that need samples one at a time are given them so. Those that aim at a class are given the one that comes
    second at the input. Where ART returns the random start of a sample on which it failed, the input is returned.
    """

    title = "ART"
    made_of: type
    entry: Entry

    def __init__(self, attack_class: type, settings: Mapping[str, Any], *, name: str, entry: Entry) -> None:
        super().__init__(attack_class, settings, name=name, entry=entry, traits=_traits_of(entry, settings))
        self.unlisted = not CATALOGUE.owns(attack_class)

    @property
    def _can_aim(self) -> bool:
        # Points of a target's class to start at, or to be guided by, are not searched for.
        needs_points = self.entry.starts or self.entry.guides or self.made_of.__name__ == "SignOPTAttack"
        return (super()._can_aim or self.entry.aims) and not needs_points

    def search(
        self, target: Target, inputs: Tensor, labels: Tensor, *, threat_model: ThreatModel, generator: torch.Generator
    ) -> Tensor:
        """Run on the batch; AttackRefusedError where the class does not work with inputs of this shape."""
        channels, unit_space = self.entry.channels, self.entry.unit_space
        if channels > 1 and (len(target.input_shape) != 3 or target.input_shape[0] != channels):
            raise AttackRefusedError(
                f"{self.name} works on images of shape ({channels}, height, width) only, and this target takes "
                f"{target.input_shape}; choose another attack"
            )
        self._compare("eps", threat_model.epsilon)
        self._compare("norm", threat_model.norm, NORM_NAMES)
        space = UnitSpace(target, threat_model, needed=unit_space)
        size = 1 if self.traits.batching == "single" else len(inputs)
        entered, parts = space.enter(inputs), []
        for start in range(0, len(inputs), size or 1):
            x, y = entered[start : start + size], labels[start : start + size]
            aims, guides = self._aims(space.target, x, y, generator)
            if aims is None:
                parts.append(x)
                continue
            with self._surroundings(target, draw_seed(generator)):
                unit = threat_model.width if unit_space else 1.0
                context = AttackContext(
                    inputs=x, threat_model=space.threat_model, unit=unit, aims=target.criterion.aims
                )
                attack = self._make(space.target, context)
                given = self._arguments(attack, space.target, x, aims, guides)
                with raised_inside("ART", self.name):
                    out = attack.generate(**given)
                    if self.entry.patch:
                        # Placed, turned and sized at random, within what the attack was made for.
                        out = attack.apply_patch(given["x"], scale=getattr(attack, "_attack", attack).scale_max)
            parts.append(self._tensor(out, target.device))
        found = torch.cat(parts) if parts else inputs.clone()
        if found.shape != inputs.shape:
            return found
        found = space.leave(found, inputs)
        return restore_failed(found, inputs, labels, target=target) if self.traits.failure == "start" else found

    def _aims(
        self, target: Target, inputs: Tensor, labels: Tensor, generator: torch.Generator
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the labels that ART is given, and points of other classes; no labels where it would not end."""
        entry, guides = self.entry, None
        aims = runner_up(target, inputs, labels) if entry.aims and not target.criterion.aims else labels
        if entry.guides or entry.starts:
            guides, found = starting_points(target, inputs, labels, generator=generator)
            if entry.starts and not bool(found.all()):
                return None, None
            if entry.aims:
                aims = runner_up(target, guides, labels)
        return aims, guides

    def _arguments(
        self, attack: Any, target: Target, inputs: Tensor, aims: Tensor, guides: Tensor | None
    ) -> dict[str, Any]:
        """Return the arguments of ``generate``; a start replaces the attack's own random one."""
        entry, x = self.entry, _array(inputs)
        y = aims.cpu().numpy() if entry.indices else _array(nn.functional.one_hot(aims, target.classes))
        given = {"x": np.moveaxis(x, 1, -1) if entry.channels_last else x, "y": y}
        if guides is not None and entry.guides:
            given[entry.guides] = _array(guides)
        elif guides is not None:
            attack._find_random_adversarial = lambda *_, **__: _array(guides)
        return given

    def _tensor(self, out: object, device: torch.device) -> Tensor:
        if not isinstance(out, np.ndarray):
            raise AttackError(f"{self.name}: returned {type(out).__name__}, expected an array of candidates")
        out = np.moveaxis(out, -1, 1) if self.entry.channels_last else out
        return torch.from_numpy(np.ascontiguousarray(out, dtype=np.float32)).to(device)

    @contextmanager
    def _surroundings(self, target: Target, seed: int) -> Iterator[None]:
        """Set up seeds, the target's GPU and silence for ART; removes its hooks."""
        # ART takes the current GPU, whichever the target is on.
        device = torch.cuda.device(target.device) if target.device.type == "cuda" else nullcontext()
        hooks = without_new_hooks(target.module)
        with seeded_globals(seed), seeded_states(), without_bars(), device, hooks, warnings.catch_warnings():
            # Square (l2), among others, divides by zero where nothing has changed yet, and goes on.
            warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"art\.attacks\.")
            # With several random starts, PGD hands tensors to numpy 2 in a way that it puts up with for now.
            warnings.filterwarnings("ignore", message="__array__ implementation doesn't", category=DeprecationWarning)
            yield

    def _make(self, target: Target, context: AttackContext) -> Any:
        """Make the attack object, bound to an estimator around the target."""
        module = HostModule(target, probabilities=self.entry.probabilities, channels_last=self.entry.channels_last)
        estimator, settings = make_estimator(module, target), self._completed(context)
        with constructed("ART", self.made_of, settings):
            attack = self._construct(settings, estimator, context)
        repair(attack)
        module.constructed = True
        return attack

    def _construct(self, settings: Mapping[str, Any], estimator: Any, context: AttackContext) -> Any:
        first = next(name for name in (*_ESTIMATORS, *self._parameters) if name in self._parameters)
        bound = {key: _rebound(value, estimator, context) for key, value in settings.items()}
        return constructible(self.made_of)(**{first: estimator}, **bound)

    def _completed(self, context: AttackContext) -> dict[str, Any]:
        settings, threat_model = dict(self.settings), context.threat_model
        for key in self.entry.distances:
            if key in settings and context.unit != 1:
                settings[key] = settings[key] / context.unit
        wanted = {
            "eps": threat_model.epsilon,
            "norm": NORM_VALUES[threat_model.norm],
            "targeted": self.entry.aims or context.aims,
            "verbose": False,
        }
        self._fill(settings, {**wanted, **self.entry.fill(context)})
        if "eps_step" in self._parameters and "eps_step" not in settings:
            # ART's defaults are those of inputs in [0, 1].
            default = float(self._parameters["eps_step"].default * threat_model.width)
            settings["eps_step"] = self._step_size(default, settings, steps="max_iter", first=self.entry.first_step)
        if "batch_size" in self._parameters and self.traits.batching != "single":
            settings["batch_size"] = max(len(context.inputs), self._value(settings, "batch_size"), 1)
        return settings


class TreeAttack(ArtAttack):
    """An ART attack that reads the nodes of a decision tree of scikit-learn and sends no queries.

    It moves each input past the thresholds on the way to a leaf of another class, the first that it comes to.
    """

    @property
    def _can_aim(self) -> bool:
        return True

    def search(
        self, target: Target, inputs: Tensor, labels: Tensor, *, threat_model: ThreatModel, generator: torch.Generator
    ) -> Tensor:
        """Run on the tree that the target is; AttackRefusedError where it is another model, or a view of one."""
        tree = fitted_tree(target.module)
        if tree is None:
            raise AttackRefusedError(
                f"{self.name} reads a fitted DecisionTreeClassifier of scikit-learn, and this target is none, or one "
                "behind a readout or limits of entries; choose foolbox:HopSkipJumpAttack or robust_ext:Square"
            )
        estimator = art.estimators.classification.scikitlearn.ScikitlearnDecisionTreeClassifier(tree)
        settings = self._completed(AttackContext(inputs=inputs, threat_model=threat_model))
        with constructed("ART", self.made_of, settings):
            attack = self.made_of(estimator, **settings)
        # Labels are classes to aim at for it; without any it leaves the predicted one.
        aims = labels.cpu().numpy() if target.criterion.aims else None
        with raised_inside("ART", self.name):
            found = attack.generate(_array(inputs.flatten(1)), aims)
        return self._tensor(found, target.device).view_as(inputs).clamp(*target.bounds)


def from_class(attack_class: type, settings: object, *, name: str | None = None) -> ArtAttack:
    """Make an attack from an ART class and the keyword arguments of its constructor, without the estimator."""

    def filled(entry: Entry) -> Mapping[str, Any]:
        """Return the settings without a default in ART, which the entry fills in."""
        if entry.fill is nothing:
            return {}
        parameters = inspect.signature(attack_class).parameters.values()
        empty = inspect.Parameter.empty
        return {one.name: None for one in parameters if one.default is empty and one.name not in _ESTIMATORS}

    entry, settings, label = checked(CATALOGUE, attack_class, settings, hidden=("self", *_ESTIMATORS), filled=filled)
    if not entry.aims:
        refuse_targets(label, settings)
    elif not settings.get("targeted", True):
        expected = "targeted=True: it is given the second most likely class at the input as its target"
        raise InvalidArgumentError("attack", f"{label}(targeted=False)", expected)
    kind = TreeAttack if entry.tree else ArtAttack
    return kind(attack_class, settings, name=name or label, entry=entry)


def from_object(attack: Any, *, name: str | None = None) -> ArtAttack:
    """Make an attack from an ART attack object: its class, and its settings that differ from the class's defaults."""

    def read(key: str, parameter: inspect.Parameter) -> Any:
        places = (attack, getattr(attack, "_attack", None))
        names = (f"_{key}_arg", key, f"_{key}")
        found = (getattr(place, name) for place in places for name in names if hasattr(place, name))
        value = next(found, MISSING)
        if key in _ESTIMATORS or isinstance(value, art.estimators.BaseEstimator):
            return MISSING
        # What the constructor filled in for None belongs to the old estimator: a bound loss, a default list of attacks.
        from_art = callable(value) and str(getattr(value, "__module__", "")).split(".")[0] == "art"
        return MISSING if parameter.default is None and (from_art or key == "attacks") else value

    return from_class(type(attack), settings_of(attack, read), name=name)


def _traits_of(entry: Entry, settings: Mapping[str, Any]) -> AttackTraits:
    """Return the traits of a class under these settings; InvalidArgumentError for a wrong norm."""
    norms = entry.traits.norms
    if NORM_NAMES.get(settings.get("norm")) not in (None, *norms):
        raise InvalidArgumentError("attack", f"norm={settings['norm']!r}", f"a norm among {', '.join(norms)}")
    losses = [settings.get("loss_type")]
    classes = entry.traits.minimum_classes
    for part in settings.get("attacks") or ():
        losses.append(part[1].get("loss_type") if isinstance(part, tuple) else getattr(part, "loss_type", None))
        classes = 2
    return replace(entry.traits, minimum_classes=3 if "difference_logits_ratio" in losses else classes)


def _array(values: Tensor) -> Any:
    return values.detach().cpu().numpy().astype(np.float32)


def _rebound(value: Any, estimator: Any, context: AttackContext) -> Any:
    """Bind attacks among the settings to the new estimator too, and complete them in the same way."""
    inner = None
    if isinstance(value, art.attacks.EvasionAttack):
        inner = from_object(value)
    elif isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], type):
        inner = from_class(*value)
    elif isinstance(value, (list, tuple)):
        return type(value)(_rebound(part, estimator, context) for part in value)
    return value if inner is None else inner._construct(inner._completed(context), estimator, context)
