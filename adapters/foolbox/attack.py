"""Foolbox attacks as attacks of this project."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from robust_ext.adapters.catalogue import Catalogue, classes_in
from robust_ext.adapters.foolbox.entries import ENTRIES, UNTARGETED, UNUSABLE, Entry
from robust_ext.adapters.foolbox.frameworks import Framework
from robust_ext.adapters.foolbox.library import describe, foolbox, quiet
from robust_ext.adapters.foolbox.target import (
    Anything,
    LowLogits,
    Misclassified,
    NeverFlat,
    needs_start,
    with_start,
)
from robust_ext.adapters.wrapped import (
    check_candidates,
    checked,
    constructed,
    cost_of_steps,
    raised_inside,
    restore_failed,
    starting_points,
)
from robust_ext.attacks._common.rows import over_rows, runner_up
from robust_ext.attacks.base import Attack, AttackTraits, draw_seed
from robust_ext.attacks.running import UnitSpace
from robust_ext.core.cost import Cost
from robust_ext.core.criteria import Criterion
from robust_ext.core.errors import InvalidArgumentError, warn
from robust_ext.core.random import seeded_globals
from robust_ext.core.target import Target
from robust_ext.core.threat import NORMS, ThreatModel

_BASE = foolbox.attacks.base
_DISTANCES = {norm: getattr(foolbox.distances, norm) for norm in NORMS}
# The norm that judges candidates: a change of k values is at most k times the width of the bounds in l1.
_NORM_OF_P = {math.inf: "linf", 2: "l2", 1: "l1", 0: "l1"}
_Flexible: Any = _BASE.FlexibleDistanceMinimizationAttack
_Repeated: Any = _BASE.Repeated


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
    members=classes_in(foolbox.attacks, _BASE.Attack),
    base=_BASE.Attack,
    entries=ENTRIES,
    unusable=UNUSABLE,
    others=Entry(traits=AttackTraits(batching="single")),
)


class FoolboxAttack(Attack):
    """A Foolbox attack, run through its public call; the attack object is not changed.

    Fixed-epsilon attacks are given the threat model's epsilon, and Foolbox clips what they return to it.
    Minimum-norm attacks are run once without an epsilon, and what they return is left as it is. Foolbox has global
    seeds only, so the run is seeded from the generator and the global generators are restored afterwards.

    Where Foolbox's attack works, the result is its own to the bit. Samples for which it would raise or return
    something that is no try (zeros, say) come back as the inputs; see
    :class:`robust_ext.adapters.foolbox.entries.Entry`. With ``chooses_norm`` its distance is the threat model's norm.
    """

    def __init__(self, attack: Any, *, name: str, entry: Entry, chooses_norm: bool) -> None:
        self.attack = attack
        self.name = name
        self.entry = entry
        self.traits = entry.traits
        self.chooses_norm = chooses_norm
        self.unlisted = not CATALOGUE.owns(type(_innermost(attack)))

    @property
    def description(self) -> str:
        """The attack as Foolbox shows it, with all its settings, without addresses in memory."""
        return re.sub(r" at 0x[0-9a-fA-F]+", "", f"Foolbox {self.attack!r}")

    def cost(self, threat_model: ThreatModel, *, classes: int) -> Cost | None:
        """See :meth:`robust_ext.attacks.base.Attack.cost`."""
        settings = vars(_innermost(self.attack))
        found = cost_of_steps(settings.__getitem__, settings, gradients=self.traits.gradients)
        return None if found is None else found * getattr(self.attack, "times", 1)

    def pursues(self, criterion: Criterion) -> bool:
        """See :meth:`robust_ext.attacks.base.Attack.pursues`; points of a target to start at are not searched for."""
        innermost = _innermost(self.attack)
        starts = self.traits.starting_points or needs_start(innermost, self.entry.start) or self.entry.refines
        if criterion.aims and not starts and type(innermost).__name__ not in UNTARGETED:
            return not criterion.ranks
        return super().pursues(criterion)

    def search(
        self, target: Target, inputs: Tensor, labels: Tensor, *, threat_model: ThreatModel, generator: torch.Generator
    ) -> Tensor:
        """Run the attack on the whole batch, see :meth:`robust_ext.attacks.base.Attack.search`."""
        space = UnitSpace(target, threat_model, needed=self.entry.unit_space)
        target, x = space.target, space.enter(inputs)
        framework = Framework.of(target.module, type(_innermost(self.attack)))
        settings: dict[str, Any] = {"epsilons": None if self.traits.minimum_norm else space.threat_model.epsilon}
        seed = draw_seed(generator)
        if self.traits.starting_points:
            found = starting_points(target, x, labels, generator=generator)[0]
            settings["starting_points"] = framework.array(found)
        criterion, module = self._criterion(target, x, labels, framework), target.module
        if self.entry.targeted:
            module = LowLogits(module)
        elif self.entry.flat:
            module = NeverFlat(module, power=self.entry.flat)
        attack = _with_norm(self.attack, threat_model.norm) if self.chooses_norm else self.attack
        if isinstance(criterion, Misclassified):
            attack = with_start(attack, self.entry.start)
        with (
            seeded_globals(seed),
            framework.seeded(seed),
            quiet(),
            raised_inside("Foolbox", self.name, describe),
        ):
            model = framework.model(module, target, x)
            _, candidates, _ = attack(model, framework.array(x), criterion, **settings)
        candidates = check_candidates(self.name, framework.tensor(candidates, x))
        excused = None
        if isinstance(criterion, Misclassified):
            excused = framework.tensor(criterion.excused.raw, labels).bool()
            if bool(criterion.unstarted.any()):
                warn(
                    f"{self.name}: found no adversarial point to start at for some samples, which come back as their "
                    "inputs"
                )
        return space.leave(self._without_failures(candidates, x, labels, excused, target), inputs)

    def _criterion(self, target: Target, inputs: Tensor, labels: Tensor, framework: Framework) -> Any:
        given = framework.array(labels)
        if self.entry.refines:
            return Anything(given)
        if target.criterion.aims:
            return foolbox.criteria.TargetedMisclassification(given)
        if self.entry.targeted:
            return foolbox.criteria.TargetedMisclassification(framework.array(runner_up(target, inputs, labels)))
        if needs_start(_innermost(self.attack), self.entry.start):
            return Misclassified(given, inputs=framework.array(inputs), bounds=target.bounds)
        return given

    def _without_failures(
        self, candidates: Tensor, inputs: Tensor, labels: Tensor, excused: Tensor | None, target: Target
    ) -> Tensor:
        if self.entry.refines:
            return restore_failed(candidates, inputs, labels, target=target)
        lost = torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)
        if self.traits.failure == "zeros":
            lost = (candidates == 0).flatten(1).all(1)
        if excused is not None:
            lost = excused
        return torch.where(over_rows(lost, inputs), inputs, candidates)


def from_class(attack_class: type, settings: object, *, name: str | None = None) -> FoolboxAttack:
    """Make an attack from a Foolbox class and the keyword arguments of its constructor.

    Where the class has a setting for the norm (``distance``, or ``constraint`` of HopSkipJump) and it is left out, the
    threat model's norm is used.
    """
    entry, settings, label = checked(CATALOGUE, attack_class, settings)
    with constructed("Foolbox", attack_class, settings, describe), quiet():
        attack = attack_class(**settings)
    by_constraint = entry.norm_setting == "constraint" and "constraint" not in settings
    return _wrap(attack, entry, name or label, by_constraint=by_constraint)


def from_object(attack: Any, *, name: str | None = None) -> FoolboxAttack:
    """Wrap a Foolbox attack object; one whose ``distance`` is None is given the threat model's norm."""
    return _wrap(attack, CATALOGUE.entry(type(_innermost(attack))), name or repr(attack), by_constraint=False)


