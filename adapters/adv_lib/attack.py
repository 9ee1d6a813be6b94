"""adv-lib's attacks, which are functions, as attacks of this project."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.adapters.adv_lib.entries import ENTRIES, UNUSABLE, Entry
from robust_ext.adapters.adv_lib.library import adv_lib, repaired
from robust_ext.adapters.catalogue import Catalogue
from robust_ext.adapters.wrapped import (
    WrappedAttack,
    check_candidates,
    checked,
    raised_inside,
    refuse_targets,
    restore_failed,
)
from robust_ext.attacks.base import AttackTraits, draw_seed
from robust_ext.attacks.running import UnitSpace
from robust_ext.core.errors import AttackRefusedError, InvalidArgumentError
from robust_ext.core.random import seeded_globals
from robust_ext.core.target import Target
from robust_ext.core.threat import NORMS, ThreatModel

# Filled in here; made for plots, for one batch, or for other attacks of adv-lib.
_HIDDEN = ("callback", "num_classes", "return_targets", "return_unsuccessful", "starting_points")
# Names of norms that can be written in an attack string, where adv-lib takes numbers.
_NUMBERS = {"linf": float("inf"), "inf": float("inf"), "l2": 2, "l1": 1, "l0": 0}
# The values of parameters for the norm, by their names.
_NORM_VALUES: Mapping[str, Mapping[str, Any]] = {
    "distance": {"l2": "l2", "l1": "l1"},
    "norm": {"linf": float("inf"), "l2": 2, "l1": 1},
    "p": {"linf": float("inf"), "l2": 2},
}
# No norm of a threat model: candidates are judged in any norm.
_PERCEPTUAL = ("ssim", "msssim", "ciede2000")


@dataclass(frozen=True, kw_only=True)
class _AdvLibCatalogue(Catalogue[Entry]):
    def entry(self, attack: Callable[..., Any], *, argument: str = "attack") -> Entry:
        """Return the data on a function; refused as in the base class."""
        name, module = attack.__name__, attack.__module__
        if module.startswith("adv_lib.attacks.segmentation.") and f"segmentation.{name}" in self.unusable:
            raise self.refusal(f"segmentation.{name}", argument)
        if self.members.get(name) is not attack:
            raise InvalidArgumentError(argument, f"adv-lib's {module}.{name}", f"one of: {', '.join(self.entries)}")
        return self.entries[name]


def _function(name: str) -> Callable[..., Any]:
    # Not as an attribute: adv_lib.attacks holds functions under the names of some of its modules.
    home = importlib.import_module("adv_lib.attacks.auto_pgd") if name == "minimal_apgd" else adv_lib.attacks
    found: Callable[..., Any] = getattr(home, name)
    return found


CATALOGUE = _AdvLibCatalogue(
    library="adv_lib",
    place="adv_lib.attacks",
    # Attacks on segmentation are not imported, as that compiles code.
    members={**{name: _function(name) for name in ENTRIES}, **dict.fromkeys(UNUSABLE)},
    entries=ENTRIES,
    unusable=UNUSABLE,
    others=Entry(),
)


class AdvLibAttack(WrappedAttack):
    """An adv-lib attack with settings.

    adv-lib takes inputs in [0, 1] for granted. Where the threat model's bounds are others, the attack sees the target
    through a rescaling, and all its settings (budgets, steps, learning rates) count in units of [0, 1]. Settings that
    are left out follow the threat model where the function has them: its budget is epsilon, its norm the norm.
    """

    title = "adv-lib"
    entry: Entry

    def __init__(self, function: Callable[..., Any], settings: Mapping[str, Any], *, name: str, entry: Entry) -> None:
        super().__init__(function, settings, name=name, entry=entry, traits=_traits_of(entry, settings))

    @property
    def _can_aim(self) -> bool:
        # It aims at one class after another itself.
        return super()._can_aim and self.made_of.__name__ != "apgd_targeted"

    def search(
        self, target: Target, inputs: Tensor, labels: Tensor, *, threat_model: ThreatModel, generator: torch.Generator
    ) -> Tensor:
        """Run on the whole batch; AttackRefusedError where the inputs are no images, or have too few channels."""
        entry, shape = self.entry, tuple(inputs.shape[1:])
        if entry.dimensions and inputs.dim() != entry.dimensions:
            raise AttackRefusedError(
                f"{self.name} works on images (channels, height, width), not on inputs of shape {shape}; choose an "
                "attack without groups of pixels or colours, such as ddn"
            )
        if entry.channels > 1 and shape[0] != entry.channels:
            raise AttackRefusedError(
                f"{self.name} works on images of {entry.channels} channels, not on inputs of shape {shape}; choose an "
                "attack that does not measure colours, such as ddn"
            )
        space = UnitSpace(target, threat_model)
        settings, norm = dict(self.settings), space.threat_model.norm
        if entry.norm:
            settings.setdefault(entry.norm, _NORM_VALUES[entry.norm][norm])
        if entry.epsilon:
            self._compare(entry.epsilon, space.threat_model.epsilon)
            self._fill(settings, {entry.epsilon: space.threat_model.epsilon})
        self._fill(settings, {"targeted": target.criterion.aims, "num_classes": target.classes})
        module, x = HostModule(space.target.module), space.enter(inputs).clone()
        with seeded_globals(draw_seed(generator)), repaired(), raised_inside("adv-lib", self.name):
            out = self.made_of(module, x, labels.clone(), **settings)
        candidates = space.leave(check_candidates(self.name, out), inputs)
        return restore_failed(candidates, inputs, labels, target=target) if entry.restore else candidates


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
    entry, settings, label = checked(CATALOGUE, function, settings, accepted=_accepted)
    refuse_targets(label, settings)
    read = dict(settings)
    norm, penalty = read.get(entry.norm), read.get("penalty")
    if entry.norm != "distance" and isinstance(norm, str):
        read[entry.norm] = _NUMBERS.get(norm.lower(), norm)
    if isinstance(penalty, str):
        known = adv_lib.utils.lagrangian_penalties.all_penalties
        if penalty not in known:
            raise InvalidArgumentError("attack", f"penalty={penalty!r}", f"one of: {', '.join(known)}")
        read["penalty"] = known[penalty]
    return AdvLibAttack(function, read, name=name or label, entry=entry)


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


def _traits_of(entry: Entry, settings: Mapping[str, Any]) -> AttackTraits:
    """Return the traits of a function under these settings; InvalidArgumentError for an unusable norm."""
    traits = entry.traits
    norms = _norms(entry, settings[entry.norm]) if entry.norm in settings else traits.norms
    leaves_ball = traits.leaves_ball or bool(settings.get("use_large_reps"))
    several = [settings.get(name) for name in entry.subsets]
    batching = traits.batching
    if batching == "full" and any(one is True or (isinstance(one, int) and one > 1) for one in several):
        batching = "any"
    if batching == "any" and leaves_ball:
        batching = "single"
    classes = 4 if settings.get("targeted_version") else traits.minimum_classes
    if "loss_function" in settings:
        classes = max(classes, entry.dlr_classes) if str(settings["loss_function"]).lower() == "dlr" else 2
    seeds = "global" if any(settings.get(name) for name in entry.random) else traits.seeds
    return replace(
        traits, norms=norms, batching=batching, leaves_ball=leaves_ball, minimum_classes=classes, seeds=seeds
    )


def _norms(entry: Entry, value: Any) -> tuple[str, ...]:
    if entry.norm == "distance" and value in _PERCEPTUAL:
        return NORMS
    known = [(_NORM_VALUES[entry.norm][norm], (norm,)) for norm in entry.traits.norms]
    known += [(0, ("l1",))] if entry.l0 else []
    for called, norms in known:
        if value == called:
            return norms
    shown = ", ".join(repr(called) for called, _ in known)
    without = "; lpips is left out, as it downloads a network" if value == "lpips" else ""
    raise InvalidArgumentError("attack", f"{entry.norm}={value!r}", f"one of {shown}{without}")
