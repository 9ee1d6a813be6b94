"""What is known of ART's evasion attacks, as data, and how a class name is found."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from robust_ext.adapter import AttackListing
from robust_ext.adapters.art.library import art
from robust_ext.attacks.base import AttackTraits
from robust_ext.errors import InvalidArgumentError, MissingDependencyError
from robust_ext.specification import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What the adapter has to know of a class.

    Args:
        traits: What it needs and how it treats rows, with ART's default settings.
        probabilities: Whether it needs a model of probabilities; it is then given the softmax of the logits.
        first_step: Default of ``eps_step`` as a part of epsilon; None where it follows from the iterations.
    """

    traits: AttackTraits
    probabilities: bool = False
    first_step: float | None = None


_L2 = ("l2",)
_LINF = ("linf",)

_DESCENT = Entry(traits=AttackTraits(rows="ordered"))
_MINIMUM_L2 = Entry(traits=AttackTraits(rows="ordered", minimum_norm=True, norms=_L2))
# These start with steps of twice eps_step and only shorten them; the papers start with twice epsilon.
_AUTO = Entry(traits=AttackTraits(rows="any"), first_step=1.0)

ENTRIES: Mapping[str, Entry] = {
    "AutoAttack": Entry(traits=AttackTraits(rows="any", minimum_classes=3), first_step=1.0),
    "AutoConjugateGradient": _AUTO,
    "AutoProjectedGradientDescent": _AUTO,
    "BasicIterativeMethod": Entry(traits=AttackTraits(rows="ordered", norms=_LINF)),
    "BoundaryAttack": Entry(traits=AttackTraits(rows="single", gradients=False, minimum_norm=True, norms=_L2)),
    "BrendelBethgeAttack": Entry(traits=AttackTraits(rows="ordered", minimum_norm=True)),
    "CarliniL2Method": Entry(traits=AttackTraits(rows="any", minimum_norm=True, norms=_L2)),
    "CarliniLInfMethod": Entry(traits=AttackTraits(rows="single", minimum_norm=True, norms=_LINF)),
    "DeepFool": _MINIMUM_L2,
    "ElasticNet": Entry(traits=AttackTraits(rows="ordered", minimum_norm=True, norms=("l1", "l2"))),
    "FastGradientMethod": _DESCENT,
    "HopSkipJump": Entry(traits=AttackTraits(rows="single", gradients=False, minimum_norm=True, norms=("linf", "l2"))),
    "MomentumIterativeMethod": _DESCENT,
    # Its step is made for probabilities: on logits it hardly ever reaches the boundary.
    "NewtonFool": replace(_MINIMUM_L2, probabilities=True),
    "ProjectedGradientDescent": _DESCENT,
    "ProjectedGradientDescentNumpy": _DESCENT,
    "ProjectedGradientDescentPyTorch": _DESCENT,
    "RescalingAutoConjugateGradient": _AUTO,
    "SignOPTAttack": Entry(
        traits=AttackTraits(rows="single", gradients=False, minimum_norm=True, norms=_L2, minimum_classes=3)
    ),
    "SimBA": Entry(
        traits=AttackTraits(rows="single", gradients=False, minimum_norm=True, norms=_L2), probabilities=True
    ),
    # Its l1 form returns the inputs as they are.
    "SquareAttack": Entry(traits=AttackTraits(rows="any", gradients=False, norms=("linf", "l2"))),
    "VirtualAdversarialMethod": Entry(traits=AttackTraits(rows="ordered", norms=_L2), probabilities=True),
    "ZooAttack": Entry(traits=AttackTraits(rows="single", gradients=False, minimum_norm=True, norms=_L2)),
}

# Classes of others: nothing is known, so nothing is assumed that could mix up rows.
UNKNOWN = Entry(traits=AttackTraits(rows="single"))

_L0 = "it minimises l0, which is no norm of a threat model; use an l1 attack such as ElasticNet"
_UNBOUNDED = "its changes leave every norm ball; use a norm-bounded attack such as ProjectedGradientDescent"
UNUSABLE: Mapping[str, str] = {
    "AdversarialPatch": _UNBOUNDED,
    "AdversarialPatchNumpy": _UNBOUNDED,
    "AdversarialPatchPyTorch": _UNBOUNDED,
    "CarliniL0Method": _L0,
    "CompositeAdversarialAttackPyTorch": _UNBOUNDED,
    "FeatureAdversariesNumpy": "it needs guide samples, which a call with labels does not have",
    "FeatureAdversariesPyTorch": "it needs guide samples, which a call with labels does not have",
    "FrameSaliencyAttack": "it is made for videos; use the attack it would wrap",
    "GRAPHITEBlackbox": _UNBOUNDED,
    "GRAPHITEWhiteboxPyTorch": _UNBOUNDED,
    "GeoDA": "it writes a file into the current folder and fails on numpy 2; use HopSkipJump",
    "LaserAttack": _UNBOUNDED,
    "LowProFool": "it is made for tables, takes labels as targets and needs a fit of its own; use CarliniL2Method",
    "OverTheAirFlickeringPyTorch": "it is made for videos; use ProjectedGradientDescent",
    "PixelAttack": _L0,
    "SaliencyMapMethod": _L0,
    "ShadowAttack": _UNBOUNDED,
    "SpatialTransformation": _UNBOUNDED,
    "TargetedUniversalPerturbation": "it takes labels as targets; use ProjectedGradientDescent",
    "ThresholdAttack": "its threshold is counted in pixel steps of 0..255; use SquareAttack",
    "UniversalPerturbation": "it makes one perturbation for all samples; use DeepFool, which it runs inside",
    "Wasserstein": "its ball is a Wasserstein ball; use ProjectedGradientDescent",
}

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
    reason = UNUSABLE.get(label, "it is not made for PyTorch classifiers; robust-ext attacks lists those that are")
    raise InvalidArgumentError(argument, f"art:{label}", f"an attack that fits here: {reason}")


def fewest_classes(entry: Entry, settings: Mapping[str, Any]) -> int:
    """The fewest classes a class works with under these settings: the DLR loss compares three logits."""
    if settings.get("loss_type") in _THREE_CLASS_LOSSES:
        return 3
    parts = settings.get("attacks")
    if parts:
        return max(3 if getattr(part, "loss_type", None) in _THREE_CLASS_LOSSES else 2 for part in parts)
    return entry.traits.minimum_classes


def list_attacks() -> list[AttackListing]:
    """One entry for each class, those that cannot be used included."""
    listed = []
    for name, member in inspect.getmembers(art.attacks.evasion, inspect.isclass):
        if member.__name__ != name:
            continue
        if name in ENTRIES:
            listed.append(AttackListing(name=name, traits=ENTRIES[name].traits))
        elif name in UNUSABLE:
            listed.append(AttackListing(name=name, reason=UNUSABLE[name]))
    return listed


NORM_VALUES: Mapping[str, float] = {"linf": float("inf"), "l2": 2, "l1": 1}
NORM_NAMES: Mapping[Any, str] = {"inf": "linf", **{value: norm for norm, value in NORM_VALUES.items()}}
