"""This project's own attacks as Foolbox attacks, made from their declarations.

``attacks.pyi`` has them for type checkers. Each attack has a class for each of its norms, such as
``LinfRandomSearchAttack``, with Foolbox's names of parameters; what they have in common stands at
:class:`robust_ext.adapters.foolbox.native.NativeFoolboxAttack`.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.adapters.foolbox.native import (
    NativeFixedEpsilonAttack,
    NativeMinimizationAttack,
    NativeNormlessAttack,
)
from robust_ext.adapters.foolbox.objectives import WithObjective, with_objective
from robust_ext.adapters.native import SEED, HostParameter, class_parts, draws, host_parameters, make_docstring
from robust_ext.attacks.catalogue import ATTACKS
from robust_ext.attacks.native import NativeAttack

# What Foolbox calls an attack, where it is another name; and those that have a shorter name as well.
_STEMS = {"APGD": "AutoProjectedGradientDescent", "CarliniWagnerLinf": "CarliniWagner"}
_ALIASES = ("APGD", "ObjectivePGD")


def foolbox_classes(attack_class: type[NativeAttack]) -> dict[str, Any]:
    """Make the Foolbox classes of an attack by name: a base, one for each norm, and shorter names of some.

    Args:
        attack_class: A declared attack, whose defaults state what it can do.

    Example:
        >>> from robust_ext.attacks.random_search import RandomSearch
        >>> list(foolbox_classes(RandomSearch))[:2]
        ['BaseRandomSearch', 'LinfRandomSearchAttack']
    """
    traits, stem = attack_class().traits, _STEMS.get(attack_class.__name__, attack_class.__name__)
    parameters = _parameters(attack_class)
    parts = class_parts(attack_class, parameters, inspect.Parameter.KEYWORD_ONLY) | {"__module__": __name__}
    if traits.normless:
        name, host = f"{stem}Attack", NativeNormlessAttack
    else:
        name, host = f"Base{stem}", NativeMinimizationAttack if traits.minimum_norm else NativeFixedEpsilonAttack
    base: Any = type(host)(name, (host,), parts)
    classes = {name: base}
    for norm in () if traits.normless else traits.norms:
        title = norm.capitalize()
        doc = make_docstring(attack_class, parameters, first=f"{title}: ")
        parts = {"distance": getattr(foolbox.distances, norm), "__doc__": doc, "__module__": __name__}
        name = f"{title}{stem}Attack"
        classes[name] = type(base)(name, (base,), parts)
        if attack_class.__name__ in _ALIASES:
            classes[f"{title}{attack_class.__name__}"] = classes[name]
    return classes


def _parameters(attack_class: type[NativeAttack]) -> tuple[HostParameter, ...]:
    """Return the constructor's parameters, with a random start as a flag."""
    found = []
    for entry in host_parameters(attack_class, "foolbox"):
        if entry.name == "random_start":
            kind: Any = bool | None if entry.default is None else bool
            default = None if entry.default is None else entry.default == "random"
            text = f'True for ``start="random"`` of the attack, False for ``"input"``. {entry.help}'
            entry = dataclasses.replace(entry, annotation=kind, default=default, help=text)
        found.append(entry)
    return (*found, SEED) if draws(attack_class) else tuple(found)


_CLASSES = {name: made for attack in ATTACKS for name, made in foolbox_classes(attack).items()}
globals().update(_CLASSES)

__all__ = [
    "NativeFixedEpsilonAttack",
    "NativeMinimizationAttack",
    "WithObjective",
    "with_objective",
    *_CLASSES,
]
