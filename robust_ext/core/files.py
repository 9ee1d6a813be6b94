"""Files that appear whole or not at all, and TOML files."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robust_ext.core.errors import DataError, RobustExtError, RunFolderBusyError, RunFolderError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


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


def replace_file(path: Path, content: bytes | str, *, error: type[RobustExtError] = DataError) -> None:
    """Write a file, whose folder exists, in one step, also when the machine stops in the middle; text becomes UTF-8.

    The draft lies next to it, because a rename needs one disk. Where it cannot be written, ``error`` is raised.
    """
    # The process id keeps two processes that write the same file apart.
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path, error=error):
        try:
            with draft.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def read_file(path: Path, *, error: type[RobustExtError] = DataError, begin: int = 0, size: int = -1) -> bytes | None:
    """Return the content of a file, or ``size`` bytes of it; None without one, ``error`` where it cannot be read."""
    check_plain(path, error=error)
    try:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(size)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as refused:
        raise error(f"{path}: cannot be read ({refused.strerror or refused})") from refused


def check_plain(path: Path, *, error: type[RobustExtError] = DataError) -> None:
    """Raise ``error`` for links, which lead out of their folder, and for pipes, which may wait for ever."""
    special = path.exists() and not path.is_file() and not path.is_dir()
    if path.is_symlink() or special:
        kind = "pipe or device" if special else "symbolic link"
        raise error(f"{path}: is a {kind}, expected a file; choose another folder")


def make_folder(path: Path, *, error: type[RobustExtError] = DataError) -> None:
    """Make a folder, and those it lies in, where it is missing; ``error`` where that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as refused:
        got = refused.strerror or refused
        raise error(f"{path}: cannot be made a folder ({got}); choose another one, or check permissions") from refused


@contextmanager
def writing(file: Path, *, error: type[RobustExtError] = DataError) -> Iterator[None]:
    """Raise ``error`` where the operating system refuses to write a file inside the block."""
    try:
        yield
    except OSError as refused:
        raise error(
            f"{file}: cannot be written ({refused.strerror or refused}); free space, check that its folder is there "
            "and may be written to, and make the same call again: what was finished before is kept"
        ) from refused


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run folder inside the block, or until this process ends; RunFolderBusyError where another one has."""
    check_plain(folder / ".lock", error=RunFolderError)
    with writing(folder / ".lock", error=RunFolderError):
        stream = (folder / ".lock").open("ab")
    with stream:
        try:
            import fcntl
        except ImportError:  # Windows has no fcntl; there a folder is not guarded against a second writer.
            yield
            return
        with writing(folder / ".lock", error=RunFolderError):
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RunFolderBusyError(
                    f"{folder}: another process is writing this run; wait for it, stop it, or choose another folder"
                ) from error
        try:
            yield
        finally:
            # A process that was forked from this one may have the file open too.
            fcntl.flock(stream, fcntl.LOCK_UN)
