"""Shared parts of the Foolbox classes of this project's attacks."""

from __future__ import annotations

from abc import ABC
from dataclasses import replace
from typing import Any, ClassVar

import eagerpy as ep
import torch
from torch import Tensor

from robust_ext.adapters.building import (
    HostParameter,
    build_attack,
    cannot_aim,
    check_seed,
    draws,
)
from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.adapters.foolbox.model import FoolboxModule
from robust_ext.adapters.module_search import check_starting_points, search_defended, search_module
from robust_ext.attacks.base import draw_seed
from robust_ext.attacks.native import NativeAttack
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import declared
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.core.validation import check_number

_base = foolbox.attacks.base
FixedEpsilonAttack: Any = _base.FixedEpsilonAttack
MinimizationAttack: Any = _base.MinimizationAttack
AttackWithoutDistance: Any = _base.Attack
_NORM_OF_DISTANCE = {getattr(foolbox.distances, norm).p: norm for norm in NORMS}
_EXPECTED = "robust_ext.adapters.foolbox.models.DefendedPyTorchModel"
_STARTS = {True: "random", False: "input", None: None}


class NativeFoolboxAttack(ABC):
    """Base of this project's attacks as Foolbox attacks: everything but the settings.

    Settings are attributes of the names they have in the constructor, ``seed`` among them where an attack draws random
    numbers. Without a ``seed``, randomness follows ``torch.manual_seed``, as everywhere in Foolbox. With one, every
    call draws the same, ``repeat`` included. Models are left as they were, their parameters' gradients included.

    Criteria are :class:`foolbox.criteria.Misclassification`, :class:`foolbox.criteria.TargetedMisclassification` and
    their subclasses. A subclass that adds a condition of its own, such as that a detector accepts a point, is
    attacked for its labels alone, and judged by Foolbox with its condition.

    Detector-aware attacks take a :class:`robust_ext.adapters.foolbox.models.DefendedPyTorchModel`, or any Foolbox model
    of PyTorch whose network holds a :class:`robust_ext.models.defended.Defended` and nothing that changes inputs or
    logits around it: a wrapper with other bounds, or preprocessing outside the classifier, raises an error. Inputs are
    float32. Pass ``Undetected(labels)`` as criterion, and a model that exposes its detector: plain labels would make
    Foolbox count being rejected as a success. Both are attacked alike, for points that are misclassified and let pass;
    labels, and the classes of ``TargetedMisclassification``, are the classifier's own.

    Attributes:
        core: The attack's class in this project.
        parameters: Of the constructor, in order.
    """

    core: ClassVar[type[NativeAttack]]
    parameters: ClassVar[tuple[HostParameter, ...]]
    distance: Any = None
    seed: int | None = None

    def _start(self, **values: Any) -> None:
        vars(self).update(values)
        check_seed(self.seed)
        norms, norm = self.native().traits.norms, self._norm
        if norm not in norms:
            got = f"settings that work for {' and '.join(norms)} only"
            raise InvalidArgumentError(type(self).__name__, got, f"settings that work for {norm}")

    @property
    def _norm(self) -> str:
        return "linf" if self.distance is None else _NORM_OF_DISTANCE[self.distance.p]

    def __repr__(self) -> str:
        """Return all settings as text; tensors show how many images they hold."""
        shown = {name: f"{len(v)} images" if isinstance(v, Tensor) else v for name, v in vars(self).items()}
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in shown.items())})"

    def native(self) -> NativeAttack:
        """Return the attack with the settings of this object.

        Raises:
            InvalidArgumentError: A setting is not accepted.
        """
        settings = [entry for entry in self.parameters if entry.setting is not None]
        values = {str(entry.setting): _core_value(entry, getattr(self, entry.name)) for entry in settings}
        return build_attack(self.core, values, {str(entry.setting): entry.name for entry in settings})

    def _perturb(
        self, attack: NativeAttack, model: Any, inputs: Any, criterion: Any, *, epsilon: float, **given: Any
    ) -> Any:
        """Return candidates for a batch; ``given`` may hold references and starting points."""
        x, restore_type = ep.astensor_(inputs)
        criterion_ = _base.get_criterion(criterion)
        reason = cannot_aim(attack) if hasattr(criterion_, "target_classes") else None
        if reason is not None:
            expected = f"labels or Misclassification for a {type(self).__name__}: {reason}"
            raise InvalidArgumentError("criterion", repr(criterion_), expected)
        raw = torch_tensor("inputs", x)
        labels, targeted = _aim(criterion_)
        _base.verify_input_bounds(x, model)
        if check_number("epsilon", epsilon, minimum=0) == 0:
            return restore_type(x)
        bounds = (float(model.bounds.lower), float(model.bounds.upper))
        chosen = self.seed
        # What draws nothing leaves torch's generator alone.
        seed = chosen if chosen is not None else draw_seed(torch.default_generator) if draws(type(attack)) else 0
        ways: dict[str, Any] = {
            "threat_model": ThreatModel(norm=self._norm, epsilon=epsilon, bounds=bounds),
            "generator": torch.Generator().manual_seed(seed),
            "targeted": targeted,
            **{name: torch_tensor(name, ep.astensor(points)) for name, points in given.items() if points is not None},
        }
        if "starting_points" in ways:
            points = check_starting_points("starting_points", ways["starting_points"], raw, bounds=bounds)
            ways["starting_points"] = points
        if attack.traits.detector:
            candidates = search_defended(attack, FoolboxModule(model), raw, labels, expected=_EXPECTED, **ways)
        else:
            candidates = search_module(attack, FoolboxModule(model), raw, labels, **ways)
        return restore_type(type(x)(candidates))


