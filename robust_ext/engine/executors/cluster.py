"""What executors over the workers of another program have in common: futures, cancellation, workers that die."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from functools import partial
from typing import Any, TypeVar

from robust_ext.core.errors import MissingDependencyError, RobustExtError

T = TypeVar("T")


class WorkerLostError(RobustExtError):
    """The process that ran a call is gone; the executor is not broken, and other calls have other processes."""


class ClusterExecutor(Executor):
    """Calls that begin as futures of a library; they can be cancelled also while they run."""

    def __init__(self) -> None:
        self._open = True
        self._unfinished: set[Future[Any]] = set()

    @property
    @abstractmethod
    def workers(self) -> int:
        """How many calls run at a time, at least 1."""

    @abstractmethod
    def begin(
        self, function: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Future[T], Callable[[], object]]:
        """The library's future of a call, and what cancels it."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the workers; those that this process started end."""

    def error_of(self, error: BaseException) -> BaseException:
        """What a call raises in place of an error of its future."""
        return error

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call ``fn`` on a worker.

        Raises:
            RuntimeError: The executor was shut down.
        """
        if not self._open:
            raise RuntimeError("cannot schedule new futures after shutdown")
        inner, cancel = self.begin(fn, args, kwargs)
        future: Future[T] = Future()
        self._unfinished.add(future)
        # It counts as pending until it has ended, so that it can be cancelled until then.
        future.add_done_callback(lambda future: cancel() if future.cancelled() else None)
        inner.add_done_callback(partial(self._end, future=future))
        return future

    def _end(self, inner: Future[T], future: Future[T]) -> None:
        self._unfinished.discard(future)
        if not future.set_running_or_notify_cancel():
            return
        if inner.cancelled():
            future.set_exception(WorkerLostError("the cluster dropped the call, as when its scheduler ended"))
        elif (error := inner.exception()) is not None:
            future.set_exception(self.error_of(error))
        else:
            future.set_result(inner.result())

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no further calls; calls that are not waited for are cancelled, also while they run."""
        self._open = False
        if cancel_futures or not wait:
            for future in list(self._unfinished):
                future.cancel()
        else:
            wait_for(list(self._unfinished))
        self.close()


def imported(module: str, *, extra: str) -> Any:
    """A module of an optional package, or MissingDependencyError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(f'executor: {extra} needs {module}: pip install "robust-ext[{extra}]"') from error
