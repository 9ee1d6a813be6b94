"""ART attacks as attacks of this project: made for each target, because ART binds an attack to an estimator."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robust_ext.adapters.art.catalogue import NORM_NAMES, NORM_VALUES, fewest_classes, find_entry
from robust_ext.adapters.art.entries import Entry
from robust_ext.adapters.art.estimator import Subject, make_estimator, without_new_hooks
from robust_ext.adapters.art.guards import constructible, repair, seeded_states, without_bars
from robust_ext.adapters.art.library import art
from robust_ext.adapters.art.objects import ESTIMATORS, settings_of
from robust_ext.adapters.art.settings import Scene, nothing
from robust_ext.adapters.starting_points import starting_points
from robust_ext.adapters.unit_space import UnitSpace
from robust_ext.attacks.base import Attack, AttackTraits, draw_seed
from robust_ext.attacks.running import restore_failed
from robust_ext.core.errors import AttackError, AttackRefusedError, InvalidArgumentError, MissingDependencyError
from robust_ext.core.random import seeded_globals
from robust_ext.core.specification import check_keywords
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel

_LOGGER = logging.getLogger(__name__)
# Where what is installed is called otherwise than what is imported.
_DISTRIBUTIONS = {"cv2": "opencv-python-headless"}


class ArtAttack(Attack):
    """An ART attack class with settings, made anew for each target and threat model.

    Settings that are left out follow the threat model where the class has them: ``eps`` is epsilon, ``norm`` the
    norm. ``eps_step`` is ART's default times the width of the bounds as long as that is below epsilon, and otherwise
    the larger of a tenth of epsilon and 2.5 epsilon over the iterations (APGD and its kin, which only shorten their
    steps: epsilon). The batch size is at least the number of inputs, ``targeted`` is False and ``verbose`` is False.
    What ART has no default for, or one that does nothing, is filled in as :mod:`robust_ext.adapters.art.settings` says.

    Attacks that need rows one at a time are given them so. Those that aim at a class are given the one that comes
    second at the input. Where ART returns the random start of a row on which it failed, the row's input is returned.

    Args:
        attack_class: The class.
        settings: Keyword arguments of its constructor, without the estimator.
        name: How tables call it.
        entry: What is known of the class.
    """

    def __init__(self, attack_class: type, settings: Mapping[str, Any], *, name: str, entry: Entry) -> None:
        self.attack_class = attack_class
        self.settings = dict(settings)
        self.name = name
        self.entry = entry
        self.traits = _traits(entry, self.settings)
        self._parameters = inspect.signature(attack_class).parameters

    @property
    def description(self) -> str:
        """The class and the settings that were given."""
        shown = ", ".join(f"{key}={value!r}" for key, value in sorted(self.settings.items()))
        return f"ART {self.attack_class.__name__}({shown})"

    def generate(
        self,
        target: Target,
        inputs: Tensor,
        labels: Tensor,
        *,
        threat_model: ThreatModel,
        generator: torch.Generator,
    ) -> Tensor:
        """Run the attack on the batch, see :meth:`robust_ext.attacks.base.Attack.generate`.

        Raises:
            InvalidArgumentError: The class does not accept these settings.
            AttackRefusedError: The class does not work with inputs of this shape.
            AttackError: ART or the attack raised, or returned something else than an array.
            MissingDependencyError: The attack needs a package that is not installed.
        """
        channels = self.entry.channels
        if channels and (len(target.input_shape) != 3 or target.input_shape[0] != channels):
            raise AttackRefusedError(
                f"{self.name} works on images of shape ({channels}, height, width) only, and this target takes "
                f"{target.input_shape}; choose another attack"
            )
        self._compare("eps", self.settings.get("eps"), threat_model.epsilon)
        self._compare("norm", NORM_NAMES.get(self.settings.get("norm")), threat_model.norm)
        parts = [slice(i, i + 1) for i in range(len(inputs))] if self.traits.batching == "single" else [slice(None)]
        space = UnitSpace(target, threat_model) if self.entry.unit_space else None
        candidates = [
            self._generate(
                target if space is None else space.target,
                inputs[part] if space is None else space.enter(inputs[part]),
                labels[part],
                threat_model=threat_model if space is None else space.threat_model,
                generator=generator,
                unit=1.0 if space is None else threat_model.width,
            )
            for part in parts
        ]
        out = torch.cat(candidates) if candidates else inputs.clone()
        if out.shape != inputs.shape:
            return out
        if space is not None:
            out = space.leave(out, inputs)
        return restore_failed(out, inputs, labels, target=target) if self.traits.failure == "start" else out

    def _generate(
        self,
        target: Target,
        inputs: Tensor,
        labels: Tensor,
        *,
        threat_model: ThreatModel,
        generator: torch.Generator,
        unit: float,
    ) -> Tensor:
        entry = self.entry
        aims, guides = labels, None
        if entry.aims:
            aims = runner_up(target, inputs, labels)
        if entry.guides or entry.starts:
            guides, found = starting_points(target, inputs, labels, generator=generator)
            if entry.starts and not bool(found.all()):
                return inputs.clone()
            if entry.aims:
                aims = runner_up(target, guides, labels)
        # ART takes the current GPU, whichever the target is on.
        device = torch.cuda.device(target.device) if target.device.type == "cuda" else nullcontext()
        with (
            seeded_globals(draw_seed(generator)),
            seeded_states(),
            without_bars(),
            device,
            without_new_hooks(target.module),
            warnings.catch_warnings(),
        ):
            # Square (l2), among others, divides by zero where nothing has changed yet, and goes on.
            warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"art\.attacks\.")
            # With several random starts, PGD hands tensors to numpy 2 in a way that it puts up with for now.
            warnings.filterwarnings("ignore", message="__array__ implementation doesn't", category=DeprecationWarning)
            attack = self._make(target, Scene(inputs=inputs, threat_model=threat_model, unit=unit))
            try:
                out = self._call(attack, inputs, aims, guides, target.classes)
            except ImportError as error:
                raise self._missing(error) from error
            except Exception as error:
                raise AttackError(f"{self.name}: ART raised {type(error).__name__}: {error}") from error
        if not isinstance(out, np.ndarray):
            raise AttackError(f"{self.name}: returned {type(out).__name__}, expected an array of candidates")
        return torch.from_numpy(np.ascontiguousarray(out, dtype=np.float32)).to(target.device)

    def _call(self, attack: Any, inputs: Tensor, aims: Tensor, guides: Tensor | None, classes: int) -> Any:
        entry = self.entry
        x, y = _array(inputs), _array(nn.functional.one_hot(aims, classes))
        extras: dict[str, Any] = {}
        if entry.indices:
            y = aims.cpu().numpy()
        if guides is not None and entry.guides:
            extras[entry.guides] = _array(guides)
        elif guides is not None:
            start = _array(guides)
            attack._find_random_adversarial = lambda x, y: start
        if entry.channels_last:
            x = np.moveaxis(x, 1, -1)
        out = attack.generate(**{"x": x, "y": y, **extras})
        if entry.patch:
            # Placed, turned and sized at random, within what the attack was made for.
            out = attack.apply_patch(x, scale=getattr(attack, "_attack", attack).scale_max)
        return np.moveaxis(out, -1, 1) if entry.channels_last else out

    def _make(self, target: Target, scene: Scene) -> Any:
        """The attack object, bound to an estimator around the target."""
        entry = self.entry
        subject = Subject(target, probabilities=entry.probabilities, channels_last=entry.channels_last)
        estimator = make_estimator(subject, target)
        settings = self._completed(scene)
        try:
            attack = self._construct(settings, estimator, scene)
        except ImportError as error:
            raise self._missing(error) from error
        except Exception as error:
            shown = ", ".join(f"{key}={value!r}" for key, value in settings.items())
            expected = f"settings it accepts; ART raised {type(error).__name__}: {error}"
            raise InvalidArgumentError("attack", f"{self.attack_class.__name__}({shown})", expected) from error
        repair(attack)
        subject.answers = True
        return attack

    def _missing(self, error: ImportError) -> MissingDependencyError:
        package = _DISTRIBUTIONS.get(error.name or "", error.name or "the package")
        return MissingDependencyError(f"{self.name}: {error}; pip install {package}")

    def _construct(self, settings: Mapping[str, Any], estimator: Any, scene: Scene) -> Any:
        first = next(name for name in (*ESTIMATORS, *self._parameters) if name in self._parameters)
        bound = {key: _rebound(value, estimator, scene) for key, value in settings.items()}
        return constructible(self.attack_class)(**{first: estimator}, **bound)

    def _completed(self, scene: Scene) -> dict[str, Any]:
        settings, threat_model = dict(self.settings), scene.threat_model
        for key in self.entry.distances:
            if key in settings and scene.unit != 1:
                settings[key] = settings[key] / scene.unit
        wanted = {
            "eps": threat_model.epsilon,
            "norm": NORM_VALUES[threat_model.norm],
            "targeted": self.entry.aims,
            "verbose": False,
            **self.entry.fill(scene),
        }
        for key, value in wanted.items():
            if key in self._parameters:
                settings.setdefault(key, value)
        if "eps_step" in self._parameters and "eps_step" not in settings:
            settings["eps_step"] = self._step(settings, threat_model.width)
        if "batch_size" in self._parameters and self.traits.batching != "single":
            settings["batch_size"] = max(len(scene.inputs), self._value(settings, "batch_size"), 1)
        return settings

    def _compare(self, key: str, chosen: object, wanted: object) -> None:
        if key in self.settings and chosen != wanted:
            message = "%s: %s=%r was set and differs from the threat model's %r; candidates are judged by the latter"
            _LOGGER.warning(message, self.name, key, self.settings[key], wanted)

    def _step(self, settings: Mapping[str, Any], width: float) -> float:
        # ART's defaults are those of inputs in [0, 1].
        epsilon, default = settings.get("eps"), self._parameters["eps_step"].default * width
        if not isinstance(epsilon, (int, float)) or default < epsilon:
            return float(default)
        if self.entry.first_step is not None:
            return self.entry.first_step * epsilon
        iterations = self._value(settings, "max_iter") if "max_iter" in self._parameters else 0
        return max(epsilon / 10, 2.5 * epsilon / iterations if iterations else 0.0)

    def _value(self, settings: Mapping[str, Any], key: str) -> Any:
        return settings.get(key, self._parameters[key].default)


def runner_up(target: Target, points: Tensor, labels: Tensor) -> Tensor:
    """The class with the highest logit among all but the label's, int64 ``(N,)``; one query of the whole batch."""
    with torch.no_grad():
        logits: Tensor = target.module(points)
    return logits.scatter(1, labels.view(-1, 1), -torch.inf).argmax(1)


