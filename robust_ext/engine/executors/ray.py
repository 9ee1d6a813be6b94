"""Workers of a Ray cluster: one that runs, or processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.engine.executors.cluster import ClusterExecutor, WorkerLostError, imported
from robust_ext.engine.executors.local import cores

T = TypeVar("T")


class RayExecutor(ClusterExecutor):
    """Calls as tasks of Ray, of one core each; Ray repeats none, as the engine does.

    Args:
        address: Of the cluster, as in ``head:6379``, or ``auto``; None starts one here. Where this process has
            connected to Ray already, that connection is used.
        workers: Calls at a time; None for as many as there are cores, or GPUs where calls need them.
        gpus: Whether a call needs a GPU to itself, which is then the only one that it sees.

    Raises:
        InvalidArgumentError: There is no such cluster, or none with a GPU.
        MissingDependencyError: ``ray`` is not installed.
    """

    def __init__(self, address: str | None, *, workers: int | None = None, gpus: bool = False) -> None:
        super().__init__()
        ray = imported("ray", extra="ray")
        self._ray, self._most, self._resource = ray, workers, "GPU" if gpus else "CPU"
        text = "ray" if address is None else f"ray:{address}"
        self._started = not ray.is_initialized()
        if self._started:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            more = {"num_cpus": workers or cores(), "include_dashboard": False} if address is None else {}
            try:
                ray.init(address or "local", log_to_driver=False, logging_level="error", **more)
            except (ConnectionError, ValueError) as error:
                raise InvalidArgumentError("executor", text, f"the address of a Ray cluster ({error})") from error
        if gpus and not ray.cluster_resources().get("GPU"):
            self.close()
            raise InvalidArgumentError("executor", text, "a cluster with GPUs where devices are asked for")
        self._call = ray.remote(num_cpus=1, num_gpus=int(gpus), max_retries=0)(_call)

    @property
    def workers(self) -> int:
        """How many calls run at a time; clusters grow and shrink."""
        found = int(self._ray.cluster_resources().get(self._resource, 1))
        return max(1, min(found, self._most or found))

    def begin(
        self, function: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Future[T], Callable[[], object]]:
        """A task."""
        task = self._call.remote(function, args, kwargs)
        return task.future(), partial(self._ray.cancel, task, force=True)

    def error_of(self, error: BaseException) -> BaseException:
        """The error that the function raised; others of Ray mean that there is no worker with it any more."""
        if isinstance(error, self._ray.exceptions.RayTaskError):
            cause: BaseException = error.cause
            return cause
        return WorkerLostError(str(error)) if isinstance(error, self._ray.exceptions.RayError) else error

    def close(self) -> None:
        """Leave the cluster, and end it where it was started here."""
        if self._started:
            self._ray.shutdown()


def _call(function: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> T:
    return function(*args, **kwargs)
