"""This project's own attacks as ART attacks, made from their declarations; ``attacks.pyi`` has them for type checkers.

Each has the name of the attack, ART's names and order of parameters, and the base class
:class:`robust_ext.adapters.art.native.NativeEvasionAttack`, which documents their common behaviour.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from robust_ext.adapters.art.library import art
from robust_ext.adapters.art.native import EvasionAttack, NativeEvasionAttack
from robust_ext.adapters.art.objectives import ObjectiveLoss, objective_estimator
from robust_ext.adapters.native import SEED, HostParameter, class_parts, draws, host_parameters
from robust_ext.attacks.catalogue import ATTACKS
from robust_ext.attacks.native import NativeAttack

# Where ART's own attacks have their parameters, by position after norm and eps; others follow.
_ORDER = ("eps_step", "max_iter", "targeted", "num_random_init", "batch_size")
_NORMS: dict[str, tuple[float, str]] = {"linf": (np.inf, '``np.inf`` or ``"inf"``'), "l2": (2, "2"), "l1": (1, "1")}


def art_class(attack_class: type[NativeAttack]) -> Any:
    """Make the ART class of an attack, with the same name.

    Args:
        attack_class: A declared attack, whose defaults state what it can do.

    Example:
        >>> from robust_ext.attacks.random_search import RandomSearch
        >>> list(inspect.signature(art_class(RandomSearch)).parameters)[:5]
        ['estimator', 'norm', 'eps', 'max_iter', 'targeted']
    """
    traits, estimators, parameters = attack_class().traits, art.estimators, _parameters(attack_class)
    gradients = (estimators.LossGradientsMixin,) if traits.gradients else ()
    text = "A ``DefendedPyTorchClassifier``." if traits.detector else "A classifier with ``clip_values``."
    estimator = _entry("estimator", inspect.Parameter.empty, text, Any)
    parts = {
        **class_parts(attack_class, parameters, inspect.Parameter.POSITIONAL_OR_KEYWORD, estimator),
        "attack_params": [*EvasionAttack.attack_params, *(entry.name for entry in parameters)],
        "_estimator_requirements": (estimators.BaseEstimator, *gradients, estimators.classification.ClassifierMixin),
        "__module__": __name__,
    }
    metaclass: Any = type(NativeEvasionAttack)
    return metaclass(attack_class.__name__, (NativeEvasionAttack,), parts)


def _parameters(attack_class: type[NativeAttack]) -> tuple[HostParameter, ...]:
    """Return the constructor's parameters after the estimator, in ART's order."""
    traits = attack_class().traits
    own = {entry.name: entry for entry in host_parameters(attack_class, "art")}
    own |= {"targeted": _entry("targeted", False, "Whether to aim at the labels.", bool)}
    own |= {"batch_size": _entry("batch_size", 32, "How many samples are attacked together.", int)}
    first = []
    if not traits.normless:
        text = f"One of {', '.join(_NORMS[norm][1] for norm in traits.norms)}."
        first.append(_entry("norm", _NORMS[traits.norms[0]][0], text, float | str))
        if attack_class.stops_at_epsilon or not traits.minimum_norm:
            text = "In units of the inputs, at least 0; or an array of them, see the base class."
            if traits.minimum_norm:
                text = "In units of the inputs, above 0: how near a point has to be for its sample to be finished."
            first.append(_entry("eps", 0.3, text, float | np.ndarray))
    ordered = [own.pop(key) for key in _ORDER if key in own]
    last = (
        *((SEED,) if draws(attack_class) else ()),
        _entry("summary_writer", False, "As in all of ART; updated after each step.", Any),
        _entry("verbose", True, "Whether to show a progress bar.", bool),
    )
    return (*first, *ordered, *own.values(), *last)


def _entry(name: str, default: Any, text: str, annotation: Any) -> HostParameter:
    return HostParameter(name=name, annotation=annotation, default=default, help=text)


_CLASSES = {attack.__name__: art_class(attack) for attack in ATTACKS}
globals().update(_CLASSES)

__all__ = ["NativeEvasionAttack", "ObjectiveLoss", "objective_estimator", *_CLASSES]
