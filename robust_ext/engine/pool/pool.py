"""The workers of an executor: jobs are submitted, those that are lost run again, and what breaks is made anew."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from robust_ext.core.errors import RobustExtError
from robust_ext.engine.executors import workers_of
from robust_ext.engine.pool.given import ExecutorLike, check_devices, check_executor, end_executor, factory_of

# Jobs a worker has at a time: the one it works on, and the next.
_JOBS = 2
# Seconds after which workers are counted again.
_PATIENCE = 10.0
# How often a job may end its worker while no other runs, and how many such jobs without any result end it all.
_DEATHS, _HOPELESS = 2, 3


@dataclass(eq=False)
class Job:
    """A call, and what became of it."""

    function: Callable[[Any], Mapping[str, Any]]
    call: Any  # With fields ``device`` and ``content``
    parts: Mapping[str, bytes]  # That a worker may lack, and is sent then
    place: Any  # Whose it is
    reply: Mapping[str, Any] | None = None
    lost: str | None = None  # Why there is no reply
    deaths: int = 0  # How often it ended its worker while no other job ran


class Pool:
    """An executor whose workers are processes, here or elsewhere.

    What was in flight when it broke is suspected: it runs again with nothing else, then in halves, down to the job that
    ends its worker by itself.

    Args:
        executor: A ``concurrent.futures.Executor`` (of processes, loky, Dask, mpi4py, executorlib); a callable that
            makes one, which is called again where it broke; or a text, see
            :func:`robust_ext.engine.executors.make_executor`.
        devices: Devices as torch names them. Of several, each job in flight has one for itself; one is that of all
            workers. None: those that runs lie on.
        isolate: Whether workers give each attack a process of its own.
        attack_timeout: Seconds that an attack may take there; None for any time.
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
        self._free = deque(self._devices if len(self._devices) > 1 else ())
        self._make = None if isinstance(executor, Executor) else factory_of(executor, self._devices)
        self._executor = check_executor(executor) if isinstance(executor, Executor) else None
        self._counted = 0, -_PATIENCE  # Workers, and when they were counted
        self._flying: dict[Future[Any], Job] = {}
        self._done: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        self._suspects: deque[list[Job]] = deque()  # Jobs that run with nothing else
        self._trying = 0  # How many suspects run now
        self._returned = self._lost = 0

    @property
    def workers(self) -> int:
        """How many there are."""
        if len(self._devices) > 1:
            return len(self._devices)
        count, when = self._counted
        if time.monotonic() - when > _PATIENCE:
            count = workers_of(self._started())
            self._counted = count, time.monotonic()
        return count

    @property
    def room(self) -> int:
        """How many more jobs are to be submitted."""
        if self._suspects or self._trying:
            return 0
        return (len(self._devices) if len(self._devices) > 1 else _JOBS * self.workers) - len(self._flying)

    @property
    def busy(self) -> bool:
        """Whether there are jobs that did not end yet."""
        return bool(self._flying or self._suspects)

    def submit(self, job: Job) -> None:
        """Have a job done."""
        executor = self._started()
        if self._devices:
            device = self._free.popleft() if len(self._devices) > 1 else self._devices[0]
            job.call = replace(job.call, device=device)
        try:
            future = executor.submit(job.function, job.call)
        except (BrokenExecutor, RuntimeError) as error:
            # It broke while nobody looked, or was shut down.
            future = Future()
            future.set_exception(BrokenExecutor(str(error)))
        self._flying[future] = job
        future.add_done_callback(self._done.put)

    def wait(self, timeout: float | None) -> list[Job]:
        """Jobs that have a reply, or are lost for good; waits for at least one to end, so many seconds at most."""
        if not self._flying and self._suspects:
            group = self._suspects.popleft()
            self._trying = len(group)
            for job in group:
                self.submit(job)
        try:
            ended = [self._done.get(timeout=timeout)]
        except queue.Empty:
            return []
        while not self._done.empty():
            ended.append(self._done.get())
        failures = [(future, error) for future in ended if (error := _error(future)) is not None]
        broken = next((error for _, error in failures if isinstance(error, BrokenExecutor)), None)
        if broken is not None:
            # All that is in flight fails alike, if it has not already.
            ended += [future for future in self._flying if future not in ended]
        alone, jobs = self._trying == 1 or len(self._flying) == 1, []
        failed: list[tuple[Job, BaseException]] = []
        for future in ended:
            if future not in self._flying:
                continue
            job = self._flying.pop(future)
            if len(self._devices) > 1:
                self._free.append(job.call.device)
            error = _error(future) if future.done() else broken
            if error is not None:
                failed.append((job, error))
            elif missing := future.result().get("missing"):
                job.call = replace(job.call, content={digest: job.parts[digest] for digest in missing})
                self.submit(job)
            else:
                job.reply = future.result()
                self._returned += 1
                jobs.append(job)
        if broken is not None:
            self._rebuild(broken)
        jobs += self._suspect(failed, alone=alone, together=broken is not None)
        if not self._flying:
            self._trying = 0
        return jobs

    def _suspect(self, failed: Sequence[tuple[Job, BaseException]], *, alone: bool, together: bool) -> list[Job]:
        """Have failed jobs run again, those that broke the executor together; returns what is lost."""
        lost: list[Job] = []
        if len(failed) > 1 and together:
            jobs = [job for job, _ in failed]
            half = -(-len(jobs) // 2) if self._trying else len(jobs)
            self._suspects.extendleft(group for group in (jobs[half:], jobs[:half]) if group)
            return lost
        for job, error in failed:
            job.deaths += alone
            if job.deaths < _DEATHS:
                self._suspects.append([job])
                continue
            job.lost = f"{type(error).__name__}: {error}"
            self._lost += 1
            lost.append(job)
            if self._lost >= _HOPELESS and not self._returned:
                raise RobustExtError(f"executor: no worker returned anything ({job.lost}); see what its workers print")
        return lost

    def _started(self) -> Executor:
        if self._executor is None:
            assert self._make is not None
            self._executor = check_executor(self._make())
        return self._executor

    def _rebuild(self, error: BaseException) -> None:
        if self._make is None:
            raise RobustExtError(
                f"executor: it broke ({error}); what was finished is kept in the run folder, and the same call with a "
                "new executor goes on there; give a callable that makes one to have it made anew by itself"
            ) from error
        if self._executor is not None:
            end_executor(self._executor)
        self._executor = None

    def close(self) -> None:
        """Cancel what waits; an executor that was made here ends at once with its workers."""
        for future in self._flying:
            future.cancel()
        if self._make is not None and self._executor is not None:
            end_executor(self._executor)
            self._executor = None


def _error(future: Future[Any]) -> BaseException | None:
    if future.cancelled():
        return RuntimeError("it was cancelled by the executor")
    return future.exception()


_CURRENT: ContextVar[Pool | None] = ContextVar("robust_ext_pool", default=None)


def current_pool() -> Pool | None:
    """The pool of the block that this is inside, see :func:`pooling`."""
    return _CURRENT.get()


@contextmanager
def pooling(pool: Pool) -> Iterator[None]:
    """Runs inside the block have their blocks done by the pool, which is closed at the end."""
    token = _CURRENT.set(pool)
    try:
        yield
    finally:
        _CURRENT.reset(token)
        pool.close()
