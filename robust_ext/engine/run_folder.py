"""Run folders: records that survive a kill.

A run folder holds two files that only grow. ``records.jsonl`` has a JSON object a line: the run (kind, settings,
versions), then for each finished block a record of each sample and a line with what the block took, and values that are
computed once. A block is appended in one piece and counts once its last line is there. ``arrays.bin`` has arrays in
numpy's format, without pickle and compressed where that helps; lines state where each lies. Every line and array has a
checksum, which shows damage and is no signature.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from robust_ext.core.errors import RunFolderError, warn
from robust_ext.core.files import check_plain, locked, make_folder, read_file, replace_file, writing
from robust_ext.engine.copies import differences
from robust_ext.engine.schema import check_entry
from robust_ext.engine.store import Arrays, Store, checksum, seal, to_text, unseal
from robust_ext.engine.verify import LOST

EARLIER = "was written by an earlier version of robust_ext, whose records this one does not read; choose another folder"
RECORDS, ARRAYS = "records.jsonl", "arrays.bin"
# If the machine itself stops, blocks finished within that many seconds may be lost; a kill loses nothing.
_SYNC_SECONDS = 5.0
# Bytes that are compressed to see whether that is worthwhile, and what has to be left of them at most.
_TRIED, _GAIN = 2**14, 0.75
# An array may unpack to this many bytes, or to that many times its stored size where that is more.
_MOST_BYTES, _MOST_RATIO = 256 * 2**20, 100


class SavedRun(Store):
    """The records in a run folder, which is only read.

    ``run`` is its kind, settings and versions; None where there is nothing. A damaged line, or one that
    does not hold what its kind promises, is a RunFolderError. With ``repair``, such lines are left out, and the given
    run takes the place of a damaged one.
    """

    def __init__(self, path: Path, *, repair: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.run: Mapping[str, Any] | None = None
        self._file, self._array_file = path / RECORDS, path / ARRAYS
        self._start, self._dropped = "", 0
        if (path / "run.json").exists():
            raise RunFolderError(f"{path}: {EARLIER}")
        content = read_file(self._file, error=RunFolderError) or b""
        # A last line without its end was being written when the process was killed.
        self._size = content.rfind(b"\n") + 1
        if repair is None and not self._size and content.strip(b"\0") and not content.startswith(b"{"):
            raise damaged(self._file, "its first line is not that of a run")
        after = ""
        for number, line in enumerate(content[: self._size].split(b"\n")[:-1], 1):
            try:
                entry = unseal(line, self._start)
                check_entry(entry, kind=None if self.run is None else self.run["kind"])
            except (ValueError, RecursionError) as error:
                if repair is None:
                    raise damaged(self._file, f"line {number}{after} {error}") from error
                self._dropped += 1
                if self.run is None:
                    self._begin(repair)
            else:
                self._take(entry)
                after = f" (after sample {entry['index']})" if "index" in entry else after
        self.earlier = sum(timing.get("seconds", 0.0) for timing in self._timings.values())
        self.resumed = len(self._timings)

    def load(self, name: str) -> dict[str, NDArray[Any]] | None:
        """Return the arrays under a name; None without any. RunFolderError where they are damaged."""
        if not self._has(name):
            return None
        found = {}
        for part, (begin, size, stated) in self._arrays[name].items():
            content = read_file(self._array_file, error=RunFolderError, begin=begin, size=size) or b""
            if checksum(content) != stated:
                raise damaged(self._array_file, f"{name} does not match its checksum")
            try:
                if not content.startswith(npy.MAGIC_PREFIX):
                    content = zlib.decompressobj().decompress(content, max(_MOST_BYTES, _MOST_RATIO * size))
                found[part] = npy.read_array(io.BytesIO(content), allow_pickle=False)
            except (ValueError, MemoryError, zlib.error) as error:
                raise damaged(self._array_file, f"{name} {error}") from error
        return found

    def _has(self, name: str) -> bool:
        end = max((begin + size for begin, size, _ in self._arrays.get(name, {}).values()), default=inf)
        return self._array_file.exists() and self._array_file.stat().st_size >= end

    def _begin(self, run: Mapping[str, Any]) -> None:
        self.run = run
        self._start = checksum(json.dumps([run["kind"], run["settings"]], sort_keys=True).encode())

    def _take(self, entry: dict[str, Any]) -> None:
        """Keep an entry; of several of one sample or block the last counts."""
        if "run" in entry:
            self._begin(entry["run"])
        elif "index" in entry:
            self._records[entry["index"]] = to_text(entry)
        elif "value" in entry:
            self.values[entry["value"]] = entry["content"]
        else:
            self._arrays |= entry.get("arrays", {})
            if "block" in entry:
                self._timings[entry["block"]] = entry


class RunFolder(SavedRun):
    """The records in a run folder, which this process alone writes.

    ``settings`` (plain JSON values) are all that the records depend on: a folder with others or of another kind is
    refused with RunFolderError, and a second writer with RunFolderBusyError; other versions are warned of. ``samples``
    is how many there are. ``repair`` drops damaged records, and samples whose attack's process was lost.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        kind: str,
        settings: Mapping[str, Any],
        versions: Mapping[str, str],
        samples: float = inf,
        repair: bool = False,
    ) -> None:
        folder, self._synced = Path(path), -inf
        make_folder(folder, error=RunFolderError)
        with ExitStack() as stack:
            stack.enter_context(locked(folder))
            run = {"kind": kind, "settings": json.loads(to_text(settings)), "versions": dict(versions)}
            super().__init__(folder, repair=run if repair else None)
            if self.run is not None:
                _check_same(folder, self.run, run)
                if self.run["versions"] != run["versions"]:
                    warn(f"{path} was begun with other versions: {self.run['versions']}, now {run['versions']}")
            beyond = [index for index in self._records if not 0 <= index < samples]
            if beyond and not repair:
                raise damaged(self._file, f"index {beyond[0]} is none of the {samples} samples")
            if repair:
                self._repair(beyond)
            with writing(self._file, error=RunFolderError):
                if self._file.exists() and self._file.stat().st_size > self._size:
                    os.truncate(self._file, self._size)
            if self.run is None:
                self._write([to_text({"run": run})])
                self._begin(run)
            self._lock = stack.pop_all()

    def close(self) -> None:
        """Let other processes write the folder."""
        self._lock.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repair(self, beyond: Sequence[int]) -> None:
        """Drop what is to be run again, and write the rest; damaged lines stay in ``records.jsonl.damaged``."""
        lost = [index for index, text in self._records.items() if _was_lost(json.loads(text))]
        arrays = [name for name in self._arrays if self._is_damaged(name)]
        found = {
            "damaged lines": self._dropped,
            "records of no sample": len(beyond),
            "samples that were not attacked": len(lost),
            "damaged arrays": len(arrays),
        }
        if not any(found.values()):
            return
        words = ", ".join(f"{number} {what}" for what, number in found.items() if number)
        warn(f"{self._file}: dropped {words}, to be run again", kept=False)
        if self._dropped:
            before = read_file(self._file, error=RunFolderError) or b""
            replace_file(self._file.with_name(f"{RECORDS}.damaged"), before, error=RunFolderError)
        for index in {*lost, *beyond}:
            del self._records[index]
        for name in arrays:
            del self._arrays[name]
        self._timings = {
            block: one for block, one in self._timings.items() if not set(arrays) & set(one.get("arrays", ()))
        }
        self._rewrite()

    def _is_damaged(self, name: str) -> bool:
        try:
            self.load(name)
        except RunFolderError:
            return True
        return False

    def _put(self, arrays: Arrays) -> dict[str, Any]:
        return {name: {part: self._put_one(array) for part, array in parts.items()} for name, parts in arrays.items()}

    def _put_one(self, array: Any) -> list[Any]:
        npy.write_array(file := io.BytesIO(), np.asanyarray(array), allow_pickle=False)
        content = file.getvalue()
        # Where nothing is to be gained, as with noise, compression takes longer than all the rest.
        if len(zlib.compress(content[:_TRIED], 1)) < _GAIN * len(content[:_TRIED]):
            content = zlib.compress(content, 1)
        return [self._append(self._array_file, content), len(content), checksum(content)]

    def _write(self, texts: Iterable[str]) -> None:
        content = b"".join(seal(text, self._start) for text in texts)
        self._append(self._file, content, known=self._size)
        self._size += len(content)

    def _append(self, file: Path, content: bytes, *, known: int | None = None) -> int:
        """Append to a file, whose size is known where only this process writes it; return where the content begins."""
        sync = time.monotonic() - self._synced >= _SYNC_SECONDS
        check_plain(file, error=RunFolderError)
        with writing(file, error=RunFolderError), file.open("ab", buffering=0) as stream:
            begin = stream.tell()
            if known not in (None, begin):
                raise damaged(file, f"holds {begin} bytes where this process left {known}: another one writes it too")
            try:
                left = memoryview(content)
                while left:
                    left = left[stream.write(left) :]
                if sync:
                    os.fsync(stream.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    stream.truncate(begin)
                raise
        if sync and file == self._file:
            self._synced = time.monotonic()
        return begin

    def _rewrite(self) -> None:
        stated = {name for timing in self._timings.values() for name in timing.get("arrays", ())}
        loose = {name: places for name, places in self._arrays.items() if name not in stated}
        texts = [
            *(to_text({"value": name, "content": content}) for name, content in self.values.items()),
            *([to_text({"arrays": loose})] if loose else []),
            *(self._records[index] for index in sorted(self._records)),
            *map(to_text, self.timings()),
        ]
        content = seal(to_text({"run": self.run}), "") + b"".join(seal(text, self._start) for text in texts)
        replace_file(self._file, content, error=RunFolderError)
        self._size = len(content)


def finished(path: Path, *, kind: str, settings: Mapping[str, Any]) -> set[int]:
    """Return the indices of the samples that a run folder is done with; none where it holds no run.

    The folder is only read. RunFolderError where it is that of another run, or damaged.
    """
    saved = SavedRun(path)
    if saved.run is not None:
        _check_same(path, saved.run, {"kind": kind, "settings": json.loads(to_text(settings))})
    return saved.done()


def damaged(file: Path, what: str) -> RunFolderError:
    """Return the error about a file that does not hold what was written to it."""
    return RunFolderError(
        f"{file}: {what}: the file is damaged, or was edited; run the same command with --repair, or the same call "
        "inside robust_ext.repairing(), to run again what is lost, or choose another folder"
    )


def _check_same(folder: Path, earlier: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Raise RunFolderError where a folder holds another run."""
    if earlier["kind"] != run["kind"]:
        raise RunFolderError(
            f"{folder}: holds a run of kind {earlier['kind']!r}, not {run['kind']!r}; choose another folder"
        )
    different = differences(earlier["settings"], run["settings"])
    if different:
        raise RunFolderError(
            f"{folder}: holds a run with other settings ({'; '.join(different)}); choose another folder, or go back to "
            "what it was begun with"
        )


def _was_lost(entry: object) -> bool:
    """Return whether a record, or a part of it, is of an attack that returned nothing."""
    if not isinstance(entry, Mapping):
        return False
    lost = entry.get("outcome") in LOST or entry.get("canary") == "lost"
    return lost or any(map(_was_lost, entry.values()))
