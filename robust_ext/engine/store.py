"""Records of a run in memory; :mod:`robust_ext.engine.run_folder` has those that survive a kill."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

        Samples that its timing states as ``left_out`` have no records.
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
        """Return the arrays under a name; None where there are none."""
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
