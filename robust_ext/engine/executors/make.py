"""Executors from text, as in ``dask:tcp://head:8786``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

import torch

from robust_ext.core.devices import check_device
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.specification import did_you_mean
from robust_ext.core.validation import check_integer
from robust_ext.engine.executors.cluster import imported
from robust_ext.engine.executors.dask import DaskExecutor
from robust_ext.engine.executors.local import LocalExecutor, cores
from robust_ext.engine.executors.ray import RayExecutor
from robust_ext.engine.executors.slurm import SlurmExecutor

NAMES = ("local", "dask", "ray", "slurm")
"""What the text of an executor begins with."""

_FORMS = "local, local:N, dask, dask:ADDRESS, ray, ray:ADDRESS, slurm or slurm:PARTITION"
_MODULES = {"dask": "distributed", "ray": "ray", "slurm": "submitit"}
_MOST = 100_000  # Workers


def make_executor(
    text: str, *, workers: int | None = None, devices: Sequence[str] = (), folder: Path | None = None
) -> Callable[[], Executor]:
    """What makes an executor, also a second time where the first one broke.

    Args:
        text: ``local`` (processes of this machine), ``dask`` or ``ray`` (started here), ``dask:ADDRESS`` or
            ``ray:ADDRESS`` (running already), ``slurm`` or ``slurm:PARTITION``; ``local:2`` has two workers.
        workers: Calls that run at a time, at least 1; None for one a device or core here, and for all that a cluster
            has. Slurm is asked for so many jobs, 8 by default.
        devices: Where workers compute. Those of a cluster have one GPU each where it is ``("cuda",)``.
        folder: Where Slurm's jobs leave their files, on a file system that all nodes share.

    Raises:
        InvalidArgumentError: The text has another form, ``workers`` is stated twice, devices are numbered where a
            cluster deals them out, or Slurm has no folder.
        MissingDependencyError: The package behind it is not installed.

    Example:
        >>> with make_executor("local", workers=2)() as executor:
        ...     workers_of(executor)
        2
    """
    kind, colon, place = text.partition(":") if isinstance(text, str) else (text, "", "")
    if kind not in NAMES or (colon and not place):
        raise InvalidArgumentError("executor", text, f"{_FORMS}{did_you_mean(str(kind), NAMES)}")
    if workers is not None:
        workers = check_integer("workers", workers, minimum=1, maximum=_MOST)
    if kind == "local":
        for device in devices:
            check_device(device, argument="devices")
        return partial(LocalExecutor, _local_workers(text, place, workers, devices))
    imported(_MODULES[kind], extra=kind)
    gpus = _wants_gpus(text, devices)
    if kind == "dask":
        return partial(DaskExecutor, place or None, workers=workers, gpus=gpus)
    if kind == "ray":
        return partial(RayExecutor, place or None, workers=workers, gpus=gpus)
    if folder is None:
        expected = (
            "a folder that all nodes share, for its jobs' files (--out; make_executor(text, folder=...) in Python)"
        )
        raise InvalidArgumentError("executor", text, expected)
    return partial(SlurmExecutor, folder, partition=place or None, workers=workers, gpus=gpus)


def workers_of(executor: Executor) -> int:
    """How many calls an executor runs at a time, at least 1; the cores of this machine where it does not state that.

    Example:
        >>> from concurrent.futures import ProcessPoolExecutor
        >>> workers_of(ProcessPoolExecutor(3))
        3
    """
    # This project's, executorlib's, mpi4py's, then those of the standard library and loky.
    for name in ("workers", "max_workers", "num_workers", "_max_workers"):
        found = getattr(executor, name, None)
        if isinstance(found, int):
            return max(1, found)
    # What Client.get_executor returns.
    count = getattr(getattr(executor, "_client", None), "ncores", None)
    return max(1, len(count())) if count is not None else cores()


def _local_workers(text: str, place: str, workers: int | None, devices: Sequence[str]) -> int:
    if place and (not (place.isascii() and place.isdigit()) or not 1 <= int(place) <= _MOST):
        raise InvalidArgumentError("executor", text, "local:N with a number of workers from 1")
    if place and workers not in (None, int(place)):
        raise InvalidArgumentError("executor", text, f"local, as {workers} workers (--jobs) are stated besides")
    count = int(place) if place else workers or len(devices) or cores()
    if len(devices) > 1 and count != len(devices):
        expected = f"one a device ({len(devices)}); name a device several times for several workers on it"
        raise InvalidArgumentError("workers", count, expected)
    return count


def _wants_gpus(text: str, devices: Sequence[str]) -> bool:
    try:
        # They need not be of this machine.
        found = [torch.device(device) for device in devices]
    except RuntimeError as error:
        raise InvalidArgumentError("devices", ",".join(devices), f"devices as torch names them ({error})") from error
    if any(device.index is not None for device in found):
        expected = 'devices without numbers ("cuda"), as a cluster deals them out to its workers'
        raise InvalidArgumentError("devices", ",".join(devices), f"{expected} (executor {text})")
    return any(device.type != "cpu" for device in found)
