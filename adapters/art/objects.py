"""What an ART attack object was made with."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from robust_ext.adapters.art.library import art

ESTIMATORS = ("estimator", "classifier")
_MISSING = object()


def settings_of(attack: Any) -> dict[str, Any]:
    """The settings of an attack object that differ from the defaults of its class, without the estimator."""
    settings = {}
    for key, parameter in inspect.signature(type(attack)).parameters.items():
        value = _read(attack, key)
        if key in ESTIMATORS or value is _MISSING or isinstance(value, art.estimators.BaseEstimator):
            continue
        # What the constructor filled in for None belongs to the old estimator: a bound loss, a default list of attacks.
        filled_in = parameter.default is None and (_belongs_to_art(value) or key == "attacks")
        if not filled_in and not _same(value, parameter.default):
            settings[key] = value
    return settings


def _read(attack: Any, key: str) -> Any:
    places = (attack, getattr(attack, "_attack", None))
    names = (f"_{key}_arg", key, f"_{key}")
    return next((getattr(place, name) for place in places for name in names if hasattr(place, name)), _MISSING)


def _belongs_to_art(value: object) -> bool:
    return callable(value) and str(getattr(value, "__module__", "")).split(".")[0] == "art"


def _same(value: Any, default: Any) -> bool:
    if isinstance(value, np.ndarray) or isinstance(default, np.ndarray):
        return np.array_equal(value, default)
    return value is default or (type(value) is type(default) and bool(value == default))
