"""How a class of ART's evasion attacks is found by name, and what is known of it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from robust_ext.adapters.art.entries import ENTRIES, REFUSED, UNKNOWN, Entry
from robust_ext.adapters.art.library import art
from robust_ext.core.errors import InvalidArgumentError, MissingDependencyError
from robust_ext.core.specification import did_you_mean
from robust_ext.registry.base import AttackListing

_THREE_CLASS_LOSSES = ("difference_logits_ratio",)


def find_class(name: str, *, argument: str = "attack") -> type:
    """The class of ``art.attacks.evasion`` called ``name``.

    Raises:
        InvalidArgumentError: There is none; the text names near ones.
        MissingDependencyError: ART leaves it out because a package is missing.
    """
    found = getattr(art.attacks.evasion, name, None)
    if found is None and name == "BrendelBethgeAttack":
        raise MissingDependencyError(f"art:{name}: ART offers it only where numba is installed; pip install numba")
    if not isinstance(found, type):
        near = did_you_mean(name, list(ENTRIES))
        expected = f"the name of an attack in art.attacks.evasion{near or '; robust-ext attacks lists them'}"
        raise InvalidArgumentError(argument, f"art:{name}", expected)
    return found


def find_entry(attack_class: type, *, argument: str = "attack") -> Entry:
    """What is known of a class; :data:`UNKNOWN` for classes of others.

    Raises:
        InvalidArgumentError: It is no evasion attack, or one that cannot be used here; the text says why.
    """
    label = attack_class.__name__
    if not issubclass(attack_class, art.attacks.EvasionAttack):
        raise InvalidArgumentError(argument, f"art's {label}", "one of the attacks in art.attacks.evasion")
    if not attack_class.__module__.startswith("art.attacks."):
        return UNKNOWN
    if label in ENTRIES:
        return ENTRIES[label]
    reason = REFUSED.get(label, "it is not known here; robust-ext attacks lists those that are")
    raise InvalidArgumentError(argument, f"art:{label}", f"an attack that fits here: {reason}")


def fewest_classes(entry: Entry, settings: Mapping[str, Any]) -> int:
    """The fewest classes a class works with under these settings: the DLR loss compares three logits."""
    if settings.get("loss_type") in _THREE_CLASS_LOSSES:
        return 3
    parts = settings.get("attacks")
    if parts:
        return max(3 if _loss_of(part) in _THREE_CLASS_LOSSES else 2 for part in parts)
    return entry.traits.minimum_classes


def list_attacks() -> list[AttackListing]:
    """One entry for each class, those that cannot be used included."""
    listed = []
    for name, member in inspect.getmembers(art.attacks.evasion, inspect.isclass):
        if member.__name__ != name or not issubclass(member, art.attacks.EvasionAttack):
            continue
        if name in ENTRIES:
            entry = ENTRIES[name]
            listed.append(
                AttackListing(
                    name=name,
                    traits=entry.traits,
                    trial=entry.trial,
                    defect=entry.defect,
                    channels=max(entry.channels, 1),
                )
            )
        else:
            reason = REFUSED.get(name, "it is not known here; use another attack")
            listed.append(AttackListing(name=name, reason=reason))
    return listed


def _loss_of(part: Any) -> object:
    return part[1].get("loss_type") if isinstance(part, tuple) else getattr(part, "loss_type", None)


NORM_VALUES: Mapping[str, float] = {"linf": float("inf"), "l2": 2, "l1": 1}
NORM_NAMES: Mapping[Any, str] = {"inf": "linf", **{value: norm for norm, value in NORM_VALUES.items()}}
