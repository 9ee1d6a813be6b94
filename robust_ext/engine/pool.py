"""Blocks of runs on the workers of any ``concurrent.futures.Executor``; this process decides, and writes."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from robust_ext.core.cost import Spent
from robust_ext.core.errors import InvalidArgumentError, OutOfTimeError, RobustExtError
from robust_ext.core.heap import trimmed
from robust_ext.core.warning import issue
from robust_ext.engine.context import current_context, is_over
from robust_ext.engine.executors import ExecutorLike, check_devices, end_executor, make_executor, workers_of
from robust_ext.engine.isolation.messages import as_error
from robust_ext.engine.phases import phases_of
from robust_ext.engine.progress import Progress, phase
from robust_ext.engine.remote import Call, Packer, run_block, run_call
from robust_ext.engine.run import Outcome, Run, end, finish, keep, tell
from robust_ext.engine.store import Store
from robust_ext.engine.task import Task, TaskResult, verified

# Calls a worker has at a time: the one that it works on, and the next.
_CALLS = 2
# How many calls may end their worker while none returns anything.
_HOPELESS = 3
# Rows of the samples that every worker has, as probes of the network.
_PROBES = 4
# Seconds between two looks at the deadline and at what is shown; blocks that an error lists.
_LOOK, _LISTED = 0.5, 20

R = TypeVar("R", bound=Run)
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
        self._given = isinstance(executor, Executor)
        self._executor: Executor | None = _check_processes(executor) if self._given else None
        if not (self._given or isinstance(executor, str) or callable(executor)):
            expected = "a concurrent.futures.Executor, a callable that makes one, or a text such as 'local'"
            raise InvalidArgumentError("executor", executor, expected)
        self._make: Any = make_executor(executor, devices=self._devices) if isinstance(executor, str) else executor
        self._flying: dict[Future[Any], _Job] = {}
        self._alone: list[_Job] = []  # That failed once; the first runs, or is the next to run
        self._returned = self._lost = 0

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self._devices) if len(self._devices) > 1 else workers_of(self._started())

    @property
    def room(self) -> int:
        """How many more calls are to be submitted."""
        if self._alone:
            return 0
        return self.workers * (1 if len(self._devices) > 1 else _CALLS) - len(self._flying)

    @property
    def busy(self) -> bool:
        """Whether there are calls that have not ended."""
        return bool(self._flying or self._alone)

    def submit(self, key: Any, call: Call, parts: Mapping[str, bytes]) -> None:
        """Have a call run, with these parts for workers that lack them."""
        self._start(_Job(key, call, parts))

    def wait(self, timeout: float | None = None) -> list[tuple[Any, Reply]]:
        """Return keys and replies of calls that ended; wait for one, or for so many seconds.

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
        while left is not None or self.busy:
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
        """Have a call run again, or return why it is lost."""
        if isinstance(error, BrokenExecutor) and job.executor is self._executor:
            if self._given:
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
        if self._executor is not None and not self._given:
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
    """Have the blocks of runs inside this one done by the pool, which is closed at the end."""
    token = _CURRENT.set(pool)
    try:
        yield
    finally:
        _CURRENT.reset(token)
        pool.close()


def call_all(calls: Sequence[FunctionCall], *, place: torch.device) -> Iterator[tuple[int, Any]]:
    """Yield the index and value of each call as they end, from workers of the current pool; here where there is none.

    ``place`` is where their tensors lie. RobustExtError: one of them raised it, or its worker ended.
    """
    pool, packer = current_pool(), Packer()
    if pool is None or len(calls) < 2:
        for number, (function, arguments) in enumerate(calls):
            with trimmed():
                value = function(**arguments)
            yield number, value
        return
    packed = (packer.pack(function, origin=place.type, **arguments) for function, arguments in calls)
    for number, reply in pool.run(enumerate(packed), packer.parts):
        yield number, value_of(reply, "executor")


def value_of(reply: Reply, title: str) -> Any:
    """Return the value of a reply, and warn of what its worker warned of; RobustExtError where there is none."""
    issue(reply.get("warnings", {}))
    if "error" in reply:
        raise as_error(reply)
    if "raised" in reply:
        raise RobustExtError(f"{title}: a worker raised\n{reply['raised']}")
    if "lost" in reply:
        raise RobustExtError(f"{title}: a worker ended ({reply['lost']}); see what it printed")
    return reply["value"]


