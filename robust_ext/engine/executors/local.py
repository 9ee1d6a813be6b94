"""Processes of this machine: the standard library's pool, with workers that end when this process does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

_STARTING = threading.Lock()


class LocalExecutor(ProcessPoolExecutor):
    """Workers that are started afresh, not forked, each with its share of the cores.

    Args:
        workers: Their number.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        super().__init__(workers, mp_context=_Context(max(1, cores() // workers)), initializer=_begin_worker)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Process(SpawnProcess):
    """Libraries look for their number of threads in the environment, when they are imported."""

    variables: Mapping[str, str]

    def start(self) -> None:
        with _STARTING, _seen_by_children(self.variables):
            super().start()


class _Context(SpawnContext):
    def __init__(self, threads: int) -> None:
        super().__init__()
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        self._variables = {name: str(_fewer(os.environ.get(name), threads)) for name in names}

    def Process(self, *args: Any, **kwargs: Any) -> SpawnProcess:  # type: ignore[override]  # noqa: N802
        made = _Process(*args, **kwargs)
        made.variables = self._variables
        return made


def _fewer(stated: str | None, threads: int) -> int:
    return min(int(stated), threads) if stated is not None and stated.isdigit() and int(stated) else threads


@contextmanager
def _seen_by_children(variables: Mapping[str, str]) -> Iterator[None]:
    """Processes that begin inside the block have these variables, and do not run the script of this one again.

    What they are to do travels by value, so they have no need of it; a script without a ``__main__`` guard would begin
    the evaluation anew in each of them.
    """
    before = {name: os.environ.get(name) for name in variables}
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    os.environ.update(variables)
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _begin_worker() -> None:
    """End with the process that started this one, however that ends; Ctrl-C is for that one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