class NativeFixedEpsilonAttack(NativeFoolboxAttack, FixedEpsilonAttack):  # type: ignore[misc]
    """Fixed-epsilon attacks, see :class:`NativeFoolboxAttack`."""

    def run(self, model: Any, inputs: Any, criterion: Any, *, epsilon: float, **kwargs: Any) -> Any:
        """Perturb a batch, see Foolbox's ``FixedEpsilonAttack.run``.

        Args:
            model: A Foolbox model of PyTorch tensors, wrapped or not.
            inputs: A batch ``(N, ...)`` in the model's bounds, a PyTorch tensor or EagerPy's.
            criterion: Labels ``(N,)``, or a criterion.
            epsilon: At least 0, in units of the inputs.
            **kwargs: Attacks that imitate take ``references``: clean points of the classes that inputs are to be taken
                for (the class aimed at, or any but their own), which the detector lets pass, ``(N, R, ...)``, or
                ``(R, ...)`` for all inputs.

        Returns:
            Points in the ball and in the bounds, of the type of the inputs.

        Raises:
            ValueError: The criterion is not supported, the tensors are not PyTorch's, or an argument does not fit.
        """
        attack = self.native()
        given = {"references": kwargs.pop("references", None)} if attack.traits.references else {}
        _base.raise_if_kwargs(kwargs)
        return self._perturb(attack, model, inputs, criterion, epsilon=epsilon, **given)


