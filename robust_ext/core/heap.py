"""The heap of this process: memory that tensors gave back is kept for the next ones.

The C library of most Linux systems (glibc) hands memory that was freed back to the system, and takes it from there
anew, zeroed page by page, at the next forward pass: on a CPU up to a third of the time of a pass.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

# Options of mallopt, from malloc.h, and the environment variables by which users set the same.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


@cache
def keep_freed_memory() -> bool:
    """From now on memory that is freed stays with this process, for what is computed next; states whether that works.

    Results are the same to the bit. The process then holds the most that it ever needed, about a tenth more than
    without, until :func:`trimmed` ends. Nothing is changed on other systems and C libraries, or where an environment
    variable of glibc's (``MALLOC_TRIM_THRESHOLD_`` and the like, ``GLIBC_TUNABLES``) has chosen otherwise.
    """
    chosen = any(name in os.environ for name in _CHOSEN) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    library = _library()
    if library is None or chosen:
        return False
    # Nothing at the end of the heap is handed back, and large blocks come from the heap too.
    return bool(library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)) and bool(library.mallopt(_MMAP_MAX, 0))


@contextmanager
def trimmed() -> Iterator[None]:
    """Freed memory is kept inside the block (:func:`keep_freed_memory`), and handed back at its end."""
    kept = keep_freed_memory()
    try:
        yield
    finally:
        library = _library()
        if kept and library is not None:
            library.malloc_trim(0)


def _library() -> ctypes.CDLL | None:
    """The C library, where it is glibc."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
