"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from robust_ext.core.errors import DataError, RobustExtError


def replace_file(
    path: Path, content: bytes | str, *, error: type[RobustExtError] = DataError, sync: bool = True
) -> None:
    """Write a file, whose folder exists, in one step, also when the machine stops in the middle; text becomes UTF-8.

    The draft lies beside it, because a rename needs one disk. Where it cannot be written, ``error`` is raised. Without
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
    """Return the content of a file, which :func:`open_file` may refuse; None where there is none."""
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
    """What to say about a file that the operating system did not let be written."""
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
    """Whether another process has this id; this one writes nothing at the moment."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