def from_class(attack_class: type, settings: object, *, name: str | None = None) -> ArtAttack:
    """Make an attack from an ART class and the keyword arguments of its constructor, without the estimator.

    Raises:
        InvalidArgumentError: The class cannot be used here, a keyword is unknown, or ``targeted`` is set.
    """
    entry = find_entry(attack_class)
    if not isinstance(settings, Mapping):
        raise InvalidArgumentError(
            "attack", f"settings of type {type(settings).__name__}", "a dict of keyword arguments"
        )
    label = attack_class.__name__
    given = {**dict.fromkeys(_filled_in(attack_class, entry)), **settings}
    check_keywords(attack_class, given, argument="attack", label=label, hidden=("self", *ESTIMATORS))
    if not entry.aims and settings.get("targeted"):
        expected = "targeted=False: attacks are given true labels, which a targeted one would aim at"
        raise InvalidArgumentError("attack", f"{label}(targeted=True)", expected)
    if entry.aims and not settings.get("targeted", True):
        expected = "targeted=True: it is given the class that comes second at the input, to aim at"
        raise InvalidArgumentError("attack", f"{label}(targeted=False)", expected)
    return ArtAttack(attack_class, settings, name=name or label, entry=entry)


def from_object(attack: Any, *, name: str | None = None) -> ArtAttack:
    """Make an attack from an ART attack object: its class, and its settings that differ from the class's defaults.

    Raises:
        InvalidArgumentError: It is of a class that cannot be used here.
    """
    return from_class(type(attack), settings_of(attack), name=name)