def _wrap(attack: Any, entry: Entry, name: str, *, by_constraint: bool) -> FoolboxAttack:
    innermost = _innermost(attack)
    chooses_norm = by_constraint or (isinstance(innermost, _Flexible) and getattr(innermost, "_distance", None) is None)
    if not chooses_norm and hasattr(innermost, "distance"):
        norm = _NORM_OF_P.get(getattr(innermost.distance, "p", math.nan))
        if norm is None:
            raise InvalidArgumentError("attack", repr(attack), "an attack whose distance is linf, l2, l1 or l0")
        entry = replace(entry, traits=replace(entry.traits, norms=(norm,)))
    return FoolboxAttack(attack, name=name, entry=entry, chooses_norm=chooses_norm)


def _innermost(attack: Any) -> Any:
    while isinstance(attack, _Repeated):
        attack = attack.attack
    return attack


def _with_norm(attack: Any, norm: str) -> Any:
    """Copy the attack with the distance ``norm``; the user's object stays unchanged."""
    changed = copy.copy(attack)
    if isinstance(attack, _Repeated):
        changed.attack = _with_norm(attack.attack, norm)
    elif isinstance(attack, _Flexible):
        changed._distance = _DISTANCES[norm]
    else:
        changed.constraint, changed.distance = norm, _DISTANCES[norm]
    return changed
