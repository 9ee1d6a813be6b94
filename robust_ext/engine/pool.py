"""Calls on the workers of any ``concurrent.futures.Executor``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch

from robust_ext.core.errors import InvalidArgumentError, RobustExtError, issue
from robust_ext.core.machine import trimmed
from robust_ext.engine.executors import ExecutorLike, check_devices, end_executor, make_executor, workers_of
from robust_ext.engine.isolation.messages import Packer, as_error
from robust_ext.engine.remote import Call, make_call, run_call

# Calls a worker has at a time: the one that it works on, and the next.
_CALLS = 2
# How many calls may end their worker while none returns anything.
_HOPELESS = 3

Reply = Mapping[str, Any]
"""What :func:`run_call` returned; or ``lost``, the reason why a call returned nothing twice."""
FunctionCall = tuple[Callable[..., Any], Mapping[str, Any]]
"""A function of a module, which returns plain values or arrays, and its keyword arguments."""


@dataclass(eq=False)
class _Job:
    key: Any  # Whose it is
    call: Call
    parts: Mapping[str, bytes]  # That a worker may lack, and is sent then
    executor: Executor | None = None  # That it was submitted to
    failed: bool = False


class Pool:
    """An executor whose workers are processes, here or elsewhere.

    A call that fails, as it or another one ended its worker, runs again while no other call does. One that fails again
    is lost.

    Args:
        executor: A ``concurrent.futures.Executor`` (of processes, loky, Dask, mpi4py, executorlib); a callable that
            makes one, which is called again where it broke; or a text, see
            :func:`robust_ext.engine.executors.make_executor`.
        devices: Devices as torch names them. Of several, each call has one for itself; one is that of all workers.
            None: those that runs lie on.
        isolate: Whether workers give each attack a process of its own.
        attack_timeout: Seconds that an attack may take there; None for any time.

    Raises:
        InvalidArgumentError: The executor is none, or one of threads, or a device is none.
    """

    def __init__(
        self,
        executor: ExecutorLike,
        *,
        devices: Sequence[str] | None = None,
        isolate: bool = False,
        attack_timeout: float | None = None,
    ) -> None:
        self.isolate, self.attack_timeout = isolate, attack_timeout
        self._devices = check_devices(devices)
        self._free = list(self._devices)
        self._executor = _check_processes(executor) if isinstance(executor, Executor) else None
        self._make: Any = make_executor(executor, devices=self._devices) if isinstance(executor, str) else executor
        if self._executor is not None:
            self._make = None
        elif not callable(self._make):
            expected = "a concurrent.futures.Executor, a callable that makes one, or a text such as 'local'"
            raise InvalidArgumentError("executor", executor, expected)
        self._flying: dict[Future[Any], _Job] = {}
        self._alone: list[_Job] = []  # That failed once; the first runs, or is the next to run
        self._returned = self._lost = 0

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self._devices) if len(self._devices) > 1 else workers_of(self._started())

    @property
    def room(self) -> int:
        """The number of calls that may be submitted now."""
        calls = self.workers * (1 if len(self._devices) > 1 else _CALLS)
        return 0 if self._alone else calls - len(self._flying)

    def submit(self, key: Any, call: Call, parts: Mapping[str, bytes]) -> None:
        """Submit a call, with these parts for workers that lack them."""
        self._start(_Job(key, call, parts))

    def wait(self, timeout: float | None = None) -> list[tuple[Any, Reply]]:
        """Return keys and replies of calls that ended; wait for one, or for that many seconds.

        Raises:
            RobustExtError: The executor broke and cannot be made again, or nothing comes back from any worker.
        """
        if self._alone and not self._flying:
            self._start(self._alone[0])
        replies = []
        for future in wait(self._flying, timeout, FIRST_COMPLETED).done:
            job = self._flying.pop(future)
            if len(self._devices) > 1:
                self._free.insert(0, str(job.call.device))
            error = RuntimeError("the executor cancelled it") if future.cancelled() else future.exception()
            reply = self._failed(job, error) if error is not None else future.result()
            if reply is not None and (missing := reply.get("missing")):
                content = {**job.call.content, **{digest: job.parts[digest] for digest in missing}}
                job.call = replace(job.call, content=content)
                self._start(job)
            elif reply is not None:
                self._returned += "lost" not in reply
                if job in self._alone:
                    self._alone.remove(job)
                replies.append((job.key, reply))
        return replies

    def run(self, calls: Iterable[tuple[Any, Call]], parts: Mapping[str, bytes]) -> Iterator[tuple[Any, Reply]]:
        """Yield the key and reply of each call, as they end; they begin in order."""
        waiting = iter(calls)
        left = next(waiting, None)
        while left is not None or self._flying or self._alone:
            while left is not None and self.room > 0:
                self.submit(*left, parts)
                left = next(waiting, None)
            yield from self.wait()

    def _start(self, job: _Job) -> None:
        job.executor = executor = self._started()
        if self._devices:
            device = self._free.pop(0) if len(self._devices) > 1 else self._devices[0]
            job.call = replace(job.call, device=device)
        try:
            future = executor.submit(run_call, job.call)
        except RuntimeError as error:
            # It broke in the meantime, or was shut down.
            future = Future()
            future.set_exception(BrokenExecutor(str(error)))
        self._flying[future] = job

    def _failed(self, job: _Job, error: BaseException) -> Reply | None:
        """Set a call aside to run again, or return why it is lost."""
        if isinstance(error, BrokenExecutor) and job.executor is self._executor:
            if self._make is None:
                raise RobustExtError(
                    f"executor: it broke ({error}); finished blocks are kept in the run folder, and the same call with "
                    "a new executor resumes the run; give a callable that makes one, to be called again where it breaks"
                ) from error
            self._end()
        if not job.failed:
            job.failed = True
            self._alone.append(job)
            return None
        text = f"{type(error).__name__}: {error}"
        self._lost += 1
        if self._lost >= _HOPELESS and not self._returned:
            raise RobustExtError(f"executor: no worker returned anything ({text}); see what its workers print")
        return {"lost": text}

    def _started(self) -> Executor:
        if self._executor is None:
            self._executor = _check_processes(self._make())
        return self._executor

    def _end(self) -> None:
        if self._executor is not None and self._make is not None:
            end_executor(self._executor)
            self._executor = None

    def close(self) -> None:
        """Cancel what waits; an executor that was made here ends at once with its workers."""
        for future in self._flying:
            future.cancel()
        self._end()


def _check_processes(executor: object) -> Executor:
    if not isinstance(executor, Executor):
        expected = "a callable that returns a concurrent.futures.Executor"
        raise InvalidArgumentError("executor", f"a callable that returns {type(executor).__name__}", expected)
    if isinstance(executor, ThreadPoolExecutor):
        expected = "one whose workers are processes, as hooks and global seeds are those of a whole process"
        raise InvalidArgumentError("executor", type(executor).__name__, expected)
    return executor


_CURRENT: ContextVar[Pool | None] = ContextVar("robust_ext_pool", default=None)


def current_pool() -> Pool | None:
    """Return the pool of the block that this is inside, see :func:`pooling`."""
    return _CURRENT.get()


@contextmanager
def pooling(pool: Pool) -> Iterator[None]:
    """Run the blocks of runs inside this one on the pool, which closes at the end."""
    token = _CURRENT.set(pool)
    try:
        yield
    finally:
        _CURRENT.reset(token)
        pool.close()


def call_all(calls: Sequence[FunctionCall], *, place: torch.device) -> Iterator[tuple[int, Any]]:
    """Yield the index and value of each call as they end, from workers of the current pool; here without one.

    ``place`` is where their tensors lie. RobustExtError: one of them raised it, or its worker ended.
    """
    pool, packer = current_pool(), Packer("a worker")
    if pool is None or len(calls) < 2:
        for number, (function, arguments) in enumerate(calls):
            with trimmed():
                value = function(**arguments)
            yield number, value
        return
    packed = (make_call(packer, function, origin=place.type, **arguments) for function, arguments in calls)
    for number, reply in pool.run(enumerate(packed), packer.parts):
        yield number, value_of(reply, "executor")


def value_of(reply: Reply, title: str) -> Any:
    """Return the value of a reply, and warn of what its worker warned of; RobustExtError without one."""
    issue(reply.get("warnings", {}))
    if "error" in reply:
        raise as_error(reply)
    if "raised" in reply:
        raise RobustExtError(f"{title}: a worker raised\n{reply['raised']}")
    if "lost" in reply:
        raise RobustExtError(f"{title}: a worker ended ({reply['lost']}); see what it printed")
    return reply["value"]
