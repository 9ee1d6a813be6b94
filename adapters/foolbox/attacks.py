"""This project's own attacks as Foolbox attacks, made from their declarations.

``attacks.pyi`` has them for type checkers. Each attack has a class for each of its norms, such as
``LinfRandomSearchAttack``, with Foolbox's names of parameters; what they have in common stands at
:class:`robust_ext.adapters.foolbox.native.NativeFoolboxAttack`.
"""

from __future__ import annotations

from robust_ext.adapters.foolbox.building import foolbox_classes
from robust_ext.adapters.foolbox.native import NativeFixedEpsilonAttack, NativeMinimizationAttack
from robust_ext.adapters.foolbox.objectives import WithObjective, with_objective
from robust_ext.attacks.catalogue import ATTACKS

_CLASSES = {name: made for attack in ATTACKS for name, made in foolbox_classes(attack).items()}
globals().update(_CLASSES)

__all__ = [
    "NativeFixedEpsilonAttack",
    "NativeMinimizationAttack",
    "WithObjective",
    "with_objective",
    *_CLASSES,
]
