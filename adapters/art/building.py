"""Making the ART classes of this project's own attacks from their declarations."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from robust_ext.adapters.art.library import art
from robust_ext.adapters.art.native import EvasionAttack, NativeEvasionAttack
from robust_ext.adapters.building import (
    SEED,
    HostParameter,
    draws,
    host_parameters,
    make_constructor,
    make_docstring,
)
from robust_ext.attacks.native import NativeAttack

_MODULE = "robust_ext.adapters.art.attacks"
# Where ART's own attacks have their parameters, by position after norm and eps; others follow.
_ORDER = ("eps_step", "max_iter", "targeted", "num_random_init", "batch_size")
_NORMS: dict[str, tuple[float, str]] = {"linf": (np.inf, '``np.inf`` or ``"inf"``'), "l2": (2, "2"), "l1": (1, "1")}
_LAST = (
    HostParameter(
        name="summary_writer",
        annotation=Any,
        default=False,
        help="As in all of ART; updated after each step.",
    ),
    HostParameter(name="verbose", annotation=bool, default=True, help="Whether to show a progress bar."),
)
_ESTIMATOR = inspect.Parameter("estimator", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Any)


def art_class(attack_class: type[NativeAttack]) -> Any:
    """Make the ART class of an attack, with the same name.

    Args:
        attack_class: A declared attack, whose defaults state what it can do.

    Example:
        >>> from robust_ext.attacks.random_search import RandomSearch
        >>> list(inspect.signature(art_class(RandomSearch)).parameters)[:5]
        ['estimator', 'norm', 'eps', 'max_iter', 'targeted']
    """
    traits = attack_class().traits
    parameters = _parameters(attack_class)
    shown = (entry.parameter(inspect.Parameter.POSITIONAL_OR_KEYWORD) for entry in parameters)
    estimators = art.estimators
    gradients = (estimators.LossGradientsMixin,) if traits.gradients else ()
    text = "A ``DefendedPyTorchClassifier``." if traits.detector else "A classifier with ``clip_values``."
    documented = HostParameter(name="estimator", annotation=Any, default=None, help=text)
    parts = {
        "core": attack_class,
        "parameters": parameters,
        "attack_params": [*EvasionAttack.attack_params, *(entry.name for entry in parameters)],
        "_estimator_requirements": (estimators.BaseEstimator, *gradients, estimators.classification.ClassifierMixin),
        "__init__": make_constructor([_ESTIMATOR, *shown]),
        "__doc__": make_docstring(attack_class, [documented, *parameters]),
        "__module__": _MODULE,
    }
    metaclass: Any = type(NativeEvasionAttack)
    return metaclass(attack_class.__name__, (NativeEvasionAttack,), parts)


def _parameters(attack_class: type[NativeAttack]) -> tuple[HostParameter, ...]:
    """Return the constructor's parameters after the estimator, in ART's order."""
    traits = attack_class().traits
    own = {entry.name: entry for entry in host_parameters(attack_class, "art")}
    own |= {"targeted": _entry("targeted", False, "Whether to aim at the labels.")}
    own |= {"batch_size": _entry("batch_size", 32, "How many samples are attacked together.")}
    first = []
    if not traits.normless:
        text = f"One of {', '.join(_NORMS[norm][1] for norm in traits.norms)}."
        default = _NORMS[traits.norms[0]][0]
        first.append(HostParameter(name="norm", annotation=float | str, default=default, help=text))
        if attack_class.stops_at_epsilon or not traits.minimum_norm:
            text = "In units of the inputs, at least 0; or an array of them, see the base class."
            if traits.minimum_norm:
                text = "In units of the inputs, above 0: how near a point has to be for its sample to be finished."
            first.append(HostParameter(name="eps", annotation=float | np.ndarray, default=0.3, help=text))
    ordered = [own.pop(key) for key in _ORDER if key in own]
    seed = (SEED,) if draws(attack_class) else ()
    return (*first, *ordered, *own.values(), *seed, *_LAST)


def _entry(name: str, default: Any, text: str) -> HostParameter:
    return HostParameter(name=name, annotation=type(default), default=default, help=text)