def _filled_in(attack_class: type, entry: Entry) -> list[str]:
    """Settings without a default in ART, which the entry fills in."""
    if entry.fill is nothing:
        return []
    parameters = inspect.signature(attack_class).parameters.values()
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.name not in ESTIMATORS]


def _array(values: Tensor) -> Any:
    return values.detach().cpu().numpy().astype(np.float32)


def _rebound(value: Any, estimator: Any, scene: Scene) -> Any:
    """Attacks among the settings are bound to the new estimator too, and completed in the same way."""
    inner = None
    if isinstance(value, art.attacks.EvasionAttack):
        inner = from_object(value)
    elif isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], type):
        inner = from_class(*value)
    elif isinstance(value, (list, tuple)):
        return type(value)(_rebound(part, estimator, scene) for part in value)
    return value if inner is None else inner._construct(inner._completed(scene), estimator, scene)


def _traits(entry: Entry, settings: Mapping[str, Any]) -> AttackTraits:
    norms = entry.traits.norms
    if NORM_NAMES.get(settings.get("norm")) not in (None, *norms):
        raise InvalidArgumentError("attack", f"norm={settings['norm']!r}", f"a norm among {', '.join(norms)}")
    return replace(entry.traits, minimum_classes=fewest_classes(entry, settings))
