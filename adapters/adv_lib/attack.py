"""adv-lib's attacks, which are functions, as attacks of this project."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.adapters.adv_lib.catalogue import CATALOGUE, NORM_VALUES, traits_of
from robust_ext.adapters.adv_lib.entries import Entry
from robust_ext.adapters.adv_lib.library import adv_lib, repaired
from robust_ext.adapters.catalogue import check_ranges
from robust_ext.adapters.wrapped import WrappedAttack, check_candidates, check_settings, raised_inside, restore_failed
from robust_ext.attacks.base import draw_seed
from robust_ext.attacks.running import UnitSpace
from robust_ext.core.errors import AttackRefusedError, InvalidArgumentError
from robust_ext.core.random import seeded_globals
from robust_ext.core.specification import check_keywords
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel

# Filled in here; made for plots, for one batch, or for other attacks of adv-lib.
_HIDDEN = ("callback", "num_classes", "return_targets", "return_unsuccessful", "starting_points")
# Names of norms that can be written in an attack string, where adv-lib takes numbers.
_NUMBERS = {"linf": float("inf"), "inf": float("inf"), "l2": 2, "l1": 1, "l0": 0}


class AdvLibAttack(WrappedAttack):
    """An adv-lib attack with settings.

    adv-lib takes inputs in [0, 1] for granted. Where the threat model's bounds are others, the attack sees the target
    through a rescaling, and all its settings (budgets, steps, learning rates) count in units of [0, 1]. Settings that
    are left out follow the threat model where the function has them: its budget is epsilon, its norm the norm.
    """

    title = "adv-lib"
    entry: Entry

    def __init__(self, function: Callable[..., Any], settings: Mapping[str, Any], *, name: str, entry: Entry) -> None:
        super().__init__(function, settings, name=name, entry=entry, traits=traits_of(entry, settings))

    def search(
        self, target: Target, inputs: Tensor, labels: Tensor, *, threat_model: ThreatModel, generator: torch.Generator
    ) -> Tensor:
        """Run on the whole batch; AttackRefusedError where the inputs are no images, or have too few channels."""
        self._check_shape(inputs)
        space = UnitSpace(target, threat_model)
        settings = self._completed(space.threat_model, target.classes)
        module, x = HostModule(space.target.module), space.enter(inputs).clone()
        with seeded_globals(draw_seed(generator)), repaired(), raised_inside("adv-lib", self.name):
            out = self.made_of(module, x, labels.clone(), **settings)
        candidates = space.leave(check_candidates(self.name, out), inputs)
        return restore_failed(candidates, inputs, labels, target=target) if self.entry.restore else candidates

    def _check_shape(self, inputs: Tensor) -> None:
        shape = tuple(inputs.shape[1:])
        if self.entry.dimensions and inputs.dim() != self.entry.dimensions:
            raise AttackRefusedError(
                f"{self.name} works on images (channels, height, width), not on inputs of shape {shape}; choose an "
                "attack without groups of pixels or colours, such as ddn"
            )
        if self.entry.channels > 1 and shape[0] != self.entry.channels:
            raise AttackRefusedError(
                f"{self.name} works on images of {self.entry.channels} channels, not on inputs of shape {shape}; "
                "choose an attack that does not measure colours, such as ddn"
            )

    def _completed(self, threat_model: ThreatModel, classes: int) -> dict[str, Any]:
        settings = dict(self.settings)
        wanted: dict[str, Any] = {"targeted": False, "num_classes": classes}
        if self.entry.epsilon:
            wanted[self.entry.epsilon] = threat_model.epsilon
            self._compare(self.entry.epsilon, threat_model.epsilon)
        if self.entry.norm:
            settings.setdefault(self.entry.norm, NORM_VALUES[self.entry.norm][threat_model.norm])
        for key, value in wanted.items():
            if key in self._parameters:
                settings.setdefault(key, value)
        return settings


class HostModule(nn.Module):
    """The target's module as adv-lib meets it: its gradients may be changed in place, as adv-lib does.

    Where a model sums or averages its inputs, autograd returns a gradient whose values share memory, which PyTorch
    refuses to change in place.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(N, K)``."""
        if x.requires_grad:
            x = x.view_as(x)
            x.register_hook(_unshared)  # type: ignore[no-untyped-call]
        out: Tensor = self.module(x)
        return out


def _unshared(gradient: Tensor) -> Tensor:
    shares = any(stride == 0 and size > 1 for stride, size in zip(gradient.stride(), gradient.shape, strict=True))
    return gradient.contiguous() if shares else gradient


def from_class(function: Callable[..., Any], settings: object, *, name: str | None = None) -> AdvLibAttack:
    """Make an attack from a function of adv-lib and its keyword arguments, without model, inputs and labels.

    Norms may be written as ``"linf"``, ``"l2"``, ``"l1"`` and ``"l0"``, and the ``penalty`` of ``alma`` as its name in
    ``adv_lib.utils.lagrangian_penalties.all_penalties``.
    """
    entry, settings, label = CATALOGUE.entry(function), check_settings(settings), function.__name__
    check_keywords(_accepted(function), settings, argument="attack", label=label)
    check_ranges(function, settings)
    if settings.get("targeted"):
        expected = "targeted=False: attacks are given true labels, which a targeted one would aim at"
        raise InvalidArgumentError("attack", f"{label}(targeted=True)", expected)
    return AdvLibAttack(function, _read(entry, settings), name=name or label, entry=entry)


def _read(entry: Entry, settings: Mapping[str, Any]) -> dict[str, Any]:
    read = dict(settings)
    norm, penalty = read.get(entry.norm), read.get("penalty")
    if entry.norm != "distance" and isinstance(norm, str):
        read[entry.norm] = _NUMBERS.get(norm.lower(), norm)
    if isinstance(penalty, str):
        known = adv_lib.utils.lagrangian_penalties.all_penalties
        if penalty not in known:
            raise InvalidArgumentError("attack", f"penalty={penalty!r}", f"one of: {', '.join(known)}")
        read["penalty"] = known[penalty]
    return read


def _accepted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose parameters are the accepted settings of an attack, all optional."""

    def stub() -> None: ...

    kept = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=None)
        for parameter in list(inspect.signature(function).parameters.values())[3:]
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD and parameter.name not in _HIDDEN
    ]
    stub.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
    return stub
