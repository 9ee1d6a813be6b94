"""Memory and cores: batches that fit, freed memory that stays with the process, and threads for the free cores."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from robust_ext.core.errors import ModelError, warn

# Options of mallopt, from malloc.h, and the environment variables by which users set the same.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


@cache
def keep_freed_memory() -> bool:
    """Keep freed memory in this process for later computations; return whether that works.

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
            self.rows = size // 2
            if not self._noted:
                warn(f"out of memory with {size} rows on {points.device}: going on with fewer", kept=False)
            self._noted = True
        return found[0] if len(found) == 1 else torch.cat(found)


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


# Seconds of work that show how busy other processes are, the shortest stretch, and /proc/stat's ticks in a second.
_LONG, _SHORT = 0.2, 0.02
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class FreeCores:
    """The cores that other processes leave free, as seen over stretches of this process's own work.

    The threads of an operation wait for the last of them. Where another process holds a core, the thread there is late,
    and the others spend their time spinning. On networks of four kinds (convolutions with and without normalisation, a
    perceptron, a transformer layer) logits and gradients of one thread and of two are equal to the bit.

    Args:
        most: Threads to use where all cores are free.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._spent = (0.0, 0.0)  # Seconds, and core seconds of other processes in them.
        self._last = _usage()

    def lap(self, *, own: bool = True) -> None:
        """End a stretch of work, and adapt the number of threads; one that is not ``own`` does not count."""
        if own and self._last is not None and time.perf_counter() - self._last[0] < _SHORT:
            return
        now = _usage()
        before, self._last = self._last, now
        if not own or now is None or before is None or self.most == 1:
            return
        seconds, busy, mine = (later - earlier for later, earlier in zip(now, before, strict=True))
        self._spent = self._spent[0] + seconds, self._spent[1] + max(busy - mine, 0.0)
        if self._spent[0] >= _LONG:
            free = len(os.sched_getaffinity(0)) - self._spent[1] / self._spent[0]
            torch.set_num_threads(min(self.most, max(1, round(free))))
            self._spent = 0.0, 0.0


def _usage() -> tuple[float, float, float] | None:
    """Return the time, and the core seconds that all processes and this one have used; None where unknown."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    except (OSError, AttributeError):
        return None
    counts = [list(map(int, line.split()[1:9])) for line in lines if line.split()[0] in names]
    # All but idle and waiting for input and output.
    busy = sum(sum(one) - sum(one[3:5]) for one in counts) / _TICKS
    return time.perf_counter(), busy, time.process_time()


_CURRENT: ContextVar[FreeCores | None] = ContextVar("robust_ext_free_cores", default=None)


@contextmanager
def on_free_cores() -> Iterator[None]:
    """Adapt torch's threads inside the block at each :func:`lap`, up to the number before it, which is put back."""
    if _CURRENT.get() is not None:
        yield
        return
    cores = FreeCores(torch.get_num_threads())
    token = _CURRENT.set(cores)
    try:
        yield
    finally:
        _CURRENT.reset(token)
        torch.set_num_threads(cores.most)


def lap(*, own: bool = True) -> None:
    """End a stretch of work, see :meth:`FreeCores.lap`; nothing outside :func:`on_free_cores`."""
    if (cores := _CURRENT.get()) is not None:
        cores.lap(own=own)
