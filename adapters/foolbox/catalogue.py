"""How a class name of Foolbox is found, and what is known of the class."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace

from robust_ext.adapters.foolbox.entries import ENTRIES, UNKNOWN, UNUSABLE, Entry
from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.specification import did_you_mean
from robust_ext.registry.base import AttackListing

_BASE = foolbox.attacks.base

# A change of k values is at most k times the width of the bounds in l1.
_NORM_OF_P = {math.inf: "linf", 2: "l2", 1: "l1", 0: "l1"}


def find_class(name: str, *, argument: str = "attack") -> type:
    """The class of ``foolbox.attacks`` called ``name``, aliases included.

    Raises:
        InvalidArgumentError: There is none; the text names near ones.
    """
    known = _classes()
    if name not in known:
        near = did_you_mean(name, [entry for entry in known if known[entry].__name__ not in UNUSABLE])
        expected = f"the name of an attack in foolbox.attacks{near or '; robust-ext attacks lists them'}"
        raise InvalidArgumentError(argument, f"foolbox:{name}", expected)
    return known[name]


def find_entry(attack_class: type, *, argument: str = "attack") -> Entry:
    """What is known of a class.

    A class of others is taken for what the Foolbox class it extends is, attacked one row at a time.

    Raises:
        InvalidArgumentError: It is no attack, or one that cannot be used here; the text says why.
    """
    label = attack_class.__name__
    if not issubclass(attack_class, _BASE.Attack):
        raise InvalidArgumentError(argument, f"foolbox's {label}", "one of the attacks in foolbox.attacks")
    if _is_own(attack_class):
        if label in UNUSABLE:
            reason = UNUSABLE[label]
            raise InvalidArgumentError(argument, f"foolbox:{label}", f"an attack that fits here: {reason}")
        if label in ENTRIES:
            return ENTRIES[label]
    bases = [base.__name__ for base in attack_class.__mro__ if _is_own(base) and base.__name__ in ENTRIES]
    entry = ENTRIES[bases[0]] if bases else UNKNOWN
    minimum_norm = entry.traits.minimum_norm or issubclass(attack_class, _BASE.MinimizationAttack)
    return replace(entry, traits=replace(entry.traits, batching="single", minimum_norm=minimum_norm))


def norms_of(distance: object) -> tuple[str, ...]:
    """The norm that a Foolbox distance is judged in, l1 for l0; none for a distance of another kind."""
    norm = _NORM_OF_P.get(getattr(distance, "p", math.nan))
    return () if norm is None else (norm,)


def list_attacks() -> list[AttackListing]:
    """One entry for each class, those that cannot be used included."""
    listed = []
    public = _classes()
    for name, attack_class in public.items():
        if name != attack_class.__name__ or attack_class is _BASE.Attack:
            continue
        aliases = tuple(other for other, known in public.items() if known is attack_class and other != name)
        entry = ENTRIES.get(name)
        if entry is None:
            reason = UNUSABLE.get(name, "this version of the adapter does not know it; use another attack")
            listed.append(AttackListing(name=name, aliases=aliases, reason=reason))
        else:
            listed.append(
                AttackListing(
                    name=name, traits=entry.traits, aliases=aliases, trial=dict(entry.trial), defect=entry.defect
                )
            )
    return listed


def _classes() -> dict[str, type]:
    members = inspect.getmembers(foolbox.attacks, inspect.isclass)
    return {name: member for name, member in members if issubclass(member, _BASE.Attack)}


def _is_own(attack_class: type) -> bool:
    return attack_class.__module__.startswith("foolbox.attacks.")
