"""Run folders: records that survive a kill.

A run folder holds two files that only grow. ``records.jsonl`` has a JSON object a line: the run (kind, settings,
versions), then for each finished block a record of each sample and a line with what the block took, and values that are
computed once. A block is appended in one piece and counts once its last line is there. ``arrays.bin`` has arrays in
numpy's format, without pickle and compressed where that helps; lines state where each lies. Every line and array has a
checksum, which shows damage and is no signature.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from robust_ext.core.errors import RunFolderBusyError, RunFolderError, warn
from robust_ext.core.files import (
    MOST_BYTES,
    MOST_RATIO,
    make_folder,
    open_file,
    read_file,
    remove_drafts,
    replace_file,
    unwritable,
)
from robust_ext.engine.copies import differences
from robust_ext.engine.store import Arrays, Store, check_entry, to_text
from robust_ext.engine.verify import LOST

REPAIR = (
    "run the same command with --repair, or the same call inside robust_ext.repairing(), to run again what is lost, or "
    "choose another folder"
)
EARLIER = "was written by an earlier version of robust_ext, whose records this one does not read; choose another folder"
RECORDS, ARRAYS = "records.jsonl", "arrays.bin"
# Where the machine itself stops, what was finished within that many seconds may be lost; a kill loses nothing.
_SYNC_SECONDS = 5.0
# Bytes that are compressed to see whether that is worthwhile, and what has to be left of them at most.
_TRIED, _GAIN = 2**14, 0.75
_MARK, _DIGITS = b', "checksum": "', 16


class SavedRun(Store):
    """The records in a run folder, which is only read.

    ``run`` is the kind, settings and versions that it states; None where there is nothing. A damaged line, or one that
    does not hold what its kind promises, is a RunFolderError. With ``repair``, such lines are left out, and where the
    run itself is one of them, the given one takes its place.
    """

    def __init__(self, path: Path, *, repair: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.run: Mapping[str, Any] | None = None
        self.path, self._start, self._dropped = path, "", 0
        self._file = path / RECORDS
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
                self._take(entry)
            except (ValueError, RecursionError) as error:
                if repair is None:
                    raise damaged(self._file, f"line {number}{after} {error}") from error
                self._dropped += 1
                if self.run is None:
                    self._begin(repair)
            else:
                after = f" (after sample {entry['index']})" if "index" in entry else after
        self.earlier = sum(timing.get("seconds", 0.0) for timing in self._timings.values())
        self.resumed = len(self._timings)

    def load(self, name: str) -> dict[str, NDArray[Any]] | None:
        """Return the arrays under a name; None without any. RunFolderError where they are damaged."""
        if not self._has(name):
            return None
        file, found = self.path / ARRAYS, {}
        with os.fdopen(open_file(file, os.O_RDONLY, error=RunFolderError), "rb") as stream:
            for part, (begin, size, stated) in self._arrays[name].items():
                try:
                    stream.seek(begin)
                    content = stream.read(size)
                    if checksum(content) != stated:
                        raise ValueError("does not match its checksum")
                    if not content.startswith(npy.MAGIC_PREFIX):
                        content = zlib.decompressobj().decompress(content, max(MOST_BYTES, MOST_RATIO * size))
                    found[part] = npy.read_array(io.BytesIO(content), allow_pickle=False)
                except (ValueError, MemoryError, zlib.error) as error:
                    raise damaged(file, f"{name} {error}") from error
        return found

    def digest(self) -> str:
        """Return a checksum of the arrays stored with blocks."""
        parts = [
            part for timing in self.timings() for held in timing.get("arrays", {}).values() for part in held.values()
        ]
        return checksum(*(stated.encode() for *_, stated in parts))

    def _has(self, name: str) -> bool:
        file = self.path / ARRAYS
        end = max((begin + size for begin, size, _ in self._arrays.get(name, {}).values()), default=inf)
        return file.exists() and file.stat().st_size >= end

    def _begin(self, run: Mapping[str, Any]) -> None:
        self.run = run
        self._start = checksum(json.dumps([run["kind"], run["settings"]], sort_keys=True).encode())

    def _take(self, entry: dict[str, Any]) -> None:
        """Keep an entry; of several of one sample or block the last counts."""
        check_entry(entry, kind=None if self.run is None else self.run["kind"])
        if "run" in entry:
            self._begin(entry["run"])
        elif "index" in entry:
            self._records[entry["index"]] = to_text(entry)
        elif "value" in entry:
            self._values[entry["value"]] = entry["content"]
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
        self._lock: int | None = lock(folder)
        try:
            remove_drafts(folder)
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
            self._cut_torn_line()
            if self.run is None:
                self._write([to_text({"run": run})])
                self._begin(run)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let other processes write the folder."""
        if self._lock is not None:
            unlock(self._lock)
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cut_torn_line(self) -> None:
        try:
            if self._file.exists() and self._file.stat().st_size > self._size:
                os.truncate(self._file, self._size)
        except OSError as error:
            raise RunFolderError(unwritable(self._file, error)) from error

    def _repair(self, beyond: Iterable[int]) -> None:
        """Drop what is to be run again, and write the rest; damaged lines stay in ``records.jsonl.damaged``."""
        lost = [index for index, text in self._records.items() if _was_lost(json.loads(text))]
        self._records = {index: text for index, text in self._records.items() if index not in {*lost, *beyond}}
        arrays = [name for name in self._arrays if self._is_damaged(name)]
        self._timings = {
            block: one for block, one in self._timings.items() if not set(arrays) & set(one.get("arrays", ()))
        }
        for name in arrays:
            del self._arrays[name]
        found = {
            "damaged lines": self._dropped,
            "records of no sample": len([*beyond]),
            "samples that were not attacked": len(lost),
            "damaged arrays": len(arrays),
        }
        if any(found.values()):
            words = ", ".join(f"{number} {what}" for what, number in found.items() if number)
            warn(f"{self._file}: dropped {words}, to be run again", kept=False)
            if self._dropped:
                before = read_file(self._file, error=RunFolderError) or b""
                replace_file(self._file.with_name(f"{RECORDS}.damaged"), before, error=RunFolderError)
            self._rewrite()

    def _is_damaged(self, name: str) -> bool:
        try:
            return self._has(name) and self.load(name) is None
        except RunFolderError:
            return True

    def _put(self, arrays: Arrays) -> dict[str, Any]:
        return {name: {part: self._put_one(array) for part, array in parts.items()} for name, parts in arrays.items()}

    def _put_one(self, array: Any) -> list[Any]:
        npy.write_array(file := io.BytesIO(), np.asanyarray(array), allow_pickle=False)
        content = file.getvalue()
        # Where nothing is to be gained, as with noise, compression takes longer than all the rest.
        if len(zlib.compress(content[:_TRIED], 1)) < _GAIN * len(content[:_TRIED]):
            content = zlib.compress(content, 1)
        return [self._append(self.path / ARRAYS, content), len(content), checksum(content)]

    def _write(self, texts: Iterable[str]) -> None:
        content = b"".join(seal(text, self._start) for text in texts)
        self._append(self._file, content, known=self._size)
        self._size += len(content)

    def _append(self, file: Path, content: bytes, *, known: int | None = None) -> int:
        """Append to a file, whose size is known where only this process writes it; return where the content begins."""
        sync = time.monotonic() - self._synced >= _SYNC_SECONDS
        handle = open_file(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, error=RunFolderError)
        try:
            begin = os.fstat(handle).st_size
            if known not in (None, begin):
                raise damaged(file, f"holds {begin} bytes where this process left {known}: another one writes it too")
            try:
                left = memoryview(content)
                while left:
                    left = left[os.write(handle, left) :]
                if sync:
                    os.fsync(handle)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.truncate(handle, begin)
                raise RunFolderError(unwritable(file, error)) from error
        finally:
            os.close(handle)
        if sync and file == self._file:
            self._synced = time.monotonic()
        return begin

    def _rewrite(self) -> None:
        assert self.run is not None
        stated = {name for timing in self._timings.values() for name in timing.get("arrays", ())}
        loose = {name: places for name, places in self._arrays.items() if name not in stated}
        texts = [
            *(to_text({"value": name, "content": content}) for name, content in self._values.items()),
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


def checksum(*parts: bytes | memoryview) -> str:
    """Return the BLAKE2b of parts, each with its length, as hexadecimal text."""
    found = hashlib.blake2b(digest_size=_DIGITS // 2)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()


def seal(text: str, start: str) -> bytes:
    """Return the line of an entry, given as JSON, with a checksum of its text and of what its file belongs to."""
    return _sealed(text.encode()[:-1], start)


def unseal(line: bytes, start: str) -> dict[str, Any]:
    """Return the entry of a line without its line break; ValueError where it does not match its checksum."""
    content = line[: -len(_MARK) - _DIGITS - 2]
    if line + b"\n" != _sealed(content, start):
        raise ValueError("does not match its checksum")
    entry: dict[str, Any] = _DECODER.decode(content.decode() + "}")
    return entry


def _sealed(content: bytes, start: str) -> bytes:
    return content + _MARK + checksum(start.encode(), content).encode() + b'"}\n'


def damaged(file: Path, what: str) -> RunFolderError:
    """Return the error about a file that does not hold what was written to it."""
    return RunFolderError(f"{file}: {what}: the file is damaged, or was edited; {REPAIR}")


def lock(folder: Path) -> int:
    """Return an open file of a folder that no other process can lock until it is closed, or its process has ended."""
    file = folder / ".lock"
    handle = open_file(file, os.O_RDWR | os.O_CREAT, error=RunFolderError)
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # Windows has no fcntl; there a folder is not guarded against a second writer.
        pass
    except OSError as error:
        os.close(handle)
        if not isinstance(error, BlockingIOError):
            raise RunFolderError(unwritable(file, error)) from error
        raise RunFolderBusyError(
            f"{folder}: another process is writing this run; wait for it, stop it, or choose another folder"
        ) from error
    return handle


def unlock(handle: int) -> None:
    """Release a lock, also where a process that was forked from this one has the file open too."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder inside the block."""
    handle = lock(folder)
    try:
        yield
    finally:
        unlock(handle)


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


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"holds {constant}, which is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
