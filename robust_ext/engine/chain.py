"""Lines of JSON with checksums, each chained to the line before, so that damage shows, and where it lies.

A line is an object whose last entry, ``"checksum"``, is the BLAKE2b of the checksum before it and of the line's text.
The chain of a file begins with a checksum of what the file belongs to: a line that is edited, moved, doubled or taken
out does not fit any more, and neither does one of another file. Checksums find damage; they are no signatures.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from robust_ext.core.errors import RunFolderError
from robust_ext.core.files import unwritable

REPAIR = (
    "run the same command with --repair, or the same call inside robust_ext.repairing(), to do again what is lost, or "
    "choose another folder"
)
DIGITS = 32
"""Of a checksum."""

to_text = json.JSONEncoder(allow_nan=False).encode
"""A plain value as JSON; ValueError for NaN and infinity, which are no part of it."""

_MARK, _END = b', "checksum": "', b'"}'


def checksum(*parts: bytes | str) -> str:
    """BLAKE2b of parts, each with its length, as hexadecimal text."""
    found = hashlib.blake2b(digest_size=DIGITS // 2)
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        found.update(len(content).to_bytes(8, "little"))
        found.update(content)
    return found.hexdigest()


def damaged(path: Path, what: str) -> RunFolderError:
    """The error about a file that does not hold what was written to it."""
    return RunFolderError(f"{path}: {what}: the file is damaged, or was edited; {REPAIR}")


def seal(text: str, before: str) -> tuple[bytes, str]:
    """The line of an entry, which is given as JSON, with its line break, and its checksum."""
    content = text.encode()[:-1]
    found = checksum(before, content)
    return content + _MARK + found.encode() + _END + b"\n", found


def parted(line: bytes) -> tuple[bytes, str]:
    """The text of a line that its checksum is of, and the checksum that it states, whatever is there."""
    tail = len(_MARK) + DIGITS + len(_END)
    return line[:-tail], line[-DIGITS - len(_END) : -len(_END)].decode("latin-1")


def unseal(line: bytes, before: str) -> tuple[dict[str, Any], str] | None:
    """The entry of a line without its line break, and its checksum; None where it does not follow ``before``."""
    content, stated = parted(line)
    if checksum(before, content) != stated or line != content + _MARK + stated.encode("latin-1") + _END:
        return None
    entry: dict[str, Any] = json.loads(content + b"}")
    return entry, stated


class ChainedFile:
    """A file of chained lines, of which each is read or written once."""

    def __init__(self, path: Path, start: str) -> None:
        self.path = path
        self._last, self._offset, self._lines = checksum(start, path.name), 0, 0

    def read(self) -> list[dict[str, Any]]:
        """Entries added since the last call; a torn last line, which may be in the middle of being written, waits."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            size, content = 0, b""
        except OSError as error:
            raise RunFolderError(f"{self.path}: cannot be read ({error.strerror or error})") from error
        if size < self._offset:
            raise damaged(self.path, f"lines that were there are gone, {size} bytes are left of {self._offset}")
        whole = content.rfind(b"\n") + 1
        entries = []
        for number, line in enumerate(content[:whole].split(b"\n")[:-1], self._lines + 1):
            found = unseal(line, self._last)
            if found is None:
                raise damaged(
                    self.path, f"line {number} does not match its checksum, which follows from the line before"
                )
            entries.append(found[0])
            self._last = found[1]
        self._offset += whole
        self._lines += len(entries)
        return entries

    def cut_torn_line(self) -> None:
        """Drop a last line that was being written when the process was killed; what comes before it was read."""
        if self.path.exists() and self.path.stat().st_size > self._offset:
            os.truncate(self.path, self._offset)

    def append(self, texts: Iterable[str], *, sync: bool = True) -> None:
        """Add entries, with ``sync`` so that they survive a crash of the machine; RunFolderError where that fails."""
        lines, last = [], self._last
        for text in texts:
            line, last = seal(text, last)
            lines.append(line)
        try:
            with self.path.open("ab", buffering=0) as file:
                if file.tell() != self._offset:
                    what = f"holds {file.tell()} bytes where this process left {self._offset}"
                    raise damaged(self.path, f"{what}, so that another one writes it too")
                try:
                    left = memoryview(b"".join(lines))
                    while left:
                        left = left[file.write(left) :]
                    if sync:
                        os.fsync(file.fileno())
                except OSError:
                    with contextlib.suppress(OSError):
                        os.truncate(self.path, self._offset)
                    raise
        except OSError as error:
            raise RunFolderError(unwritable(self.path, error)) from error
        self._last, self._offset, self._lines = last, self._offset + sum(map(len, lines)), self._lines + len(lines)


def chained(path: Path, start: str, texts: Iterable[str]) -> bytes:
    """The whole content of a file of chained lines."""
    lines, last = [], checksum(start, path.name)
    for text in texts:
        line, last = seal(text, last)
        lines.append(line)
    return b"".join(lines)
