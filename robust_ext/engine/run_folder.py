"""Runs that survive: records are appended to a folder as they are won, and a killed run goes on where it was.

A run folder holds ``run.json`` (kind, settings, versions), ``records.jsonl`` (one line a sample, the result proper),
``timings.jsonl`` (seconds and passes, which differ from run to run) and ``NAME.npz`` (arrays, compressed, without
pickle). A run split over several processes appends to ``records-K.jsonl`` of its own in each. Nothing is written
outside the folder.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from robust_ext.core.errors import RunFolderBusyError, RunFolderError
from robust_ext.core.files import replace_file
from robust_ext.engine.store import InMemoryStore, Slot

logger = logging.getLogger(__name__)


class RunFolder:
    """Append-only store of a run; like :class:`InMemoryStore`, but it survives.

    ``settings`` (plain JSON values) are all that the records depend on: a folder with others, of another kind or
    damaged is refused with RunFolderError. Other versions are logged. Each ``shard`` has one
    writer; a second gets RunFolderBusyError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        kind: str,
        settings: Mapping[str, Any],
        versions: Mapping[str, str],
        shard: int = 0,
    ) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(f"{self.path}: cannot be made a run folder: {error}") from error
        suffix = f"-{shard}" if shard else ""
        self._names = (f"records{suffix}.jsonl", f"timings{suffix}.jsonl")
        try:
            self._lock = _locked(self.path / f".lock{suffix}", wait=False)
        except BlockingIOError as error:
            raise RunFolderBusyError(
                f"{self.path}: another process is writing this run; wait for it, stop it, or choose another folder"
            ) from error
        except OSError as error:
            raise RunFolderError(f"{self.path}: cannot be written as a run folder: {error}") from error
        try:
            self._check_run({"kind": kind, "settings": _plain(settings), "versions": dict(versions)})
            for name in self._names:
                _cut_torn_line(self.path / name)
        except BaseException:
            self.close()
            raise

    def records(self) -> list[dict[str, Any]]:
        """All records of all shards, one an ``index``, sorted by it."""
        found: dict[int, dict[str, Any]] = {}
        for file in sorted(self.path.glob("records*.jsonl")):
            for record in _read_lines(file):
                if not isinstance(record.get("index"), int):
                    raise RunFolderError(f"{file}: a record has no index; choose another folder")
                found.setdefault(record["index"], record)
        return [found[index] for index in sorted(found)]

    def timings(self) -> list[dict[str, Any]]:
        """All timings of all shards."""
        return [entry for file in sorted(self.path.glob("timings*.jsonl")) for entry in _read_lines(file)]

    def append(self, records: Iterable[Mapping[str, Any]], timing: Mapping[str, Any]) -> None:
        """Store finished samples, and what they took, so that they survive a crash of the machine."""
        # Records last: a group whose records are there is not run again, and would never get its timing.
        for name, entries in zip(reversed(self._names), ([timing], list(records)), strict=True):
            text = "".join(json.dumps(entry, allow_nan=False) + "\n" for entry in entries)
            with (self.path / name).open("ab") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())

    @contextmanager
    def once(self, name: str) -> Iterator[Slot]:
        """A slot for a JSON value, kept in ``NAME.json``, that is computed once, also by several processes.

        Where the slot is empty, the block fills it while other processes wait.
        """
        file = self.path / f"{name}.json"
        with _locked(self.path / ".lock-once", wait=True):
            slot = Slot()
            if file.exists():
                slot.fill(json.loads(file.read_text(encoding="utf-8")))
                yield slot
                return
            yield slot
            if not slot.empty:
                text = json.dumps(slot.value, allow_nan=False)
                replace_file(file, text + "\n")
                slot.fill(json.loads(text))

    def save(self, name: str, **arrays: Any) -> None:
        """Keep arrays in ``NAME.npz``, replaced whole."""
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)
        replace_file(self.path / f"{name}.npz", content.getvalue())

    def load(self, name: str) -> dict[str, NDArray[Any]] | None:
        """The arrays of ``NAME.npz``; None where there is no such file."""
        file = self.path / f"{name}.npz"
        if not file.exists():
            return None
        try:
            with np.load(file, allow_pickle=False) as found:
                return dict(found)
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            raise RunFolderError(f"{file}: cannot be read ({error}); remove its folder to run it again") from error

    def finish(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Replace the records of all shards by the final ones, in order."""
        text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
        replace_file(self.path / "records.jsonl", text)
        for file in self.path.glob("records-*.jsonl"):
            file.unlink()

    def close(self) -> None:
        """Let another process have the folder."""
        self._lock.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_run(self, run: dict[str, Any]) -> None:
        file = self.path / "run.json"
        if not file.exists():
            if any(self.path.glob("records*.jsonl")):
                raise RunFolderError(f"{self.path}: holds records but no run.json; choose another folder")
            replace_file(file, json.dumps(run, indent=2, allow_nan=False) + "\n")
            return
        try:
            earlier = json.loads(file.read_text(encoding="utf-8"))
            kind, settings, versions = earlier["kind"], dict(earlier["settings"]), earlier["versions"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunFolderError(f"{file}: cannot be read as a run ({error}); choose another folder") from error
        if kind != run["kind"]:
            raise RunFolderError(
                f"{self.path}: holds a run of kind {kind!r}, not {run['kind']!r}; choose another folder"
            )
        different = [key for key in {**settings, **run["settings"]} if settings.get(key) != run["settings"].get(key)]
        if different:
            shown = "; ".join(
                f"{k}: {_short(settings.get(k))} there, {_short(run['settings'].get(k))} now" for k in different
            )
            raise RunFolderError(
                f"{self.path}: holds a run with other settings ({shown}); choose another folder, or use the same "
                "settings to go on with it"
            )
        if versions != run["versions"]:
            logger.warning("%s was begun with other versions: %s, now %s", self.path, versions, run["versions"])


def _locked(path: Path, *, wait: bool) -> BinaryIO:
    """An open file that no other process can lock until it is closed; OSError when one has it and ``wait`` is False."""
    handle = path.open("ab")
    try:
        import fcntl
    except ImportError:  # Windows has no fcntl; there a folder is not guarded against a second writer.
        return handle
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        handle.close()
        raise
    return handle


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they come back from JSON, so that they can be compared."""
    plain: dict[str, Any] = json.loads(json.dumps(settings, allow_nan=False))
    return plain


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _cut_torn_line(path: Path) -> None:
    """Drop a last line that was being written when the process was killed."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Complete lines of a file; a torn last one (another process may be writing it) is left out."""
    content = path.read_bytes()
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    try:
        entries = [json.loads(line) for line in lines]
    except ValueError as error:
        raise RunFolderError(f"{path}: a line is damaged ({error}); choose another folder") from error
    if not all(isinstance(entry, dict) for entry in entries):
        raise RunFolderError(f"{path}: a line is damaged (not an object); choose another folder")
    return entries


Store = InMemoryStore | RunFolder
