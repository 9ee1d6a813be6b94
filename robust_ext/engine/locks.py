"""Locks on files of a run folder, which end with the process that holds them, however that one ended."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import BinaryIO

from robust_ext.core.errors import RunFolderBusyError, RunFolderError
from robust_ext.core.files import unwritable


def locked(path: Path, *, wait: bool) -> BinaryIO:
    """An open file that no other process can lock until it is closed.

    RunFolderBusyError when one has it and ``wait`` is False.
    """
    try:
        handle = path.open("ab")
    except OSError as error:
        raise RunFolderError(unwritable(path, error)) from error
    try:
        import fcntl
    except ImportError:  # Windows has no fcntl; there a folder is not guarded against a second writer.
        return handle
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as error:
        handle.close()
        raise RunFolderBusyError(
            f"{path.parent}: another process is writing this run; wait for it, stop it, or choose another folder"
        ) from error
    except OSError as error:
        handle.close()
        raise RunFolderError(unwritable(path, error)) from error
    return handle


def unlock(handle: BinaryIO) -> None:
    """Let another process have it, also where one that was forked from this one has the file open too."""
    if handle.closed:
        return
    # Windows has no fcntl, and where locks fail there was none.
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_UN)
    handle.close()
