"""ART attacks as attacks of this project: made for each target, because ART binds an attack to an estimator."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robust_ext.adapters.art.catalogue import NORM_NAMES, NORM_VALUES, Entry, fewest_classes, find_entry
from robust_ext.adapters.art.library import art
from robust_ext.attacks.base import Attack, AttackTraits, draw_seed
from robust_ext.errors import AttackError, InvalidArgumentError, MissingDependencyError
from robust_ext.random_streams import seeded_globals
from robust_ext.specification import check_keywords
from robust_ext.target import Target
from robust_ext.threat import ThreatModel

_LOGGER = logging.getLogger(__name__)
_ESTIMATORS = ("estimator", "classifier")
_MISSING = object()


class ArtAttack(Attack):
    """An ART attack class with settings, made anew for each target and threat model.

    Settings that are left out follow the threat model where the class has them: ``eps`` is epsilon, ``norm`` the
    norm. ``eps_step`` is ART's default as long as that is below epsilon, and otherwise the larger of a tenth of epsilon
    and 2.5 epsilon over the iterations (APGD and its kin, which only shorten their steps: epsilon). The batch size is
    at least the number of inputs, ``targeted`` is False and ``verbose`` is False.

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
        """Run the attack on the whole batch, see :meth:`robust_ext.attacks.base.Attack.generate`.

        Raises:
            InvalidArgumentError: The class does not accept these settings.
            AttackError: ART or the attack raised, or returned something else than an array.
            MissingDependencyError: The attack needs a package that is not installed.
        """
        x = inputs.detach().cpu().numpy().astype(np.float32)
        y = nn.functional.one_hot(labels.detach().cpu(), target.classes).numpy().astype(np.float32)
        # ART takes the current GPU, whichever the target is on.
        device = torch.cuda.device(target.device) if target.device.type == "cuda" else nullcontext()
        with seeded_globals(draw_seed(generator)), _seeded_states(), device, warnings.catch_warnings():
            # Square (l2), among others, divides by zero where nothing has changed yet, and goes on.
            warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"art\.attacks\.")
            attack = self._make(target, threat_model, len(x))
            try:
                out = attack.generate(x=x, y=y)
            except ImportError as error:
                package = error.name or "the package"
                raise MissingDependencyError(f"{self.name}: {error}; pip install {package}") from error
            except Exception as error:
                raise AttackError(f"{self.name}: ART raised {type(error).__name__}: {error}") from error
        if not isinstance(out, np.ndarray):
            raise AttackError(f"{self.name}: returned {type(out).__name__}, expected an array of candidates")
        return torch.from_numpy(np.ascontiguousarray(out, dtype=np.float32)).to(target.device)

    def _make(self, target: Target, threat_model: ThreatModel, samples: int) -> Any:
        """The attack object, bound to an estimator around the target."""
        module = _Subject(target.module, classes=target.classes, probabilities=self.entry.probabilities)
        estimator = _estimator(module, target)
        settings = self._completed(threat_model, samples)
        try:
            attack = self._construct(settings, estimator)
            # The attacks inside AutoAttack show progress bars of their own.
            for part in getattr(attack, "attacks", ()):
                if hasattr(part, "verbose"):
                    part.verbose = False
        except Exception as error:
            shown = ", ".join(f"{key}={value!r}" for key, value in settings.items())
            expected = f"settings it accepts; ART raised {type(error).__name__}: {error}"
            raise InvalidArgumentError("attack", f"{self.attack_class.__name__}({shown})", expected) from error
        module.answers = True
        return attack

    def _construct(self, settings: Mapping[str, Any], estimator: Any) -> Any:
        first = next(name for name in (*_ESTIMATORS, *self._parameters) if name in self._parameters)
        bound = {key: _rebound(value, estimator) for key, value in settings.items()}
        return self.attack_class(**{first: estimator}, **bound)

    def _completed(self, threat_model: ThreatModel, samples: int) -> dict[str, Any]:
        settings = dict(self.settings)
        wanted = {
            "eps": threat_model.epsilon,
            "norm": NORM_VALUES[threat_model.norm],
            "targeted": False,
            "verbose": False,
        }
        for key, value in wanted.items():
            if key in self._parameters:
                settings.setdefault(key, value)
        self._compare("eps", self.settings.get("eps"), threat_model.epsilon)
        self._compare("norm", NORM_NAMES.get(self.settings.get("norm")), threat_model.norm)
        if "eps_step" in self._parameters and "eps_step" not in settings:
            settings["eps_step"] = self._step(settings)
        if "batch_size" in self._parameters and self.traits.rows != "single":
            settings["batch_size"] = max(samples, self._value(settings, "batch_size"), 1)
        return settings

    def _compare(self, key: str, chosen: object, wanted: object) -> None:
        if key in self.settings and chosen != wanted:
            message = "%s: %s=%r was set and differs from the threat model's %r; candidates are judged by the latter"
            _LOGGER.warning(message, self.name, key, self.settings[key], wanted)

    def _step(self, settings: Mapping[str, Any]) -> float:
        epsilon, default = settings.get("eps"), self._parameters["eps_step"].default
        if not isinstance(epsilon, (int, float)) or (isinstance(default, float) and default < epsilon):
            return float(default)
        if self.entry.first_step is not None:
            return self.entry.first_step * epsilon
        iterations = self._value(settings, "max_iter") if "max_iter" in self._parameters else 0
        return max(epsilon / 10, 2.5 * epsilon / iterations if iterations else 0.0)

    def _value(self, settings: Mapping[str, Any], key: str) -> Any:
        return settings.get(key, self._parameters[key].default)


