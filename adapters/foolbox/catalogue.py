"""What is known of Foolbox's attacks, as data, and how a class name is found.

All attacks but ``DatasetAttack`` query the model with the full batch in row order, so rows are ``"ordered"``. In some
the rows of a batch still influence each other's result, through a stopping rule or a noise draw they share: C&W, EAD,
Boundary, HopSkipJump, Brendel-Bethge.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

from robust_ext.adapter import AttackListing
from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.attacks.base import AttackTraits
from robust_ext.errors import InvalidArgumentError
from robust_ext.specification import did_you_mean
from robust_ext.threat import NORMS

_BASE = foolbox.attacks.base

_L0 = "it minimises l0, which is no norm of a threat model; use the l1 attack of the same family"
UNUSABLE = {
    "Attack": "it is the base class; name an attack",
    "BinarizationRefinementAttack": "it only refines given starting points; use another attack",
    "DatasetAttack": "it returns other samples of the batch, each under its own row; use another attack",
    "GenAttack": "it accepts targeted criteria only, and attacks here are untargeted; use HopSkipJumpAttack",
    "L0BrendelBethgeAttack": _L0,
    "L0FMNAttack": _L0,
    "SpatialAttack": "rotations and shifts leave every norm ball; use a norm-bounded attack",
}

WITHOUT_GRADIENTS = frozenset(
    {
        "BinarySearchContrastReductionAttack",
        "BoundaryAttack",
        "GaussianBlurAttack",
        "HopSkipJumpAttack",
        "InversionAttack",
        "L2AdditiveGaussianNoiseAttack",
        "L2AdditiveUniformNoiseAttack",
        "L2ClippingAwareAdditiveGaussianNoiseAttack",
        "L2ClippingAwareAdditiveUniformNoiseAttack",
        "L2ClippingAwareRepeatedAdditiveGaussianNoiseAttack",
        "L2ClippingAwareRepeatedAdditiveUniformNoiseAttack",
        "L2ContrastReductionAttack",
        "L2RepeatedAdditiveGaussianNoiseAttack",
        "L2RepeatedAdditiveUniformNoiseAttack",
        "LinearSearchBlendedUniformNoiseAttack",
        "LinearSearchContrastReductionAttack",
        "LinfAdditiveUniformNoiseAttack",
        "LinfRepeatedAdditiveUniformNoiseAttack",
        "PointwiseAttack",
        "SaltAndPepperNoiseAttack",
    }
)

# Their distance is chosen by a setting of another name than the flexible attacks' ``distance``.
CONSTRAINT_NORMS = {"HopSkipJumpAttack": ("linf", "l2")}

_NORM_OF_P = {math.inf: "linf", 2: "l2", 1: "l1"}


def find_class(name: str, *, argument: str = "attack") -> type:
    """The class of ``foolbox.attacks`` called ``name``, aliases included.

    Raises:
        InvalidArgumentError: There is none, or it cannot be used here; the text says why.
    """
    known = _classes()
    if name not in known:
        near = did_you_mean(name, [entry for entry in known if known[entry].__name__ not in UNUSABLE])
        expected = f"the name of an attack in foolbox.attacks{near or '; robust-ext attacks lists them'}"
        raise InvalidArgumentError(argument, f"foolbox:{name}", expected)
    return known[name]


def check_usable(attack_class: type, *, argument: str = "attack") -> None:
    """Raise :class:`InvalidArgumentError` for a class that makes no sense in a norm ball, or is no attack."""
    if not issubclass(attack_class, _BASE.Attack):
        raise InvalidArgumentError(
            argument, f"foolbox's {attack_class.__name__}", "one of the attacks in foolbox.attacks"
        )
    if _is_own(attack_class) and attack_class.__name__ in UNUSABLE:
        reason = UNUSABLE[attack_class.__name__]
        raise InvalidArgumentError(argument, f"foolbox:{attack_class.__name__}", f"an attack that fits here: {reason}")


def traits_of(attack_class: type, norms: tuple[str, ...]) -> AttackTraits:
    """The traits of a class, with the norms found for it; classes of others are attacked one row at a time."""
    own = _is_own(attack_class)
    return AttackTraits(
        rows="ordered" if own else "single",
        gradients=not (own and attack_class.__name__ in WITHOUT_GRADIENTS),
        minimum_norm=issubclass(attack_class, _BASE.MinimizationAttack),
        norms=norms,
    )


def norms_of(distance: object) -> tuple[str, ...]:
    """The norm that a Foolbox distance measures; none for a distance that is no norm of a threat model."""
    norm = _NORM_OF_P.get(getattr(distance, "p", 0))
    return () if norm is None else (norm,)


def list_attacks() -> list[AttackListing]:
    """One entry for each class, those that cannot be used included."""
    listed = []
    public = _classes()
    for name, attack_class in public.items():
        if name != attack_class.__name__ or attack_class is _BASE.Attack:
            continue
        aliases = tuple(other for other, known in public.items() if known is attack_class and other != name)
        reason = UNUSABLE.get(name, "")
        traits = AttackTraits() if reason else traits_of(attack_class, _class_norms(attack_class))
        listed.append(AttackListing(name=name, traits=traits, aliases=aliases, reason=reason))
    return listed


def _classes() -> dict[str, type]:
    members = inspect.getmembers(foolbox.attacks, inspect.isclass)
    return {name: member for name, member in members if issubclass(member, _BASE.Attack)}


def _class_norms(attack_class: Any) -> tuple[str, ...]:
    if attack_class.__name__ in CONSTRAINT_NORMS:
        return CONSTRAINT_NORMS[attack_class.__name__]
    if issubclass(attack_class, _BASE.FlexibleDistanceMinimizationAttack):
        return NORMS
    # Some classes hold their distance as a property that reads nothing from the object.
    return norms_of(attack_class.__new__(attack_class).distance)


def _is_own(attack_class: type) -> bool:
    return attack_class.__module__.startswith("foolbox.attacks.")
