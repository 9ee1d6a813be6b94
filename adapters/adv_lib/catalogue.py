"""How adv-lib's attacks are found by name, and what their settings make of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from robust_ext.adapters.adv_lib.entries import ENTRIES, NORM_VALUES, UNUSABLE, Entry
from robust_ext.adapters.adv_lib.library import adv_lib
from robust_ext.attacks.base import AttackTraits
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.specification import did_you_mean
from robust_ext.core.threat import NORMS
from robust_ext.registry.base import AttackListing

# Not offered by adv_lib.attacks itself: the module that holds it.
_OTHERS = {"minimal_apgd": "auto_pgd"}
# No norm of a threat model: candidates are judged in whatever norm that has.
_PERCEPTUAL = ("ssim", "msssim", "ciede2000")


def find_function(name: str, *, argument: str = "attack") -> Callable[..., Any]:
    """The attack of ``adv_lib.attacks`` called ``name``.

    Raises:
        InvalidArgumentError: There is none, or it cannot be used here; the text says why.
    """
    if name in UNUSABLE:
        raise _unusable(name, argument)
    if name not in ENTRIES:
        near = did_you_mean(name, list(ENTRIES))
        expected = f"the name of an attack in adv_lib.attacks{near or '; robust-ext attacks lists them'}"
        raise InvalidArgumentError(argument, f"adv_lib:{name}", expected)
    # Not as an attribute: adv_lib.attacks holds functions under the names of some of its modules.
    home = importlib.import_module(f"adv_lib.attacks.{_OTHERS[name]}") if name in _OTHERS else adv_lib.attacks
    found: Callable[..., Any] = getattr(home, name)
    return found


def find_entry(function: Callable[..., Any], *, argument: str = "attack") -> Entry:
    """What is known of a function.

    Raises:
        InvalidArgumentError: It is no attack, or one that cannot be used here; the text says why.
    """
    name, module = function.__name__, function.__module__
    if module.startswith("adv_lib.attacks.segmentation.") and f"segmentation.{name}" in UNUSABLE:
        raise _unusable(f"segmentation.{name}", argument)
    if name not in ENTRIES or find_function(name) is not function:
        raise InvalidArgumentError(argument, f"adv-lib's {module}.{name}", f"one of: {', '.join(ENTRIES)}")
    return ENTRIES[name]


def norm_value(entry: Entry, norm: str) -> Any:
    """What the function calls a norm of a threat model."""
    return NORM_VALUES[entry.norm][norm]


def traits_of(entry: Entry, settings: Mapping[str, Any]) -> AttackTraits:
    """The traits of a function under these settings.

    Raises:
        InvalidArgumentError: The norm is set to something that the function does not know, or that cannot be used.
    """
    traits = entry.traits
    norms = _norms(entry, settings[entry.norm]) if entry.norm in settings else traits.norms
    leaves_ball = traits.leaves_ball or bool(settings.get("use_large_reps"))
    batching = traits.batching
    if batching == "full" and any(_repeats(settings.get(name)) for name in entry.subsets):
        batching = "any"
    if batching == "any" and leaves_ball:
        batching = "single"
    classes = traits.minimum_classes
    if settings.get("targeted_version"):
        classes = 4
    if "loss_function" in settings:
        classes = max(classes, entry.dlr_classes) if str(settings["loss_function"]).lower() == "dlr" else 2
    seeds = "global" if any(settings.get(name) for name in entry.random) else traits.seeds
    return replace(
        traits, norms=norms, batching=batching, leaves_ball=leaves_ball, minimum_classes=classes, seeds=seeds
    )


def list_attacks() -> list[AttackListing]:
    """One entry for each function, those that cannot be used included."""
    usable = [
        AttackListing(name=name, traits=entry.traits, trial=entry.trial, channels=entry.channels, defect=entry.defect)
        for name, entry in ENTRIES.items()
    ]
    return usable + [AttackListing(name=name, reason=reason) for name, reason in UNUSABLE.items()]


def _norms(entry: Entry, value: Any) -> tuple[str, ...]:
    if entry.norm == "distance" and value in _PERCEPTUAL:
        return NORMS
    known = [(NORM_VALUES[entry.norm][norm], (norm,)) for norm in entry.traits.norms]
    if entry.l0:
        known.append((0, ("l1",)))
    for called, norms in known:
        if value == called:
            return norms
    shown = ", ".join(repr(called) for called, _ in known)
    without = "; lpips is left out, as it downloads a network" if value == "lpips" else ""
    raise InvalidArgumentError("attack", f"{entry.norm}={value!r}", f"one of {shown}{without}")


def _repeats(value: Any) -> bool:
    return value is True or (isinstance(value, int) and value > 1)


def _unusable(name: str, argument: str) -> InvalidArgumentError:
    return InvalidArgumentError(argument, f"adv_lib:{name}", f"an attack that fits here: {UNUSABLE[name]}")
