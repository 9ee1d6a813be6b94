"""Executors by name: processes of this machine, Dask, and what a file makes; see docs/clusters.md."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from functools import partial
from typing import Any, TypeVar, cast

import torch

from robust_ext.core.devices import check_device
from robust_ext.core.errors import InvalidArgumentError, MissingDependencyError
from robust_ext.core.objects import check_code, resolve_object
from robust_ext.core.specification import did_you_mean
from robust_ext.core.validation import check_integer
from robust_ext.engine.isolation.process import without_script

NAMES = ("local", "dask")
"""What the text of an executor begins with."""

ExecutorLike = Executor | Callable[[], Executor] | str | None
"""What ``executor=`` may be; None is this process."""

T = TypeVar("T")

_FORMS = "local, local:N, dask, dask:ADDRESS, or file.py:name of a function that makes an executor"
# Names of earlier versions.
_REPLACED = {
    "ray": "file.py:name of a function that makes an executor; docs/clusters.md has one for Ray",
    "slurm": "dask:ADDRESS; docs/clusters.md has a script for Slurm whose jobs are Dask workers",
}
_MOST = 100_000  # Workers
# Seconds in which a scheduler has to reply and a first worker has to join.
_PATIENCE = 30


def make_executor(text: str, *, workers: int | None = None, devices: Sequence[str] = ()) -> Callable[[], Executor]:
    """Return what makes an executor, and makes it again where it broke.

    Args:
        text: ``local`` (processes of this machine) or ``local:2``; ``dask:ADDRESS`` (a cluster that runs) or ``dask``
            (one that is started on this machine); ``file.py:name`` or ``package.module:name`` (a function that makes
            an executor).
        workers: Number of workers that are started on this machine, at least 1; one a device or core when left out.
        devices: Where workers compute. Those of a cluster have one GPU each where it is ``("cuda",)``.

    Raises:
        InvalidArgumentError: The text has another form, ``workers`` is stated where the text decides it, or devices are
            numbered where a cluster assigns them.
        MissingDependencyError: Dask is not installed.

    Example:
        >>> with make_executor("local", workers=2)() as executor:
        ...     workers_of(executor)
        2
    """
    kind, colon, place = text.partition(":") if isinstance(text, str) else (text, "", "")
    if kind in _REPLACED:
        raise InvalidArgumentError("executor", text, _REPLACED[kind])
    if (colon and not place) or (kind not in NAMES and not place):
        raise InvalidArgumentError("executor", text, f"{_FORMS}{did_you_mean(str(kind), NAMES)}")
    if workers is not None:
        workers = check_integer("workers", workers, minimum=1, maximum=_MOST)
    if kind == "local":
        return partial(LocalExecutor, _local_workers(text, place, workers, devices))
    if kind == "dask":
        _imported_dask()
    if workers is not None and place:
        raise InvalidArgumentError("workers", workers, f"None (no --jobs), as {text} decides how many there are")
    if kind == "dask":
        return partial(_start_dask, place or None, workers=workers, gpus=_wants_gpus(text, devices))
    check_code(text, "executor")
    return partial(resolve_object, text if text.endswith(")") else f"{text}()", argument="executor")


def workers_of(executor: Executor) -> int:
    """Return how many calls an executor runs at a time; the cores of this machine where it does not state that.

    Example:
        >>> workers_of(ProcessPoolExecutor(3))
        3
    """
    # Names in this project, executorlib and mpi4py, then in the standard library and loky.
    for name in ("workers", "max_workers", "num_workers", "_max_workers"):
        found = getattr(executor, name, None)
        if isinstance(found, int):
            return max(1, found)
    # What distributed.Client.get_executor returns.
    count = getattr(getattr(executor, "_client", None), "ncores", None)
    return max(1, len(count())) if count is not None else cores()


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_executor(executor: Executor) -> None:
    """Shut an executor down without waiting for its calls; processes of this machine are terminated."""
    # Read first: a pool of processes forgets them, and waits for their calls at exit.
    processes = list((getattr(executor, "_processes", None) or {}).values())
    executor.shutdown(wait=False)
    for process in processes:
        process.terminate()


class LocalExecutor(ProcessPoolExecutor):
    """Processes of this machine, spawned and not forked, each with its share of the cores.

    Args:
        workers: Their number.
    """

    def __init__(self, workers: int) -> None:
        self.workers, threads = workers, max(1, cores() // workers)
        stated = {name: os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        self._variables = {
            name: str(min(int(text), threads) if text.isdigit() and int(text) else threads)
            for name, text in stated.items()
        }
        super().__init__(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_begin_worker)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call ``fn`` in a process, which is started here where there are too few."""
        with without_script(self._variables):
            return super().submit(fn, *args, **kwargs)