class _Subject(nn.Module):
    """The target as ART meets it.

    ART probes a model with a row of ones while it constructs some attacks, to see whether it returns probabilities.
    Until ``answers`` is set such a probe is answered with zeros, which are none, and the target is not asked: a probe
    is no query of the attack, and a target may accept nothing but the rows of its batch. On numpy 2 some of ART's
    attacks send float64, so inputs are cast.
    """

    def __init__(self, module: nn.Module, *, classes: int, probabilities: bool) -> None:
        super().__init__()
        self.module = module
        self.classes = classes
        self.probabilities = probabilities
        self.answers = False
        self.training = module.training

    def forward(self, x: Tensor) -> Tensor:
        if not self.answers:
            return x.new_zeros(len(x), self.classes)
        logits: Tensor = self.module(x.to(torch.float32))
        return logits.softmax(1) if self.probabilities else logits


@contextmanager
def _seeded_states() -> Iterator[None]:
    """Seed from numpy's global generator what would take its seed from the system.

    HopSkipJump and Boundary, among others, make a ``RandomState()`` of their own, which no global seed reaches.
    """
    original = np.random.RandomState

    class Seeded(original):  # type: ignore[misc,valid-type]
        def __init__(self, seed: Any = None) -> None:
            super().__init__(np.random.randint(2**31) if seed is None else seed)

    np.random.RandomState = Seeded  # type: ignore[misc]
    try:
        yield
    finally:
        np.random.RandomState = original  # type: ignore[misc]


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
    check_keywords(attack_class, settings, argument="attack", label=label, hidden=("self", *_ESTIMATORS))
    if settings.get("targeted"):
        expected = "targeted=False: attacks are given true labels, which a targeted one would aim at"
        raise InvalidArgumentError("attack", f"{label}(targeted=True)", expected)
    return ArtAttack(attack_class, settings, name=name or label, entry=entry)


def from_object(attack: Any, *, name: str | None = None) -> ArtAttack:
    """Make an attack from an ART attack object: its class, and its settings that differ from the class's defaults.

    Raises:
        InvalidArgumentError: It is of a class that cannot be used here.
    """
    return from_class(type(attack), _settings_of(attack), name=name)


def _settings_of(attack: Any) -> dict[str, Any]:
    settings = {}
    for key, parameter in inspect.signature(type(attack)).parameters.items():
        value = _read(attack, key)
        if key in _ESTIMATORS or value is _MISSING or isinstance(value, art.estimators.BaseEstimator):
            continue
        # What the constructor filled in for None belongs to the old estimator: a bound loss, a default list of attacks.
        filled_in = parameter.default is None and (_belongs_to_art(value) or key == "attacks")
        if not filled_in and not _same(value, parameter.default):
            settings[key] = value
    return settings


def _read(attack: Any, key: str) -> Any:
    places = (attack, getattr(attack, "_attack", None))
    names = (f"_{key}_arg", key, f"_{key}")
    return next((getattr(place, name) for place in places for name in names if hasattr(place, name)), _MISSING)


def _belongs_to_art(value: object) -> bool:
    return callable(value) and str(getattr(value, "__module__", "")).split(".")[0] == "art"


def _same(value: Any, default: Any) -> bool:
    if isinstance(value, np.ndarray) or isinstance(default, np.ndarray):
        return np.array_equal(value, default)
    return value is default or (type(value) is type(default) and bool(value == default))


def _rebound(value: Any, estimator: Any) -> Any:
    """Attacks among the settings are bound to the new estimator too."""
    if isinstance(value, art.attacks.EvasionAttack):
        inner = from_object(value)
        return inner._construct(inner.settings, estimator)
    if isinstance(value, (list, tuple)):
        return type(value)(_rebound(entry, estimator) for entry in value)
    return value


def _traits(entry: Entry, settings: Mapping[str, Any]) -> AttackTraits:
    norms = entry.traits.norms
    if NORM_NAMES.get(settings.get("norm")) not in (None, *norms):
        raise InvalidArgumentError("attack", f"norm={settings['norm']!r}", f"a norm among {', '.join(norms)}")
    return replace(entry.traits, minimum_classes=fewest_classes(entry, settings))


def _estimator(module: nn.Module, target: Target) -> Any:
    if target.device.type not in ("cpu", "cuda"):
        raise AttackError(
            f"ART runs on the CPU and on CUDA devices, and the target is on {target.device}; move the model"
        )
    return art.estimators.classification.PyTorchClassifier(
        model=module,
        loss=nn.CrossEntropyLoss(),
        optimizer=None,
        input_shape=target.input_shape,
        nb_classes=target.classes,
        clip_values=target.bounds,
        device_type="gpu" if target.device.type == "cuda" else "cpu",
    )
