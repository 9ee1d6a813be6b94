"""The schema of records: what each line of a run folder holds, checked when it is read."""

from __future__ import annotations

from types import NoneType
from typing import Any

from robust_ext.engine.trace import COLUMNS, CURVE
from robust_ext.engine.verify import OUTCOMES

# A type; alternatives; a set of values; [of each element], or several [in order]; {by name}, where "name?" may be
# missing, and ``str`` stands for any name.
Shape = Any

_NUMBER = (int, float)
_NUMBER_OR_NONE = (int, float, NoneType)
_OUTCOME = frozenset(OUTCOMES)
_PLANTED = _OUTCOME | {"not_planted"}
_TRACE = (dict.fromkeys(COLUMNS, _NUMBER_OR_NONE), NoneType)
_CURVE = [dict.fromkeys(CURVE, _NUMBER_OR_NONE)]
_SPENT = [_NUMBER, _NUMBER, _NUMBER]
_PHASES = {"attack": _SPENT, "verify": _SPENT}
_ATTACKED = {
    "index": int,
    "sample": int,
    "outcome": _OUTCOME,
    "distance": _NUMBER_OR_NONE,
    "trace": _TRACE,
    "error?": str,
}
_PROBLEM = {
    "outcome": _PLANTED,
    "planted": int,
    "references": int,
    "distance": _NUMBER_OR_NONE,
    "reach": _NUMBER_OR_NONE,
    "canary": (frozenset({"repaired", "kept", "lost"}), NoneType),
    "trace": _TRACE,
    "error?": str,
    "deepest?": _NUMBER_OR_NONE,
    "depths?": [{"depth": _NUMBER, "outcome": _PLANTED | {"not_run"}, "reach": _NUMBER_OR_NONE}],
    "batches?": {"rows": int, "found": int, "gained": int, "lost": int},
    "behind?": {"outcome": _PLANTED, "random_reach": _NUMBER_OR_NONE},
}
_RECORDS: dict[str, Shape] = {
    "attack": {**_ATTACKED, "predicted": int, "margin?": _NUMBER, "detected?": bool},
    "case_study": {**_ATTACKED, "correct": bool},
    "test_time": {
        **_ATTACKED,
        "static": bool,
        "right": [bool],
        "static_finite": bool,
        "finite": [bool],
        "margin": _NUMBER,
    },
    "binarization": {
        "index": int,
        "sample": int,
        "separable": bool,
        "random_reach": _NUMBER_OR_NONE,
        "random_draws": int,
        "attacks": {str: _PROBLEM},
        "witnesses?": {str: _NUMBER_OR_NONE},
        "planting?": {"found": bool, "source": (str, NoneType), "tries": int},
    },
}
_TIMED = {
    "block": int,
    "seconds": _NUMBER,
    "isolated": bool,
    "warnings?": {str: bool},
}
_TIMINGS: dict[str, Shape] = {
    **{kind: {**_TIMED, "phases": _PHASES, "curve?": _CURVE} for kind in _RECORDS},
    "binarization": {**_TIMED, "phases": {str: _SPENT}, "attacks": {str: {"phases": _PHASES, "curve": _CURVE}}},
}
_ANY = {"left_out?": [int], "arrays?": {str: {str: [int, int, str]}}}
_CHOSEN = {"kappa": _NUMBER, "inner_points": int, "gap": _NUMBER, "boundary_points": int, "depth": _NUMBER}
_CALIBRATION = {
    "chosen": (_CHOSEN, NoneType),
    "reason": str,
    "rows": [{"attack": str, str: object}],
    "seconds": _NUMBER,
}


def check_entry(entry: dict[str, Any], *, kind: str | None) -> None:
    """Check an entry of a run of this kind, None before the run itself; ValueError with what does not fit."""
    shape: Shape
    if kind is None:
        shape = {"run": {"kind": str, "settings": dict, "versions": {str: str}}}
    elif "index" in entry:
        shape = _RECORDS.get(kind, {"index": int})
    elif "value" in entry:
        shape = {"value": str, "content": _CALIBRATION if entry["value"] == "calibration" else object}
    elif "block" in entry:
        shape = {**_TIMINGS.get(kind, {"block": int}), **_ANY}
    else:
        shape = {"arrays": _ANY["arrays?"]}
    wrong = misfit(entry, shape)
    if wrong is not None:
        raise ValueError(f"does not hold what a run of kind {kind!r} holds ({wrong})")


def misfit(value: object, shape: Shape, name: str = "") -> str | None:
    """Return what of a plain value does not fit a shape; None where all does."""
    if type(value) is shape or shape is object:
        return None
    if isinstance(shape, tuple):
        found = None if type(value) in shape else [misfit(value, one, name) for one in shape]
        # Of alternatives, the first is the one that is meant.
        return None if found is None or None in found else found[0]
    if isinstance(shape, list):
        if not isinstance(value, list):
            return _words(name, value, "a list")
        if 1 < len(shape) != len(value):
            return _words(name, value, f"{len(shape)} elements")
        shapes = shape if len(shape) > 1 else shape * len(value)
        inside = (misfit(one, part, f"{name}[{n}]") for n, (one, part) in enumerate(zip(value, shapes, strict=True)))
        return next((wrong for wrong in inside if wrong), None)
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return _words(name, value, "an object")
        named = {key.removesuffix("?"): one for key, one in shape.items() if key is not str}
        parts = {key: named.get(key, shape.get(str, object)) for key in value}
        missing = [key for key in shape if isinstance(key, str) and not key.endswith("?") and key not in value]
        if missing:
            return f"{name + ': ' if name else ''}no {missing[0]}"
        inside = (misfit(value[key], part, f"{name}.{key}" if name else key) for key, part in parts.items())
        return next((wrong for wrong in inside if wrong), None)
    if isinstance(shape, frozenset):
        known = isinstance(value, str) and value in shape
        return None if known else _words(name, value, "one of " + ", ".join(sorted(shape)))
    return _words(name, value, shape.__name__)


def _words(name: str, value: object, expected: str) -> str:
    shown = repr(value)
    return f"{name or 'it'} is {shown[:40]}, expected {expected}"
