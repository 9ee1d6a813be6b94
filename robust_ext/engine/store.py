"""Where a run's records go: memory here, or a folder that survives a kill, see :mod:`robust_ext.engine.run_folder`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


class InMemoryStore:
    """What one run leaves, gone with its process."""

    def __init__(self) -> None:
        self._records: list[dict[str, Any]] = []
        self._timings: list[dict[str, Any]] = []
        self._arrays: dict[str, dict[str, NDArray[Any]]] = {}

    def records(self) -> list[dict[str, Any]]:
        """All records, one an ``index``, sorted by it."""
        return sorted(self._records, key=lambda record: int(record["index"]))

    def timings(self) -> list[dict[str, Any]]:
        """All timings, one a block."""
        return list(self._timings)

    def append(self, records: Iterable[Record], timing: Record) -> None:
        """Keep the records of finished samples, and what they took."""
        self._records += [dict(record) for record in records]
        self._timings.append(dict(timing))

    def once(self, name: str) -> AbstractContextManager[Slot]:
        """A slot for a plain value that is computed once for the whole run."""
        return nullcontext(Slot())

    def save(self, name: str, **arrays: Any) -> None:
        """Keep arrays under a name; those kept under it before are replaced."""
        self._arrays[name] = {key: np.asarray(value) for key, value in arrays.items()}

    def load(self, name: str) -> dict[str, NDArray[Any]] | None:
        """The arrays under a name; None where there are none."""
        return self._arrays.get(name)

    def finish(self, records: Iterable[Record]) -> None:
        """Replace the records by the final ones."""
        self._records = [dict(record) for record in records]

    def close(self) -> None:
        """Let other processes have it."""
