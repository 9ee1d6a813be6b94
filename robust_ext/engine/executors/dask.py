"""Workers of a Dask cluster: one that runs, or processes of this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.engine.executors.cluster import ClusterExecutor, WorkerLostError, imported
from robust_ext.engine.executors.local import cores

T = TypeVar("T")

# Seconds in which a scheduler has to reply and a first worker to be there.
_PATIENCE = 30


class DaskExecutor(ClusterExecutor):
    """Calls on workers of one thread each, as hooks and seeds belong to a whole process.

    Args:
        address: Of the scheduler, as in ``tcp://head:8786``; None starts one with workers here.
        workers: Calls at a time; None for as many as there are workers.
        gpus: Whether a call needs a worker with the resource ``GPU`` to itself.

    Raises:
        InvalidArgumentError: No scheduler replies, it has no workers, they have several threads, or none has a GPU.
        MissingDependencyError: ``distributed`` is not installed.
    """

    def __init__(self, address: str | None, *, workers: int | None = None, gpus: bool = False) -> None:
        super().__init__()
        dask = imported("distributed", extra="dask")
        self._dask, self._most, self._gpus = dask, workers, gpus
        text = "dask" if address is None else f"dask:{address}"
        self._cluster = None
        if address is None:
            # Else the scheduler reports its own end.
            logging.getLogger("distributed").setLevel(logging.ERROR)
            self._cluster = dask.LocalCluster(
                n_workers=workers or cores(), threads_per_worker=1, dashboard_address=None, silence_logs=40
            )
        try:
            self._client = dask.Client(self._cluster or address, timeout=_PATIENCE, set_as_default=False)
        except (OSError, ValueError) as error:
            raise InvalidArgumentError("executor", text, f"the address of a Dask scheduler ({error})") from error
        try:
            self._check(text)
        except BaseException:
            self.close()
            raise
        resources = {"GPU": 1} if gpus else None
        self._executor = self._client.get_executor(pure=False, retries=0, resources=resources)

    def _check(self, text: str) -> None:
        try:
            self._client.wait_for_workers(1, timeout=_PATIENCE)
        except TimeoutError as error:
            raise InvalidArgumentError(
                "executor", text, "a scheduler with workers; start some (dask worker)"
            ) from error
        for worker, threads in self._client.ncores().items():
            if threads != 1:
                expected = "workers of one thread each (dask worker --nthreads 1 --nworkers N)"
                raise InvalidArgumentError("executor", text, f"{expected}; {worker} has {threads}")
        if self._gpus and not self._able():
            expected = 'workers with the resource GPU (dask worker --nthreads 1 --resources "GPU=1")'
            raise InvalidArgumentError("executor", text, expected)

    def _able(self) -> int:
        """The number of workers that can run a call."""
        if not self._gpus:
            return len(self._client.ncores())
        known = self._client.scheduler_info(n_workers=-1)["workers"].values()
        return sum(worker["resources"].get("GPU", 0) >= 1 for worker in known)

    @property
    def workers(self) -> int:
        """How many calls run at a time; clusters grow and shrink."""
        found = self._able()
        return max(1, min(found, self._most or found))

    def begin(
        self, function: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Future[T], Callable[[], object]]:
        """A call of ``Client.get_executor``."""
        import dask.config

        # What is large is sent once to each worker.
        with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1 TiB"}):
            future: Future[T] = self._executor.submit(function, *args, **kwargs)
        return future, future.cancel

    def error_of(self, error: BaseException) -> BaseException:
        """Dask gives up a call after several deaths of workers that had it, be it guilty or not."""
        return WorkerLostError(str(error)) if isinstance(error, self._dask.KilledWorker) else error

    def close(self) -> None:
        """Leave the cluster, and end it where it was started here."""
        self._client.close()
        if self._cluster is not None:
            self._cluster.close()
