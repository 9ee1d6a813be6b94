"""Making the Foolbox classes of this project's own attacks from their declarations."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from robust_ext.adapters.building import (
    SEED,
    HostParameter,
    draws,
    host_parameters,
    make_constructor,
    make_docstring,
)
from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.adapters.foolbox.native import (
    NativeFixedEpsilonAttack,
    NativeMinimizationAttack,
    NativeNormlessAttack,
)
from robust_ext.attacks.native import NativeAttack

# What Foolbox calls an attack, where it is another name; and those that have a shorter name as well.
_STEMS = {"APGD": "AutoProjectedGradientDescent", "CarliniWagnerLinf": "CarliniWagner"}
_ALIASES = ("APGD", "ObjectivePGD")
_MODULE = "robust_ext.adapters.foolbox.attacks"


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
    if traits.normless:
        return {f"{stem}Attack": _make(f"{stem}Attack", NativeNormlessAttack, attack_class, parameters)}
    host = NativeMinimizationAttack if traits.minimum_norm else NativeFixedEpsilonAttack
    base = _make(f"Base{stem}", host, attack_class, parameters)
    classes = {base.__name__: base}
    for norm in traits.norms:
        title = norm.capitalize()
        doc = make_docstring(attack_class, parameters, first=f"{title}: ")
        parts = {"distance": getattr(foolbox.distances, norm), "__doc__": doc, "__module__": _MODULE}
        name = f"{title}{stem}Attack"
        classes[name] = type(base)(name, (base,), parts)
        if attack_class.__name__ in _ALIASES:
            classes[f"{title}{attack_class.__name__}"] = classes[name]
    return classes


def _make(name: str, host: Any, attack_class: type[NativeAttack], parameters: tuple[HostParameter, ...]) -> Any:
    parts = {
        "core": attack_class,
        "parameters": parameters,
        "__init__": make_constructor(entry.parameter(inspect.Parameter.KEYWORD_ONLY) for entry in parameters),
        "__doc__": make_docstring(attack_class, parameters),
        "__module__": _MODULE,
    }
    return type(host)(name, (host,), parts)


def _parameters(attack_class: type[NativeAttack]) -> tuple[HostParameter, ...]:
    """Return the constructor's parameters, with a random start as a flag."""
    found = []
    for entry in host_parameters(attack_class, "foolbox"):
        if entry.name != "random_start":
            found.append(entry)
            continue
        kind: Any = bool | None if entry.default is None else bool
        default = None if entry.default is None else entry.default == "random"
        text = f'True for ``start="random"`` of the attack, False for ``"input"``. {entry.help}'
        found.append(dataclasses.replace(entry, annotation=kind, default=default, help=text))
    return (*found, SEED) if draws(attack_class) else tuple(found)
