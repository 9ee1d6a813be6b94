"""What an ART attack object was made with."""

from __future__ import annotations

import inspect
from typing import Any

from robust_ext.adapters import wrapped
from robust_ext.adapters.art.library import art

ESTIMATORS = ("estimator", "classifier")


def settings_of(attack: Any) -> dict[str, Any]:
    """The settings of an attack object that differ from the defaults of its class, without the estimator."""

    def read(key: str, parameter: inspect.Parameter) -> Any:
        places = (attack, getattr(attack, "_attack", None))
        names = (f"_{key}_arg", key, f"_{key}")
        found = (getattr(place, name) for place in places for name in names if hasattr(place, name))
        value = next(found, wrapped.MISSING)
        if key in ESTIMATORS or isinstance(value, art.estimators.BaseEstimator):
            return wrapped.MISSING
        # What the constructor filled in for None belongs to the old estimator: a bound loss, a default list of attacks.
        filled_in = parameter.default is None and (_belongs_to_art(value) or key == "attacks")
        return wrapped.MISSING if filled_in else value

    return wrapped.settings_of(attack, read)


def _belongs_to_art(value: object) -> bool:
    return callable(value) and str(getattr(value, "__module__", "")).split(".")[0] == "art"
