"""The catalogue of adv-lib's attacks by name, with their settings."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from robust_ext.adapters.adv_lib.entries import ENTRIES, Entry
from robust_ext.adapters.adv_lib.library import adv_lib
from robust_ext.adapters.catalogue import Catalogue
from robust_ext.attacks.base import AttackTraits
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.threat import NORMS

_DENSE = "it attacks segmentation, where every pixel has a label; use"
UNUSABLE: Mapping[str, str] = {
    "segmentation.alma_prox": f"{_DENSE} alma",
    "segmentation.asma": f"{_DENSE} pgd_linf",
    "segmentation.dag": f"{_DENSE} df",
    "segmentation.pdgd": f"{_DENSE} pdgd",
    "segmentation.pdpgd": f"{_DENSE} pdpgd",
}

NORM_VALUES: Mapping[str, Mapping[str, Any]] = {
    "distance": {"l2": "l2", "l1": "l1"},
    "norm": {"linf": float("inf"), "l2": 2, "l1": 1},
    "p": {"linf": float("inf"), "l2": 2},
}
# No norm of a threat model: candidates are judged in whatever norm that has.
_PERCEPTUAL = ("ssim", "msssim", "ciede2000")
# Not offered by adv_lib.attacks itself: the module that holds it.
_OTHERS = {"minimal_apgd": "auto_pgd"}


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
    home = importlib.import_module(f"adv_lib.attacks.{_OTHERS[name]}") if name in _OTHERS else adv_lib.attacks
    found: Callable[..., Any] = getattr(home, name)
    return found


CATALOGUE = _AdvLibCatalogue(
    library="adv_lib",
    place="adv_lib.attacks",
    # Attacks on segmentation are not imported, as that compiles code.
    members={**{name: _function(name) for name in ENTRIES}, **dict.fromkeys(UNUSABLE)},
    entries=ENTRIES,
    unusable=UNUSABLE,
    others=Entry(traits=AttackTraits(batching="single")),
)


def traits_of(entry: Entry, settings: Mapping[str, Any]) -> AttackTraits:
    """Return the traits of a function under these settings; InvalidArgumentError for an unusable norm."""
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
