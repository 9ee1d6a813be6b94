"""Runs that survive: records are appended to a folder as they are won, and a killed run goes on where it was.

A run folder holds ``run.json`` (kind, settings, versions), ``records.jsonl`` (one line a sample, the result proper),
``timings.jsonl`` (seconds and passes, which differ from run to run) and ``NAME.npz`` (arrays, compressed, without
pickle). Every line and file carries a checksum, see :mod:`robust_ext.engine.chain`. Nothing is written outside it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from robust_ext.core.errors import RunFolderError
from robust_ext.core.files import make_folder, remove_drafts, replace_file
from robust_ext.core.warning import warn
from robust_ext.engine.archive import checksum_of, read_arrays, read_value, write_arrays, write_value
from robust_ext.engine.chain import REPAIR, ChainedFile, chained, checksum, damaged, to_text
from robust_ext.engine.differences import differences
from robust_ext.engine.locks import locked, unlock
from robust_ext.engine.repair import read_run, repair_files, write_run
from robust_ext.engine.store import Record, Slot, Store

# What was finished within so many seconds may have to be done again when the machine stops; a kill loses nothing.
_SYNC_SECONDS = 5.0
# What tells the lines of a file apart; records first, as their timing is written before them.
_KEYS = {"records": "index", "timings": "block"}


class RunFolder(Store):
    """A store that survives: what is appended is in memory and in the folder, which is read once, when it is opened.

    ``settings`` (plain JSON values) are all that the records depend on: a folder with others, of another kind or
    damaged is refused with RunFolderError; ``repair`` drops what is damaged instead. Other versions are logged. A
    second writer gets RunFolderBusyError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        kind: str,
        settings: Mapping[str, Any],
        versions: Mapping[str, str],
        repair: bool = False,
    ) -> None:
        super().__init__()
        self.path, self._synced = Path(path), -inf
        make_folder(self.path, error=RunFolderError)
        self._lock = locked(self.path / ".lock", wait=False)
        try:
            remove_drafts(self.path)
            run = {"kind": kind, "settings": _plain(settings), "versions": dict(versions)}
            if repair:
                repair_files(self.path, run)
            self._start = self._check_run(run)
            self._files = {part: ChainedFile(self.path / f"{part}.jsonl", self._start) for part in _KEYS}
            self._read()
            for file in self._files.values():
                file.cut_torn_line()
        except BaseException:
            self.close()
            raise
        self.earlier = sum(timing.get("seconds", 0.0) for timing in self._timings.values())
        self.resumed = len(self._timings)

    def _read(self) -> None:
        found = {part: file.read() for part, file in self._files.items()}
        for part, key in _KEYS.items():
            if not all(isinstance(entry.get(key), int) for entry in found[part]):
                raise damaged(self.path / f"{part}.jsonl", f"a line has no {key}")
        # Of several of one sample or block the last counts.
        self._records = {record["index"]: to_text(record) for record in found["records"]}
        self._timings = {timing["block"]: timing for timing in found["timings"]}

    @contextmanager
    def once(self, name: str) -> Iterator[Slot]:
        """A slot for a JSON value, kept in ``NAME.json``; where it is empty, the block fills it."""
        file = self.path / f"{name}.json"
        slot = Slot()
        if file.exists():
            slot.fill(read_value(file, self._start))
            yield slot
            return
        yield slot
        if not slot.empty:
            slot.fill(write_value(file, self._start, slot.value))

    def save(self, name: str, **arrays: Any) -> None:
        """Keep arrays in ``NAME.npz``, replaced whole."""
        write_arrays(self.path / f"{name}.npz", self._start, arrays, sync=self._due())
        self._saved.append(name)

    def load(self, name: str) -> dict[str, NDArray[Any]] | None:
        """The arrays of ``NAME.npz``; None where there is no such file."""
        return read_arrays(self.path / f"{name}.npz", self._start) if self._has(name) else None

    def digest(self) -> str:
        """Of the checksums of the arrays that were saved with blocks."""
        names = [name for timing in self.timings() for name in timing.get("arrays", ())]
        return checksum(*(checksum_of(self.path / f"{name}.npz") for name in names))

    def finish(self, records: Iterable[Record]) -> None:
        """Replace the records by the final ones, in order."""
        super().finish(records)
        file = self.path / "records.jsonl"
        texts = [self._records[index] for index in sorted(self._records)]
        replace_file(file, chained(file, self._start, texts), error=RunFolderError)
        self._files["records"] = ChainedFile(file, self._start)
        self._files["records"].read()

    def close(self) -> None:
        """Let another process have the folder."""
        unlock(self._lock)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _has(self, name: str) -> bool:
        # Empty is what a machine that stops may leave of it.
        file = self.path / f"{name}.npz"
        return file.exists() and file.stat().st_size > 0

    def _write(self, texts: Iterable[str], timing: Record) -> None:
        sync = self._due()
        if sync:
            self._synced = time.monotonic()
        # Records last: a block whose records are there, but not its timing, is worked on again.
        self._files["timings"].append([to_text(timing)], sync=sync)
        self._files["records"].append(texts, sync=sync)

    def _due(self) -> bool:
        """Whether it is time to wait for the disk, which quick blocks would do most of the time."""
        return time.monotonic() - self._synced >= _SYNC_SECONDS

    def _check_run(self, run: dict[str, Any]) -> str:
        """Write ``run.json``, or compare it; returns the checksum that all others begin with."""
        file = self.path / "run.json"
        records = any(any(self.path.glob(kept)) for kept in ("*.jsonl", "*.npz"))
        if not file.exists():
            if records:
                raise RunFolderError(f"{self.path}: holds records but no run.json; {REPAIR}")
            return write_run(file, run)
        versions, start = _compared(file, run)
        if versions != run["versions"]:
            warn(f"{self.path} was begun with other versions: {versions}, now {run['versions']}")
        return start


def finished(path: Path, *, kind: str, settings: Mapping[str, Any]) -> set[int]:
    """Indices of the samples that a run folder is done with; it is only read, and none where it is not there.

    RunFolderError where it is that of another run, or damaged.
    """
    if not (path / "run.json").exists():
        return set()
    start = _compared(path / "run.json", {"kind": kind, "settings": _plain(settings)})[1]
    records, timings = (ChainedFile(path / f"{part}.jsonl", start).read() for part in _KEYS)
    left_out = {index for timing in timings for index in timing.get("left_out", ())}
    return {entry["index"] for entry in records} | left_out


def _compared(file: Path, run: Mapping[str, Any]) -> tuple[Any, str]:
    """The versions that a run was begun with, and its checksum; RunFolderError where it is not this one."""
    earlier, start = read_run(file)
    if earlier["kind"] != run["kind"]:
        raise RunFolderError(
            f"{file.parent}: holds a run of kind {earlier['kind']!r}, not {run['kind']!r}; choose another folder"
        )
    different = differences(earlier["settings"], run["settings"])
    if different:
        raise RunFolderError(
            f"{file.parent}: holds a run with other settings ({'; '.join(different)}); choose another folder, or go "
            "back to what it was begun with"
        )
    return earlier["versions"], start


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they come back from JSON, so that they can be compared."""
    plain: dict[str, Any] = json.loads(json.dumps(settings, allow_nan=False))
    return plain
