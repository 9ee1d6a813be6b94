"""Shared parts of the Foolbox classes of this project's attacks."""

from __future__ import annotations

from abc import ABC
from dataclasses import replace
from typing import Any, ClassVar

import eagerpy as ep
import torch
from torch import Tensor

from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.adapters.foolbox.model import FoolboxModule
from robust_ext.adapters.native import (
    HostParameter,
    build_attack,
    check_references,
    check_seed,
    check_starting_points,
    draws,
    search_module,
)
from robust_ext.attacks.base import draw_seed
from robust_ext.attacks.native import NativeAttack, cannot_aim
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import declared
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.core.validation import check_number

_base = foolbox.attacks.base
FixedEpsilonAttack: Any = _base.FixedEpsilonAttack
MinimizationAttack: Any = _base.MinimizationAttack
AttackWithoutDistance: Any = _base.Attack
_NORM_OF_DISTANCE = {getattr(foolbox.distances, norm).p: norm for norm in NORMS}


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
        values = {one.name: getattr(self, one.name) for one in self.parameters}
        if "random_start" in values:
            flag, default = values["random_start"], next(p for p in self.parameters if p.name == "random_start").default
            if not isinstance(flag, bool) and not (flag is None and default is None):
                expected = "True, False or None" if default is None else "a bool"
                raise InvalidArgumentError("random_start", flag, expected)
            values["random_start"] = {True: "random", False: "input", None: None}[flag]
        return build_attack(self, values)

    def _perturb(
        self, attack: NativeAttack, model: Any, inputs: Any, criterion: Any, *, epsilon: float, **given: Any
    ) -> Any:
        """Return candidates for a batch; ``given`` may hold references and starting points."""
        x, restore_type = ep.astensor_(inputs)
        criterion_ = _base.get_criterion(criterion)
        targeted = hasattr(criterion_, "target_classes")
        reason = cannot_aim(attack) if targeted else None
        if reason is not None:
            expected = f"labels or Misclassification for a {type(self).__name__}: {reason}"
            raise InvalidArgumentError("criterion", repr(criterion_), expected)
        raw = torch_tensor("inputs", x)
        known = foolbox.criteria.TargetedMisclassification if targeted else foolbox.criteria.Misclassification
        if not isinstance(criterion_, known):
            raise ValueError("unsupported criterion")
        name = "target_classes" if targeted else "labels"
        labels = torch_tensor(name, getattr(criterion_, name))
        _base.verify_input_bounds(x, model)
        if check_number("epsilon", epsilon, minimum=0) == 0:
            return restore_type(x)
        bounds = (float(model.bounds.lower), float(model.bounds.upper))
        seed = self.seed
        if seed is None:
            # What draws nothing leaves torch's generator alone.
            seed = draw_seed(torch.default_generator) if draws(type(attack)) else 0
        points: dict[str, Any] = {
            key: torch_tensor(key, ep.astensor(value)) for key, value in given.items() if value is not None
        }
        if attack.traits.references:
            points["references"] = check_references(points.get("references"), raw, bounds=bounds)
        if "starting_points" in points:
            points["starting_points"] = check_starting_points(
                "starting_points", points["starting_points"], raw, bounds=bounds
            )
        candidates = search_module(
            attack,
            FoolboxModule(model),
            raw,
            labels,
            threat_model=ThreatModel(norm=self._norm, epsilon=epsilon, bounds=bounds),
            generator=torch.Generator().manual_seed(seed),
            targeted=targeted,
            shell="robust_ext.adapters.foolbox.models.DefendedPyTorchModel",
            **points,
        )
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
                ``(R, ...)`` for all inputs. APGD with ``warm`` takes ``starting_points`` ``(N, ...)``.

        Returns:
            Points in the ball and in the bounds, of the type of the inputs.

        Raises:
            ValueError: The criterion is not supported, the tensors are not PyTorch's, or an argument does not fit.
        """
        attack = self.native()
        taken = ["references"] * attack.traits.references + ["starting_points"] * attack.takes_starting_points
        given = {name: kwargs.pop(name, None) for name in taken}
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
        """Refuse repetitions with an InvalidArgumentError, as Foolbox's ``SpatialAttack`` with a grid does."""
        raise InvalidArgumentError("times", times, "one call, with settings that try more")


def torch_tensor(argument: str, tensor: Any) -> Tensor:
    """Return the PyTorch tensor inside one of EagerPy; InvalidArgumentError where it holds another framework's."""
    if not isinstance(tensor.raw, Tensor):
        kind = f"{type(tensor.raw).__module__}.{type(tensor.raw).__qualname__}"
        raise InvalidArgumentError(argument, kind, "a torch.Tensor; this attack runs on PyTorch models only")
    return tensor.raw
