"""Foolbox attacks as attacks of this project."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from robust_ext.adapters.foolbox.catalogue import CONSTRAINT_NORMS, check_usable, norms_of, traits_of
from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.attacks.base import Attack, AttackTraits, draw_seed
from robust_ext.errors import AttackError, InvalidArgumentError, MissingDependencyError
from robust_ext.random_streams import seeded_globals
from robust_ext.specification import check_keywords
from robust_ext.target import Target
from robust_ext.threat import NORMS, ThreatModel

_DISTANCES = {norm: getattr(foolbox.distances, norm) for norm in NORMS}


class FoolboxAttack(Attack):
    """A Foolbox attack, run through its public call.

    Fixed-epsilon attacks are given the threat model's epsilon, and Foolbox clips what they return to it.
    Minimum-norm attacks are run once without an epsilon, and what they return is left as it is. Foolbox knows global
    seeds only, so the run is seeded from the generator and the global generators are restored afterwards.

    Args:
        attack: The Foolbox attack; it is not changed.
        name: How tables call it.
        traits: What it needs and how it treats rows.
        chooses_norm: Whether its distance is set to the threat model's norm.
    """

    def __init__(self, attack: Any, *, name: str, traits: AttackTraits, chooses_norm: bool) -> None:
        self.attack = attack
        self.name = name
        self.traits = traits
        self.chooses_norm = chooses_norm

    @property
    def description(self) -> str:
        """The attack as Foolbox shows it, with all its settings."""
        return f"Foolbox {self.attack!r}"

    def generate(
        self,
        target: Target,
        inputs: Tensor,
        labels: Tensor,
        *,
        threat_model: ThreatModel,
        generator: torch.Generator,
    ) -> Tensor:
        """Run the attack on the whole batch, see :meth:`robust_ext.attacks.base.Attack.generate`.

        Raises:
            AttackError: Foolbox or the attack raised, or returned no tensor.
        """
        attack = _with_norm(self.attack, threat_model.norm) if self.chooses_norm else self.attack
        epsilon = None if self.traits.minimum_norm else threat_model.epsilon
        with seeded_globals(draw_seed(generator)):
            try:
                model = foolbox.PyTorchModel(target.module, bounds=target.bounds, device=target.device)
                _, candidates, _ = attack(model, inputs.clone(), labels.clone(), epsilons=epsilon)
            except Exception as error:
                raise AttackError(f"{self.name}: {_describe(error)}") from error
        if not isinstance(candidates, Tensor):
            raise AttackError(f"{self.name}: returned {type(candidates).__name__}, expected a tensor of candidates")
        return candidates.detach()


def from_class(attack_class: type, settings: object, *, name: str | None = None) -> FoolboxAttack:
    """Make an attack from a Foolbox class and the keyword arguments of its constructor.

    Where the class has a setting for the norm (``distance``, or ``constraint`` of HopSkipJump) and it is left out, the
    threat model's norm is used.

    Raises:
        InvalidArgumentError: The class cannot be used here, or does not accept these settings.
        MissingDependencyError: The attack needs a package that is not installed.
    """
    check_usable(attack_class)
    if not isinstance(settings, Mapping):
        raise InvalidArgumentError(
            "attack", f"settings of type {type(settings).__name__}", "a dict of keyword arguments"
        )
    label = attack_class.__name__
    check_keywords(attack_class, settings, argument="attack", label=label)
    try:
        attack = attack_class(**settings)
    except ImportError as error:
        # Brendel-Bethge needs numba, which Foolbox does not install.
        raise MissingDependencyError(f"{label}: {error}; pip install {error.name or 'it'}") from error
    except Exception as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in settings.items())
        raise InvalidArgumentError("attack", f"{label}({shown})", f"settings it accepts; {_describe(error)}") from error
    by_constraint = label in CONSTRAINT_NORMS and "constraint" not in settings
    return _wrap(attack, name or label, by_constraint=by_constraint)


def from_object(attack: Any, *, name: str | None = None) -> FoolboxAttack:
    """Wrap a Foolbox attack object; one whose ``distance`` is None is given the threat model's norm.

    Raises:
        InvalidArgumentError: It is of a class that cannot be used here.
    """
    check_usable(type(_innermost(attack)))
    return _wrap(attack, name or repr(attack), by_constraint=False)


def _wrap(attack: Any, name: str, *, by_constraint: bool) -> FoolboxAttack:
    innermost = _innermost(attack)
    flexible = isinstance(innermost, foolbox.attacks.base.FlexibleDistanceMinimizationAttack)
    chooses_norm = by_constraint or (flexible and getattr(innermost, "_distance", None) is None)
    norms: tuple[str, ...]
    if by_constraint:
        norms = CONSTRAINT_NORMS[type(innermost).__name__]
    elif chooses_norm:
        norms = NORMS
    else:
        # An attack without a distance of its own is judged in whatever norm the threat model has.
        norms = norms_of(innermost.distance) if hasattr(innermost, "distance") else NORMS
    if not norms:
        raise InvalidArgumentError("attack", repr(attack), "an attack whose distance is linf, l2 or l1")
    return FoolboxAttack(attack, name=name, traits=traits_of(type(innermost), norms), chooses_norm=chooses_norm)


def _innermost(attack: Any) -> Any:
    while isinstance(attack, foolbox.attacks.base.Repeated):
        attack = attack.attack
    return attack


def _with_norm(attack: Any, norm: str) -> Any:
    """A copy of the attack whose distance is ``norm``; the user's own object stays as it is."""
    changed = copy.copy(attack)
    if isinstance(attack, foolbox.attacks.base.Repeated):
        changed.attack = _with_norm(attack.attack, norm)
    elif isinstance(attack, foolbox.attacks.base.FlexibleDistanceMinimizationAttack):
        changed._distance = _DISTANCES[norm]
    else:
        changed.constraint, changed.distance = norm, _DISTANCES[norm]
    return changed


def _describe(error: Exception) -> str:
    # Foolbox checks what users pass by bare assertions, which have no text.
    return f"Foolbox raised {type(error).__name__}" + (f": {error}" if str(error) else " without a message")