def _begin_worker() -> None:
    """Leave Ctrl-C to the process that started this one, and end when that process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _start_dask(address: str | None, *, workers: int | None, gpus: bool) -> Executor:
    """Return Dask's own executor; InvalidArgumentError where no scheduler replies, or none of its workers will do."""
    here = {"n_workers": workers or cores(), "threads_per_worker": 1, "dashboard_address": ":0", "silence_logs": 50}
    client, text = None, "dask" if address is None else f"dask:{address}"
    try:
        expected = "the address of a Dask scheduler"
        more = here if address is None else {"timeout": _PATIENCE}
        client = _imported_dask().Client(address, set_as_default=False, **more)
        expected = "a scheduler with workers; start some (dask worker)"
        client.wait_for_workers(1, timeout=_PATIENCE)
        known = client.scheduler_info(n_workers=-1)["workers"].values()
        if gpus and not any(worker["resources"].get("GPU") for worker in known):
            expected = 'workers with the resource GPU (dask worker --nthreads 1 --resources "GPU=1")'
            raise ValueError("there are none")
    except (OSError, ValueError, TimeoutError) as error:
        if client is not None:
            client.close()
        raise InvalidArgumentError("executor", text, f"{expected} ({error})") from error
    # Networks are large, and sent to each worker once.
    importlib.import_module("dask").config.set({"distributed.admin.large-graph-warning-threshold": "1 TiB"})
    executor: Any = client.get_executor(pure=False, retries=0, resources={"GPU": 1} if gpus else None)
    end = executor.shutdown

    def shutdown(wait: bool = True, *, cancel_futures: bool = False) -> None:
        end(wait=wait and not cancel_futures)
        client.close()

    executor.shutdown = shutdown
    return cast(Executor, executor)


def _imported_dask() -> Any:
    try:
        return importlib.import_module("distributed")
    except ImportError as error:
        text = 'executor: dask needs distributed: pip install "robust-ext[dask]"'
        raise MissingDependencyError(text) from error


def _local_workers(text: str, place: str, workers: int | None, devices: Sequence[str]) -> int:
    for device in devices:
        check_device(device, argument="devices")
    if place and (not (place.isascii() and place.isdigit()) or not 1 <= int(place) <= _MOST):
        raise InvalidArgumentError("executor", text, "local:N with a number of workers from 1")
    if place and workers not in (None, int(place)):
        raise InvalidArgumentError("executor", text, f"local, because --jobs states {workers} workers")
    count = int(place) if place else workers or len(devices) or cores()
    if len(devices) > 1 and count != len(devices):
        expected = f"one a device ({len(devices)}); name a device several times for several workers on it"
        raise InvalidArgumentError("workers", count, expected)
    return count


def _wants_gpus(text: str, devices: Sequence[str]) -> bool:
    found = [torch.device(device) for device in check_devices(devices or None)]
    if any(device.index is not None for device in found):
        expected = f'devices without numbers ("cuda"), as a cluster assigns them to its workers (executor {text})'
        raise InvalidArgumentError("devices", ",".join(devices), expected)
    return any(device.type != "cpu" for device in found)


def check_devices(devices: Sequence[str] | None) -> tuple[str, ...]:
    """Return devices, which need not be of this machine; InvalidArgumentError where torch has no such name."""
    if devices is None:
        return ()
    if isinstance(devices, str) or not devices:
        raise InvalidArgumentError("devices", devices, 'a list of devices, as ["cuda:0", "cuda:1"]')
    try:
        return tuple(str(torch.device(one)) for one in devices)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgumentError("devices", devices, f"devices as torch names them ({error})") from error
