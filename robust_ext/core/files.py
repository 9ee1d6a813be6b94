"""Files that appear whole or not at all, and readers of ``.npz`` and TOML files that run no code."""

from __future__ import annotations

import json
import math
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from zipfile import ZipFile, ZipInfo

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from robust_ext.core.errors import DataError, RobustExtError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


# An archive may unpack to this many bytes, or to that many times its own size where that is more.
MOST_BYTES, MOST_RATIO = 256 * 2**20, 100


class UnreadableArraysError(ValueError):
    """An archive that is damaged, too large when unpacked, or holds objects; its text follows the file's name."""


class ArrayArchive:
    """The arrays of an open ``.npz`` file by name; nothing is unpickled, and nothing unpacked before it is wanted."""

    def __init__(self, file: IO[bytes]) -> None:
        if file.read(len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX:
            raise UnreadableArraysError("a single array")
        self._packed = file.seek(0, 2)
        with _readable():
            self._archive = ZipFile(file)
        self._entries = {
            entry.filename.removesuffix(".npy"): entry
            for entry in self._archive.infolist()
            if entry.filename.endswith(".npy")
        }

    @property
    def names(self) -> list[str]:
        """The names of the arrays."""
        return list(self._entries)

    def read(self, *names: str) -> dict[str, NDArray[Any]]:
        """Arrays by name, once all of them were found to be numbers or texts of a size that can be meant."""
        wanted = [self._entries[name] for name in names]
        total = sum(entry.file_size for entry in wanted)
        if total > max(MOST_BYTES, MOST_RATIO * self._packed):
            raise UnreadableArraysError(
                f"{self._packed:,} bytes that unpack to {total:,}, more than {MOST_BYTES:,} and more than {MOST_RATIO} "
                "times as many (large arrays that are meant are to be saved without compression)"
            )
        with _readable():
            for entry in wanted:
                self._check(entry)
            return {name: self._read(entry) for name, entry in zip(names, wanted, strict=True)}

    def _check(self, entry: ZipInfo) -> None:
        """Raise where the header of an array declares objects, or another size than its entry has."""
        with self._archive.open(entry) as stream:
            version = npy.read_magic(stream)
            reader = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, _, kind = reader(stream)
            if kind.hasobject:
                raise UnreadableArraysError(
                    f"{entry.filename} with Python objects, which are never read (allow_pickle would run their code)"
                )
            declared = int(np.prod(shape, dtype=object)) * kind.itemsize
            if declared != entry.file_size - stream.tell():
                held = entry.file_size - stream.tell()
                raise UnreadableArraysError(f"{entry.filename} of {held} bytes where shape {shape} needs {declared}")

    def _read(self, entry: ZipInfo) -> NDArray[Any]:
        with self._archive.open(entry) as stream:
            found: NDArray[Any] = npy.read_array(stream, allow_pickle=False)
            # The end of the entry, where its checksum is compared.
            stream.read(1)
            return found


@contextmanager
def _readable() -> Iterator[None]:
    """Errors of whatever kind a damaged archive causes as one."""
    try:
        yield
    except UnreadableArraysError:
        raise
    except Exception as error:
        # zipfile, zlib and numpy's header parser raise a dozen kinds of errors for damaged data.
        raise UnreadableArraysError(f"an error while reading ({type(error).__name__}: {error})") from error


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LARGEST_FILE = 1_000_000
"""Bytes of a file that is read."""


def read_toml(file: Path | Traversable, *, name: str, kind: str, see: str) -> dict[str, Any]:
    """The content of a file.

    Args:
        file: The file.
        name: What error messages call it.
        kind: What it should be, as in ``"suite"``.
        see: Where that is described.

    Raises:
        DataError: It cannot be read, is too large, or is no valid TOML.
    """
    try:
        with file.open("rb") as opened:
            content: bytes = opened.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        raise DataError(f"{name}: cannot be read as a {kind} ({error})") from error
    if len(content) > LARGEST_FILE:
        raise DataError(f"{name}: is larger than a {kind} can be, {LARGEST_FILE} bytes; {see}")
    try:
        return tomllib.loads(content.decode())
    # The parser follows nesting by recursion, and Python limits the digits of an integer.
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}: is no valid TOML ({error}); {see}") from error


