"""The catalogue of torchattacks' classes by name, with their settings."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from robust_ext.adapters.catalogue import Catalogue
from robust_ext.adapters.torchattacks.entries import ENTRIES, Entry
from robust_ext.attacks.base import AttackTraits
from robust_ext.core.errors import InvalidArgumentError

# Its requirements (torchvision, requests, torch pins) are not imported by it; its attacks need torch, numpy and scipy.
torchattacks: Any = importlib.import_module("torchattacks")

NORM_VALUES: Mapping[str, str] = {"linf": "Linf", "l2": "L2", "l1": "L1"}
NORM_NAMES: Mapping[Any, str] = {value: norm for norm, value in NORM_VALUES.items()}

UNUSABLE: Mapping[str, str] = {
    "LGV": "it trains copies of the network on training data, which a target does not have; use BIM, which it runs "
    "inside, on the target itself"
}

# Of classes of others nothing is known, so nothing is assumed that could mix up samples.
_OTHERS = Entry(traits=AttackTraits(batching="single"))

CATALOGUE = Catalogue(
    library="torchattacks",
    place="torchattacks",
    members={
        name: getattr(torchattacks, name)
        for name in sorted(torchattacks.__all__)
        if isinstance(getattr(torchattacks, name), type)
    },
    base=torchattacks.attack.Attack,
    entries=ENTRIES,
    unusable=UNUSABLE,
    others=_OTHERS,
)


def entry_of(entry: Entry, settings: Mapping[str, Any], parts: Sequence[tuple[str, Entry]]) -> Entry:
    """Return the data on a class with these settings.

    Args:
        entry: What is known of it with its default settings.
        settings: Its settings.
        parts: Names of the attacks inside a MultiAttack, and what is known of each.

    Raises:
        InvalidArgumentError: The norm is one that the class does not work for, or the parts have none in common.
    """
    if parts:
        return _together(entry, parts)
    traits = entry.traits
    if entry is not _OTHERS and "norm" in settings and NORM_NAMES.get(settings["norm"]) not in traits.norms:
        expected = f"a norm among {', '.join(NORM_VALUES[norm] for norm in traits.norms)}"
        raise InvalidArgumentError("attack", f"norm={settings['norm']!r}", expected)
    if settings.get("loss") == "dlr":
        # It compares the largest logit with the third largest.
        traits = replace(traits, minimum_classes=3)
    if settings.get("version") == "rand":
        # Of its parts, APGD with two losses is left.
        traits = replace(traits, batching="any", leaves_ball=False, minimum_classes=3)
        return replace(entry, traits=traits, square={})
    return replace(entry, traits=traits)


def _together(entry: Entry, parts: Sequence[tuple[str, Entry]]) -> Entry:
    every = [part.traits for _, part in parts]
    norms = tuple(norm for norm in entry.traits.norms if all(norm in traits.norms for traits in every))
    if not norms:
        listed = ", ".join(f"{name} ({' and '.join(part.traits.norms)})" for name, part in parts)
        raise InvalidArgumentError("attacks", listed, "attacks that have a norm in common")
    # Later parts are given the samples that are left, so none has the full batch in order for certain.
    near = all(traits.batching != "single" and not (traits.leaves_ball or traits.minimum_norm) for traits in every)
    traits = AttackTraits(
        batching="any" if near else "single",
        batch_dependent=any(traits.batch_dependent for traits in every),
        gradients=any(traits.gradients for traits in every),
        minimum_norm=all(traits.minimum_norm for traits in every),
        norms=norms,
        minimum_classes=max(traits.minimum_classes for traits in every),
        leaves_ball=any(traits.leaves_ball for traits in every),
        failure=entry.traits.failure,
        seeds="setting" if any(traits.seeds == "setting" for traits in every) else "global",
    )
    return replace(entry, traits=traits, three_channels=any(part.three_channels for _, part in parts))
