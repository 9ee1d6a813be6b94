"""The catalogue of Foolbox's attack classes by name."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from robust_ext.adapters.catalogue import Catalogue
from robust_ext.adapters.foolbox.entries import ENTRIES, Entry
from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.attacks.base import AttackTraits

_BASE = foolbox.attacks.base
UNUSABLE: Mapping[str, str] = {
    "Attack": "it is the base class; name an attack",
    "DatasetAttack": "it replaces a sample by other samples that it was fed, instead of perturbing it; use "
    "LinearSearchBlendedUniformNoiseAttack",
}
# A change of k values is at most k times the width of the bounds in l1.
_NORM_OF_P = {math.inf: "linf", 2: "l2", 1: "l1", 0: "l1"}


@dataclass(frozen=True, kw_only=True)
class _FoolboxCatalogue(Catalogue[Entry]):
    def entry(self, attack_class: type, *, argument: str = "attack") -> Entry:
        """Return the data on a class; an unlisted one has its base's and takes one sample at a time."""
        label = attack_class.__name__
        listed = self.owns(attack_class) and (label in self.entries or label in self.unusable)
        if listed or not issubclass(attack_class, self.base):
            return super().entry(attack_class, argument=argument)
        bases = [base.__name__ for base in attack_class.__mro__ if self.owns(base) and base.__name__ in self.entries]
        entry = self.entries[bases[0]] if bases else self.others
        minimum_norm = entry.traits.minimum_norm or issubclass(attack_class, _BASE.MinimizationAttack)
        return replace(entry, traits=replace(entry.traits, batching="single", minimum_norm=minimum_norm))


CATALOGUE = _FoolboxCatalogue(
    library="foolbox",
    place="foolbox.attacks",
    members={
        name: member
        for name, member in inspect.getmembers(foolbox.attacks, inspect.isclass)
        if issubclass(member, _BASE.Attack)
    },
    base=_BASE.Attack,
    entries=ENTRIES,
    unusable=UNUSABLE,
    others=Entry(traits=AttackTraits(batching="single")),
)


def norms_of(distance: object) -> tuple[str, ...]:
    """Return the norm that judges candidates of a Foolbox distance, l1 for l0; none for another kind of distance."""
    norm = _NORM_OF_P.get(getattr(distance, "p", math.nan))
    return () if norm is None else (norm,)