def table_text(name: str, values: Mapping[str, Any]) -> str:
    r"""A table of texts, numbers, truth values and lists of these, whose keys are bare.

    Example:
        >>> print(table_text("mead", {"eps": "8/255", "samples": 3, "suite": ["a\n", "b"]}))
        [mead]
        eps = "8/255"
        samples = 3
        suite = ["a\u000a", "b"]
    """
    return "\n".join([f"[{name}]", *(f"{key} = {_value_text(value)}" for key, value in values.items())])


def _value_text(value: object) -> str:
    if isinstance(value, (bool, int)):
        return json.dumps(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_value_text, value))}]"
    return f'"{"".join(map(_character, str(value)))}"'


def _character(character: str) -> str:
    """One character of a basic string; what a terminal would not print is escaped."""
    if character in '"\\':
        return f"\\{character}"
    code = ord(character)
    if character.isprintable():
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def replace_file(
    path: Path, content: bytes | str, *, error: type[RobustExtError] = DataError, sync: bool = True
) -> None:
    """Write a file, whose folder exists, in one step, also when the machine stops in the middle; text becomes UTF-8.

    The draft lies next to it, because a rename needs one disk. Where it cannot be written, ``error`` is raised. Without
    ``sync`` a machine that stops may leave it empty.
    """
    # The process id keeps two processes that write the same file apart.
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with draft.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as refused:
        raise error(unwritable(path, refused)) from refused


def open_file(path: Path, flags: int, *, error: type[RobustExtError] = DataError) -> int:
    """Open a file, and refuse links, which lead out of their folder, and pipes, which may wait for ever.

    Returns the descriptor. Where the file cannot be opened, or is none, ``error`` is raised.
    """
    # Windows has neither flag.
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as refused:
        if path.is_symlink():
            raise error(f"{path}: is a symbolic link, expected a file; choose another folder") from refused
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise error(unwritable(path, refused)) from refused
        raise error(f"{path}: cannot be read ({refused.strerror or refused})") from refused
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise error(f"{path}: is a folder, pipe or device, expected a file; choose another folder")
    return handle


def read_file(path: Path, *, error: type[RobustExtError] = DataError) -> bytes | None:
    """Return the content of a file, which :func:`open_file` may refuse; None without one."""
    if not os.path.lexists(path):
        return None
    with os.fdopen(open_file(path, os.O_RDONLY, error=error), "rb") as file:
        return file.read()


def make_folder(path: Path, *, error: type[RobustExtError] = DataError) -> None:
    """Make a folder, and those it lies in, where it is missing; ``error`` where that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as refused:
        got = refused.strerror or refused
        raise error(f"{path}: cannot be made a folder ({got}); choose another one, or check permissions") from refused


def unwritable(path: Path, refused: OSError) -> str:
    """Return the error for a file that the operating system refused to write."""
    return (
        f"{path}: cannot be written ({refused.strerror or refused}); free space, check that its folder is there and "
        "may be written to, and make the same call again: what was finished before is kept"
    )


def remove_drafts(folder: Path) -> None:
    """Remove drafts that processes which are gone left in a folder; those being written stay."""
    if os.name != "posix":  # Elsewhere a process cannot be looked for without a risk of ending it.
        return
    for draft in folder.glob(".*.tmp"):
        owner = re.fullmatch(r"\..+\.(\d+)\.tmp", draft.name)
        if owner is not None and not _running(int(owner[1])):
            draft.unlink(missing_ok=True)


def _running(process: int) -> bool:
    """Return whether another process has this id; this one writes nothing at the moment."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