class _Shared(Generic[R]):
    """A run whose blocks workers share. Blocks before ``head`` are done with.

    Where blocks are ordered, those after ``head`` are submitted with what is known of their needs. One that came back
    counts once all before it do, and runs again where these changed its needs: the records are those of a run here.
    """

    def __init__(self, run: R, store: Store, bar: Progress | None) -> None:
        self.run, self.store, self.bar = run, store, bar
        self.outcome: Outcome[R] | None = None
        self.closed = False
        self.head = self.told = 0
        self.lost: dict[int, str] = {}
        self._next = self._flying = 0
        self._again: list[int] = []
        self._stored: set[int] = set()  # By this call
        self._back: dict[int, tuple[Mapping[str, Any], Reply]] = {}  # By index: needs, and what came of them

    def begin(self, packer: Packer) -> Generator[Task, TaskResult, None]:
        """Do what comes before the blocks, and make the parts that workers are sent."""
        phase(self.run.title)
        try:
            with self.run.session():
                yield from verified(self.run.prepare(self.store))
            samples = [packer.share(one, rows=_PROBES) for one in self.run.samples()]
            self._parts = (*samples, *map(packer.share, self.run.common()), packer.share(self.run))
        except RobustExtError as refused:
            self._close(end(self.run, self.store, refused))
        self.advance()

    def submit(self, pool: Pool, packer: Packer) -> bool:
        """Submit the next block; return whether there was one."""
        blocks = self.run.blocks
        last = min(len(blocks), self.head + pool.workers + 1) if self.run.ordered else len(blocks)
        while self._next < last and self.store.holds(blocks[self._next]):
            self._next += 1
        if self.closed or not (self._again or self._next < last):
            return False
        if not self._again:
            self._again.append(self._next)
            self._next += 1
        index, deadline = self._again.pop(), current_context().deadline
        needs = self.run.needs(blocks[index], self.store)
        call = packer.pack(
            run_block,
            origin=self.run.place().type,
            parts=self._parts,
            run=self.run,
            rows=blocks[index],
            needs=needs,
            isolate=pool.isolate,
            attack_timeout=pool.attack_timeout,
            seconds=None if deadline is None else deadline - time.monotonic(),
        )
        pool.submit((self, index, _plain(needs)), call, packer.parts)
        self._flying += 1
        return True

    def take(self, index: int, needs: Mapping[str, Any], reply: Reply) -> None:
        """Store the block that came back, or set it aside until those before it are stored."""
        self._flying -= 1
        if self.closed:
            return
        if "lost" in reply:
            self.lost[index] = reply["lost"]
        elif self.run.ordered:
            self._back[index] = needs, reply
        else:
            self._store(index, reply)

    def advance(self) -> None:
        """Go past the blocks that are done with, and close the run where no more are needed."""
        blocks, ordered, before = self.run.blocks, self.run.ordered, self.head
        if not self.closed and is_over():
            self._close(end(self.run, self.store, OutOfTimeError("the time that was given is over")))
        while not self.closed and self.head < len(blocks):
            rows = blocks[self.head]
            if ordered and self.run.decided(self.store):
                self._close(finish(self.run, self.store))
            elif self.store.holds(rows) or (self.head in self.lost and not ordered):
                self.head += 1
            elif self.head not in self._back:
                break
            else:
                needs, reply = self._back.pop(self.head)
                if needs != _plain(self.run.needs(rows, self.store)):
                    self._again.append(self.head)
                    break
                self._store(self.head, reply)
        stuck = ordered and self.lost and not self._flying and not self._again
        if not self.closed and (stuck or self.head == len(blocks)):
            self._close(None if self.lost else finish(self.run, self.store))
        if self.bar is not None:
            for index in range(before, self.head):
                self.bar.advance(len(blocks[index]), kept=index not in self._stored)

    def tell(self) -> bool:
        """Call back with the records of blocks that are done with; return whether no more are to come."""
        for index in range(self.told, self.head):
            if index not in self.lost:
                tell(self.run, self.run.blocks[index], self.store)
        self.told = self.head
        return self.closed

    def _store(self, index: int, reply: Reply) -> None:
        if "error" in reply:
            issue(reply["warnings"])
            self._close(end(self.run, self.store, as_error(reply)))
            return
        block = value_of(reply, self.run.title or self.run.kind)
        keep(block, self.store)
        self._stored.add(index)
        if self.bar is not None:
            spent = Spent.total(spent for *_, spent in phases_of(block.timing, ""))
            self.bar.count(spent.forward, spent.backward)

    def _close(self, outcome: Outcome[R] | None) -> None:
        self.outcome, self.closed = outcome, True
        self.store.close()


def _plain(needs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what earlier blocks decided of what a block needs, as it is now."""
    return {name: copy.deepcopy(value) for name, value in needs.items() if not isinstance(value, Tensor)}


def run_on(
    pool: Pool, runs: Sequence[R], opened: Callable[[R], Store], bar: Progress | None
) -> Generator[Task, TaskResult, dict[str, Outcome[R]]]:
    """Have a pool do what is missing of runs, in order; return outcomes by key.

    What comes before the blocks of a run is done here: its tasks are those of this generator. RobustExtError where
    blocks are lost, once all others are kept.
    """
    waiting, shared, told, packer = deque(runs), list[_Shared[R]](), 0, Packer()
    try:
        while waiting or any(not one.closed for one in shared):
            while pool.room > 0:
                if any(one.submit(pool, packer) for one in shared):
                    continue
                if not waiting:
                    break
                run = waiting.popleft()
                shared.append(_Shared(run, opened(run), bar))
                yield from shared[-1].begin(packer)
            for (one, index, needs), reply in pool.wait(_LOOK) if pool.busy else ():
                one.take(index, needs, reply)
            for one in shared:
                if not one.closed:
                    one.advance()
            while told < len(shared) and shared[told].tell():
                told += 1
    finally:
        for one in shared:
            one.store.close()
    _check_lost(shared)
    return {one.run.key: one.outcome for one in shared if one.outcome is not None}


def _check_lost(shared: Sequence[_Shared[Any]]) -> None:
    """Raise RobustExtError where blocks are lost."""
    lost = [(one.run, one.run.blocks[index], text) for one in shared for index, text in sorted(one.lost.items())]
    if lost:
        samples = "; ".join(
            f"{run.title or run.kind}, samples {rows[0]} to {rows[-1]} ({text})" for run, rows, text in lost[:_LISTED]
        )
        raise RobustExtError(
            f"executor: {len(lost)} blocks ended their worker when they ran alone: {samples}; all others are done, "
            "and kept where there is a run folder; the same call tries these again, which a smaller batch_size may help"
        )
