"""The attack's side: tasks are received and run, candidates and counts are sent back."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from robust_ext.core.errors import AttackError, DisturbedError, IsolationError, RobustExtError
from robust_ext.core.target import PassCounter
from robust_ext.core.warning import collecting
from robust_ext.engine.identity import tensor_bytes
from robust_ext.engine.isolation.messages import (
    Unpickler,
    describe_error,
    describe_tensor,
    receive_header,
    send_header,
)
from robust_ext.engine.task import Task, run_task

# Seconds between two reports of how many rows were sent through the network.
_INTERVAL = 0.5


def serve(connection: Connection) -> None:
    """Do what the judge sends until it closes the connection."""
    shared: dict[str, Any] = {}
    failure: Exception | None = None
    while True:
        try:
            request = receive_header(connection)
            content = connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            if failure is not None:
                raise failure
            received = Unpickler(content, shared).load()
        except Exception as error:
            failure = error
            if "share" not in request:
                send_header(connection, **describe_error(_unreadable(error)))
            continue
        if "share" in request:
            shared[request["share"]] = received
        elif "task" in request:
            _run(received, connection)
        else:
            _call(received, connection)


def _unreadable(error: Exception) -> RobustExtError:
    if isinstance(error, RobustExtError):
        return error
    return IsolationError(
        f"the attack's process cannot load what it needs ({type(error).__name__}: {error}); define it in a module "
        "that can be imported, or run attacks in this process (isolate=False, --in-process)"
    )


def _run(task: Task, connection: Connection) -> None:
    counter = task.target.counter
    counter.watch = _Progress(connection, counter.snapshot())
    try:
        with collecting() as warned:
            result = run_task(task)
        counter.watch = None
    except DisturbedError as error:
        send_header(connection, lost=str(error)[:20_000])
        return
    except RobustExtError as error:
        if lost := _lost(error.__cause__):
            send_header(connection, lost=lost[:20_000])
        else:
            send_header(connection, **describe_error(error))
        return
    candidates, header = result.candidates, {"seconds": result.seconds, "passes": result.passes}
    if not isinstance(candidates, Tensor):
        text = f"{task.attack.name}: returned {type(candidates).__name__}, expected a tensor of candidates"
        send_header(connection, **describe_error(AttackError(text)))
        return
    tensors = {"candidates": candidates, "witnesses": result.witnesses}
    sent = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    header["warnings"] = [text[:2000] for text, kept in warned.items() if kept][:20]
    trace = result.trace
    if trace is not None:
        header["curve"] = list(trace.curve)
    send_header(connection, **header, **{name: describe_tensor(tensor) for name, tensor in sent.items()})
    for tensor in sent.values():
        if tensor.shape == task.inputs.shape:
            connection.send_bytes(tensor_bytes(tensor))
    if trace is not None:
        connection.send_bytes(tensor_bytes(trace.values))


def _lost(error: BaseException | None) -> str | None:
    """What is to be noted of an error that ended the attack and is not one of its code's; None for any other."""
    if isinstance(error, SystemExit):
        return f"the attack left by SystemExit({error.code!r})"
    memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
    return f"the attack ran out of memory ({error})" if memory else None


def _call(function: Callable[[], Any], connection: Connection) -> None:
    """Send the plain value that a function returns."""
    try:
        send_header(connection, value=function())
    except RobustExtError as error:
        send_header(connection, **describe_error(error))


class _Progress:
    """Reports rows sent forward and backward, now and then."""

    def __init__(self, connection: Connection, before: PassCounter) -> None:
        self._connection, self._before = connection, before
        self._sent = time.monotonic()
        self._lock = threading.Lock()
        self._process = os.getpid()

    def __call__(self, counter: PassCounter) -> None:
        now = time.monotonic()
        # What an attack starts itself has this connection too.
        if now - self._sent < _INTERVAL or os.getpid() != self._process or not self._lock.acquire(blocking=False):
            return
        try:
            self._sent = now
            spent = counter.since(self._before)
            send_header(self._connection, progress=[spent.forward, spent.backward])
        finally:
            self._lock.release()