class NativeMinimizationAttack(NativeFoolboxAttack, MinimizationAttack):  # type: ignore[misc]
    """Minimum-norm attacks, see :class:`NativeFoolboxAttack`."""

    def run(self, model: Any, inputs: Any, criterion: Any, *, early_stop: float | None = None, **kwargs: Any) -> Any:
        """Perturb a batch, see Foolbox's ``MinimizationAttack.run``.

        Args:
            model: A Foolbox model of PyTorch tensors, wrapped or not.
            inputs: A batch ``(N, ...)`` in the model's bounds, a PyTorch tensor or EagerPy's.
            criterion: Labels ``(N,)``, or a criterion.
            early_stop: Samples are finished once they are this near, where the attack can stop; None or 0: none are.
                Foolbox passes the smallest of the epsilons.
            **kwargs: The linear-region attack takes ``starting_points`` to begin at besides those searched for,
                ``(N, ...)``, or several for each input, ``(N, S, ...)``. No result is farther than the nearest of them
                that is adversarial; from one that is not, only the walk may reach an adversarial point.

        Returns:
            Points in the bounds, of the type of the inputs; they may lie farther away than any epsilon. An input for
            which nothing was found comes back as it was.

        Raises:
            ValueError: The criterion is not supported, the tensors are not PyTorch's, or an argument does not fit.
            ModelError: The attack does not work on such a model.
        """
        given = {"starting_points": kwargs.pop("starting_points", None)} if self.core.takes_starting_points else {}
        _base.raise_if_kwargs(kwargs)
        near = 0.0 if early_stop is None else check_number("epsilons", early_stop, minimum=0)
        attack: Any = self.native()
        if near == 0 and "stop" in declared(self.core):
            attack = replace(attack, stop=False)
        # Where nothing stops, any epsilon above 0 will do.
        return self._perturb(attack, model, inputs, criterion, epsilon=near or 1.0, **given)


class NativeNormlessAttack(NativeFoolboxAttack, AttackWithoutDistance):  # type: ignore[misc]
    """Attacks whose perturbations no norm measures, like Foolbox's ``SpatialAttack``; see :class:`NativeFoolboxAttack`.

    Epsilons are ignored, and both kinds of points that a call returns are the same.
    """

    def __call__(self, model: Any, inputs: Any, criterion: Any, **kwargs: Any) -> Any:
        """Return the points twice, and which of them are adversarial, bool ``(N,)``."""
        epsilons = kwargs.pop("epsilons", None)
        x, restore_type = ep.astensor_(inputs)
        points = self.run(model, x, criterion, **kwargs)
        success = _base.get_is_adversarial(_base.get_criterion(criterion), model)(points)
        if isinstance(epsilons, list | tuple):
            found = [restore_type(points) for _ in epsilons]
            return found, found, restore_type(ep.stack([success] * len(epsilons)))
        return restore_type(points), restore_type(points), restore_type(success)

    def run(self, model: Any, inputs: Any, criterion: Any, **kwargs: Any) -> Any:
        """Perturb a batch ``(N, ...)`` of PyTorch tensors or EagerPy's."""
        _base.raise_if_kwargs(kwargs)
        width = float(model.bounds.upper) - float(model.bounds.lower)
        return self._perturb(self.native(), model, inputs, criterion, epsilon=width)

    def repeat(self, times: int) -> Any:
        """Refuse repetitions, as Foolbox's ``SpatialAttack`` with a grid does.

        Raises:
            InvalidArgumentError: Always.
        """
        raise InvalidArgumentError("times", times, "one call, with settings that try more")


def _core_value(entry: HostParameter, value: Any) -> Any:
    """Translate a setting's value from Foolbox, where a random start is a flag."""
    if entry.name != "random_start":
        return value
    if not isinstance(value, bool) and not (value is None and entry.default is None):
        raise InvalidArgumentError("random_start", value, "True, False or None" if entry.default is None else "a bool")
    return _STARTS[value]


def _aim(criterion: Any) -> tuple[Tensor, bool]:
    """Return labels, and whether to aim at them."""
    if isinstance(criterion, foolbox.criteria.Misclassification):
        return torch_tensor("labels", criterion.labels), False
    if isinstance(criterion, foolbox.criteria.TargetedMisclassification):
        return torch_tensor("target_classes", criterion.target_classes), True
    raise ValueError("unsupported criterion")


def torch_tensor(argument: str, tensor: Any) -> Tensor:
    """Return the PyTorch tensor inside one of EagerPy.

    Raises:
        InvalidArgumentError: It holds one of another framework.
    """
    if not isinstance(tensor.raw, Tensor):
        kind = f"{type(tensor.raw).__module__}.{type(tensor.raw).__qualname__}"
        raise InvalidArgumentError(argument, kind, "a torch.Tensor; this attack runs on PyTorch models only")
    return tensor.raw
