"""What a caller gives as an executor, and as devices: checked, made and ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

import torch

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.engine.executors import make_executor

ExecutorLike = Executor | Callable[[], Executor] | str | None
"""What ``executor=`` may be; None is this process."""


def end_executor(executor: Executor) -> None:
    """End an executor with its workers, whatever these do."""
    # Before they are forgotten: a pool of processes would wait for what they work on.
    processes = list((getattr(executor, "_processes", None) or {}).values())
    executor.shutdown(wait=False)
    for process in processes:
        process.terminate()


def factory_of(executor: object, devices: Sequence[str]) -> Callable[[], Executor]:
    """What makes the executor; InvalidArgumentError where it is neither a text nor a callable."""
    if isinstance(executor, str):
        return make_executor(executor, devices=devices)
    if not callable(executor):
        expected = "a concurrent.futures.Executor, a callable that makes one, or a text such as 'local'"
        raise InvalidArgumentError("executor", executor, expected)
    return executor


def check_executor(executor: object) -> Executor:
    """An executor whose workers are processes, as far as it is seen here; else InvalidArgumentError."""
    if not isinstance(executor, Executor):
        expected = "a callable that returns a concurrent.futures.Executor"
        raise InvalidArgumentError("executor", f"a callable that returns {type(executor).__name__}", expected)
    if isinstance(executor, ThreadPoolExecutor):
        expected = "one whose workers are processes, as hooks and global seeds are those of a whole process"
        raise InvalidArgumentError("executor", type(executor).__name__, expected)
    return executor


def check_devices(devices: Sequence[str] | None) -> tuple[str, ...]:
    """Devices as torch names them, which need not be here; InvalidArgumentError where one has another name."""
    if devices is None:
        return ()
    if isinstance(devices, str) or not devices:
        raise InvalidArgumentError("devices", devices, 'a list of devices, as ["cuda:0", "cuda:1"]')
    try:
        # They need not be of this machine.
        return tuple(str(torch.device(one)) for one in devices)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgumentError("devices", devices, f"devices as torch names them ({error})") from error
