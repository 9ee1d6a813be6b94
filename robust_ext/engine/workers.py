"""Where attacks run: in this process, each in a process of its own, or on the workers of an executor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.engine.executors import ExecutorLike
from robust_ext.engine.isolation.worker import CAN_ISOLATE, IsolatedWorker, isolating
from robust_ext.engine.pool import Pool, pooling
from robust_ext.engine.task import Worker, run_task

_CURRENT: ContextVar[IsolatedWorker | None] = ContextVar("robust_ext_worker", default=None)


@contextmanager
def attack_worker(
    *,
    isolate: bool,
    attack_timeout: float | None = None,
    executor: ExecutorLike = None,
    devices: Sequence[str] | None = None,
) -> Iterator[Worker]:
    """The worker that runs attacks inside the block: in this process, or each in one of its own.

    With an executor, runs inside the block find a pool that has such a worker in each of its processes. Inside another
    such block it is that block's worker, and its pool where there is no other.

    Args:
        isolate: Whether attacks get processes of their own.
        attack_timeout: Seconds that an attack may take for a batch, above 0; None for any time.
        executor: What runs blocks, see :class:`Pool`; None for this process.
        devices: The devices that its workers use, one a block at a time; ``executor`` is then ``"local"`` by default.

    Raises:
        InvalidArgumentError: There is a timeout without isolation, this system cannot fork, or the executor is none.
    """
    if devices is not None and executor is None:
        executor = "local"
    with _attacking(isolate=isolate, attack_timeout=attack_timeout) as worker:
        if executor is None:
            yield worker
            return
        timeout = worker.timeout if isinstance(worker, IsolatedWorker) else None
        pool = Pool(executor, devices=devices, isolate=worker is not run_task, attack_timeout=timeout)
        with pooling(pool):
            yield worker


@contextmanager
def _attacking(*, isolate: bool, attack_timeout: float | None) -> Iterator[Worker]:
    current = _CURRENT.get()
    if current is not None:
        with current.evaluation():
            yield current
        return
    if not isolate:
        if attack_timeout is not None:
            expected = "None, or attacks in processes of their own (isolate=True), which alone can be stopped"
            raise InvalidArgumentError("attack_timeout", attack_timeout, expected)
        yield run_task
        return
    if not CAN_ISOLATE:
        raise InvalidArgumentError("isolate", True, "False on a system that has no process to fork others from")
    worker = IsolatedWorker(timeout=attack_timeout)
    token = _CURRENT.set(worker)
    try:
        with isolating(worker):
            yield worker
    finally:
        _CURRENT.reset(token)
        worker.close()
