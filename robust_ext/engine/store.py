"""Records of a run in memory and their schema; :mod:`robust_ext.engine.run_folder` has those on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    "attack": {**_ATTACKED, "predicted": int},
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
_CHOSEN = {"kappa": _NUMBER, "inner_points": int, "depth": _NUMBER}
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


Record = Mapping[str, Any]
Floats = NDArray[np.float64]
Arrays = Mapping[str, Mapping[str, Any]]
"""Arrays by name and part."""

to_text = json.JSONEncoder(allow_nan=False).encode
"""A plain value as JSON; ValueError for NaN and infinity, which JSON does not have."""


@dataclass
class Slot:
    """A value that may have to be computed."""

    value: Any = None
    empty: bool = True

    def fill(self, value: Any) -> None:
        """Set the value."""
        self.value, self.empty = value, False


class Store:
    """Records of a run in memory, where they end with its process."""

    def __init__(self) -> None:
        # As text, of which many take a fifth of the memory.
        self._records: dict[int, str] = {}
        self._timings: dict[int, Record] = {}
        self._values: dict[str, Any] = {}
        # By name and part: the arrays themselves; in a folder, where each begins, its bytes and its checksum.
        self._arrays: dict[str, Any] = {}
        # Seconds and number of the blocks that were there when it was opened.
        self.earlier, self.resumed = 0.0, 0

    def records(self) -> list[Record]:
        """Return all records, one an ``index``, sorted by it."""
        return [json.loads(self._records[index]) for index in sorted(self._records)]

    def timings(self) -> list[Record]:
        """Return what each block took, in order."""
        return [self._timings[block] for block in sorted(self._timings)]

    def block(self, rows: range) -> list[Record]:
        """Return the records of a block that :meth:`holds` is true of."""
        return [json.loads(self._records[index]) for index in rows if index in self._records]

    def holds(self, rows: range) -> bool:
        """Return whether a block is finished: its timing, its records and its arrays are there.

        Samples that its timing marks as ``left_out`` have no records.
        """
        timing = self._timings.get(rows[0])
        if timing is None:
            return False
        left_out = timing.get("left_out", ())
        recorded = all(index in self._records or index in left_out for index in rows)
        return recorded and all(self._has(name) for name in timing.get("arrays", ()))

    def done(self) -> set[int]:
        """Return the indices of all samples that have a record or are left out."""
        return {*self._records, *(index for one in self._timings.values() for index in one.get("left_out", ()))}

    def append(self, records: Iterable[Record], timing: Record, arrays: Arrays | None = None) -> None:
        """Store a finished block: its records, what it took, and arrays by name."""
        texts = {record["index"]: to_text(record) for record in records}
        places = self._put(arrays or {})
        stated = {**timing, "arrays": places} if places else dict(timing)
        self._write([*texts.values(), to_text(stated)])
        self._records |= texts
        self._timings[timing["block"]] = stated
        self._arrays |= places

    @contextmanager
    def once(self, name: str) -> Iterator[Slot]:
        """Yield a slot for a plain value; where it is empty, the caller's block fills it, and it is stored."""
        slot = Slot(self._values.get(name), name not in self._values)
        missing = slot.empty
        yield slot
        if missing and not slot.empty:
            text = to_text({"value": name, "content": slot.value})
            self._write([text])
            slot.value = self._values[name] = json.loads(text)["content"]

    def save(self, name: str, **parts: Any) -> None:
        """Store arrays under a name, in place of those stored under it before."""
        places = self._put({name: parts})
        self._write([to_text({"arrays": places})])
        self._arrays |= places

    def load(self, name: str) -> dict[str, NDArray[Any]] | None:
        """Return the arrays under a name; None without any."""
        found: dict[str, NDArray[Any]] | None = self._arrays.get(name)
        return found

    def digest(self) -> str:
        """Return a checksum of the arrays stored with blocks; empty in memory."""
        return ""

    def finish(self, records: Iterable[Record]) -> None:
        """Drop all records but these."""
        wanted = {record["index"] for record in records}
        if wanted != set(self._records):
            self._records = {index: text for index, text in self._records.items() if index in wanted}
            self._rewrite()

    def close(self) -> None:
        """Let other processes write the folder."""

    def _has(self, name: str) -> bool:
        return name in self._arrays

    def _put(self, arrays: Arrays) -> dict[str, Any]:
        """Store arrays; return what lines state about them."""
        for name, parts in arrays.items():
            self._arrays[name] = {part: np.asarray(one) for part, one in parts.items()}
        return {}

    def _write(self, texts: Iterable[str]) -> None:
        """Append lines; memory has none."""

    def _rewrite(self) -> None:
        """Write all lines again; memory has none."""
