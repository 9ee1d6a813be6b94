"""The records of a run, in memory; :mod:`robust_ext.engine.run_folder` keeps them on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Record = Mapping[str, Any]
Floats = NDArray[np.float64]
Arrays = Mapping[str, Mapping[str, Any]]
"""Arrays by name and part."""

_MARK, _BYTES = b', "checksum": "', 8

to_text = json.JSONEncoder(allow_nan=False).encode
"""A plain value as JSON; ValueError for NaN and infinity, which JSON does not have."""


def checksum(*parts: bytes) -> str:
    """Return the BLAKE2b of parts, each with its length, as hexadecimal text."""
    found = hashlib.blake2b(digest_size=_BYTES)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


def seal(text: str, start: str) -> bytes:
    """Return the line of an entry, given as JSON, with a checksum of its text and of what its file belongs to."""
    content = text.encode()[:-1]
    return content + _MARK + checksum(start.encode(), content).encode() + b'"}\n'


def unseal(line: bytes, start: str) -> dict[str, Any]:
    """Return the entry of a line without its line break; ValueError where it does not match its checksum."""
    content = line[: -len(_MARK) - 2 * _BYTES - 2] + b"}"
    if line + b"\n" != seal(content.decode(errors="replace"), start):
        raise ValueError("does not match its checksum")
    entry: dict[str, Any] = json.loads(content)
    return entry


class Store:
    """The records of a run, which end with this process."""

    def __init__(self) -> None:
        # As text, of which many take a fifth of the memory.
        self._records: dict[int, str] = {}
        self._timings: dict[int, Record] = {}
        # By name and part: the arrays; in a folder, where each begins, its bytes and its checksum.
        self._arrays: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        """Plain values that are computed once, see :meth:`set_value`."""
        self.earlier, self.resumed = 0.0, 0
        """Seconds and number of the blocks that an earlier call has finished."""

    def records(self) -> list[Record]:
        """Return all records, sorted by ``index``."""
        return self.block(sorted(self._records))

    def timings(self) -> list[Record]:
        """Return what each block took, in order."""
        return [self._timings[block] for block in sorted(self._timings)]

    def block(self, rows: Iterable[int]) -> list[Record]:
        """Return the records of some rows."""
        return [json.loads(self._records[index]) for index in rows if index in self._records]

    def holds(self, rows: range) -> bool:
        """Return whether a block is finished: its timing, its records and its arrays are there.

        Samples that its timing marks as ``left_out`` have no records.
        """
        timing = self._timings.get(rows[0])
        return (
            timing is not None
            and all(index in self._records or index in timing.get("left_out", ()) for index in rows)
            and all(self._has(name) for name in timing.get("arrays", ()))
        )

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

    def set_value(self, name: str, value: Any) -> Any:
        """Store a plain value; return it as JSON keeps it."""
        text = to_text({"value": name, "content": value})
        self._write([text])
        self.values[name] = json.loads(text)["content"]
        return self.values[name]

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
        """Return a checksum of the arrays that a folder holds with its blocks."""
        held = (parts for timing in self.timings() for parts in timing.get("arrays", {}).values())
        return checksum(*(stated.encode() for parts in held for *_, stated in parts.values()))

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
        """Append lines to the folder."""

    def _rewrite(self) -> None:
        """Write all lines of the folder again."""
