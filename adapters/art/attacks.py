"""This project's own attacks as ART attacks, made from their declarations; ``attacks.pyi`` has them for type checkers.

Each has the name of the attack, ART's names and order of parameters, and the base class
:class:`robust_ext.adapters.art.native.NativeEvasionAttack`, whose text states what they have in common.
"""

from __future__ import annotations

from robust_ext.adapters.art.building import art_class
from robust_ext.adapters.art.native import NativeEvasionAttack
from robust_ext.adapters.art.objectives import ObjectiveLoss, objective_estimator
from robust_ext.attacks.catalogue import ATTACKS

_CLASSES = {attack.__name__: art_class(attack) for attack in ATTACKS}
globals().update(_CLASSES)

__all__ = ["NativeEvasionAttack", "ObjectiveLoss", "objective_estimator", *_CLASSES]
