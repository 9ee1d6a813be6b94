"""Memory: smaller batches where one does not fit, and freed memory that stays with the process."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from robust_ext.core.errors import ModelError, warn

# Options of mallopt, from malloc.h, and the environment variables by which users set the same.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


@cache
def keep_freed_memory() -> bool:
    """From now on memory that is freed stays with this process, for what is computed next; states whether that works.

    Results are the same to the bit. The process then holds the most that it ever needed, about a tenth more than
    without, until :func:`trimmed` ends. Nothing is changed on other systems and C libraries, or where an environment
    variable of glibc's (``MALLOC_TRIM_THRESHOLD_`` and similar, ``GLIBC_TUNABLES``) has chosen otherwise.
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


OutOfMemory: type[RuntimeError] = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
"""What torch raises where a device has no memory left."""

# Rows by which the memory of one is measured, and the share of the free memory that a batch may take.
_PROBE, _SHARE = 8, 0.5


class RowLimit:
    """The most rows of a batch, which is halved each time one does not fit into memory.

    Args:
        rows: The most at first.

    Example:
        >>> limit = RowLimit(4)
        >>> limit.run(lambda batch: batch.sum(1, keepdim=True), torch.ones(10, 3)).shape
        torch.Size([10, 1])
    """

    def __init__(self, rows: int) -> None:
        self.rows = max(1, rows)
        self._noted = False

    def run(self, function: Callable[[Tensor], Tensor], points: Tensor) -> Tensor:
        """A function's outputs for rows ``(M, ...)`` that do not depend on each other, in batches of nearly equal size.

        Raises:
            ModelError: A single row does not fit.
        """
        found: list[Tensor] = []
        done = 0
        while done < len(points) or not found:
            left = len(points) - done
            size = -(-left // max(1, -(-left // self.rows)))
            try:
                found.append(function(points if size == len(points) else points[done : done + size]))
                done += size
                continue
            except OutOfMemory as error:
                if size <= 1:
                    raise ModelError(
                        f"out of memory with a single row of shape {tuple(points.shape[1:])} on {points.device}: free "
                        "memory there, or run on another device"
                    ) from error
            # Here nothing of the error holds the batch any more.
            self._halve(size, points.device)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _halve(self, size: int, device: torch.device) -> None:
        self.rows = size // 2
        if not self._noted:
            warn(f"out of memory with {size} rows on {device}: going on with fewer", kept=False)
        self._noted = True


def rows_that_fit(function: Callable[[Tensor], Tensor], row: Tensor, most: int) -> int:
    """Return a batch size, without gradients, for rows like ``(1, ...)`` on a GPU: a power of two, at most ``most``.

    A small batch shows what one takes; all of them take at most half of what is free.
    """
    device = row.device
    probe = row.expand(_PROBE, *row.shape[1:])
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with torch.no_grad():
        function(probe)
    taken = (torch.cuda.max_memory_allocated(device) - before) / _PROBE
    free, _ = torch.cuda.mem_get_info(device)
    # What torch holds without using it is free too.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return power_of_two(min(most, _SHARE * free / max(taken, 1)))


def power_of_two(size: float) -> int:
    """The largest power of two that is not above ``size``, at least 1."""
    return 1 << (max(1, int(size)).bit_length() - 1)
