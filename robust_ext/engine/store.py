"""Where a run's records go: memory here, or a folder that survives a kill, see :mod:`robust_ext.engine.run_folder`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robust_ext.engine.chain import to_text

Record = Mapping[str, Any]
Floats = NDArray[np.float64]


@dataclass
class Slot:
    """A value that may have to be computed."""

    value: Any = None
    empty: bool = True

    def fill(self, value: Any) -> None:
        """Set the value."""
        self.value, self.empty = value, False


class Store:
    """What one run leaves, in memory: here it is gone with its process."""

    def __init__(self) -> None:
        # As text, of which many take a fifth of the memory.
        self._records: dict[int, str] = {}
        self._timings: dict[int, Record] = {}
        self._arrays: dict[str, dict[str, NDArray[Any]]] = {}
        self._saved: list[str] = []  # Arrays of the block that is being worked on
        # Seconds and number of the blocks that were there when it was opened
        self.earlier, self.resumed = 0.0, 0

    def records(self) -> list[Record]:
        """All records, one an ``index``, sorted by it."""
        return [json.loads(self._records[index]) for index in sorted(self._records)]

    def timings(self) -> list[Record]:
        """All timings, one a block."""
        return [self._timings[block] for block in sorted(self._timings)]

    def block(self, rows: range) -> list[Record]:
        """The records of a block that :meth:`holds` is true of."""
        return [json.loads(self._records[index]) for index in rows if index in self._records]

    def holds(self, rows: range) -> bool:
        """Whether all that a finished block leaves is there: its records, its timing and its arrays.

        Samples that its timing states as ``left_out`` have no records.
        """
        timing = self._timings.get(rows[0])
        return (
            timing is not None
            and all(index in self._records for index in rows if index not in timing.get("left_out", ()))
            and all(self._has(name) for name in timing.get("arrays", ()))
        )

    def append(self, records: Iterable[Record], timing: Record) -> None:
        """Keep the records of a finished block, what it took, and which arrays were saved since the last one."""
        kept = dict(timing)
        if self._saved:
            kept["arrays"] = self._saved
        # One that is there already, from a block that was cut off or has lost something else, is not written again.
        texts = {one["index"]: to_text(one) for one in records}
        new = {index: text for index, text in texts.items() if self._records.get(index) != text}
        self._write(new.values(), kept)
        self._records |= new
        self._timings[kept["block"]] = kept
        self._saved = []

    def once(self, name: str) -> AbstractContextManager[Slot]:
        """A slot for a plain value that is computed once for the whole run."""
        return nullcontext(Slot())

    def save(self, name: str, **arrays: Any) -> None:
        """Keep arrays under a name; those kept under it before are replaced."""
        self._arrays[name] = {key: np.asarray(value) for key, value in arrays.items()}
        self._saved.append(name)

    def load(self, name: str) -> dict[str, NDArray[Any]] | None:
        """The arrays under a name; None where there are none."""
        return self._arrays.get(name)

    def digest(self) -> str:
        """Of the arrays that were saved with blocks: another one once any of them is replaced."""
        return ""

    def finish(self, records: Iterable[Record]) -> None:
        """Replace the records by the final ones."""
        self._records = {record["index"]: to_text(record) for record in records}

    def close(self) -> None:
        """Let other processes have it."""

    def _has(self, name: str) -> bool:
        return name in self._arrays

    def _write(self, texts: Iterable[str], timing: Record) -> None:
        """Nothing: memory is all there is."""
