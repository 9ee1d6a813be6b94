"""The attack's side: requests are received and run, candidates and counts are sent back."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import torch

from robust_ext.core.errors import DisturbedError, IsolationError, RobustExtError, collecting
from robust_ext.core.machine import FreeCores
from robust_ext.core.target import PassCounter
from robust_ext.engine.isolation.messages import LONGEST, Unpickler, describe_error, pack
from robust_ext.engine.task import Task, run_task
from robust_ext.engine.verify import check_candidates

# Seconds between two reports of how many rows were sent through the network.
_INTERVAL = 0.5
# Numbers of open files of a process that has just begun.
_FILES = 256


def serve(connection: Connection, threads: int, path: Sequence[str], environment: Mapping[str, str]) -> None:
    """Do what the judge sends until it closes the connection."""
    import_module("robust_ext.engine.isolation.server")
    # A group of its own, so that what an attack starts ends with it, and Ctrl-C reaches the judge alone.
    os.setpgid(0, 0)
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    multiprocessing.current_process().authkey = os.urandom(32)
    judge = multiprocessing.parent_process()
    assert judge is not None

    def end() -> None:
        judge.join()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()
    _take_away_files(besides={connection.fileno(), judge.sentinel})
    connection.send_bytes(pack({"server": os.getppid()}))
    parts: dict[str, Any] = {}
    cores = FreeCores(threads)
    while True:
        try:
            names = json.loads(connection.recv_bytes())
            contents = [connection.recv_bytes() for _ in (*names, "request")]
        except (EOFError, OSError):
            return
        try:
            for name, content in zip(names, contents, strict=False):
                parts[name] = Unpickler(content, parts).load()
            request = Unpickler(contents[-1], parts).load()
        except Exception as error:
            text = (
                f"the attack's process cannot load what it needs ({type(error).__name__}: {error}); define it in a "
                "module that can be imported, or run attacks in this process (isolate=False, --in-process)"
            )
            reply = pack(describe_error(error if isinstance(error, RobustExtError) else IsolationError(text)))
        else:
            # Nor does the judge's work while this process waits.
            cores.lap(own=False)
            reply = _reply(request, connection)
            cores.lap()
        connection.send_bytes(reply)


def _reply(request: Task | Callable[[], Any], connection: Connection) -> bytes:
    """Candidates of a task, or what was ``lost``; the plain value of a function."""
    try:
        return _attack(request, connection) if isinstance(request, Task) else pack({"value": request()})
    except DisturbedError as error:
        return pack({"lost": str(error)[:LONGEST]})
    except RobustExtError as error:
        lost = _lost(error.__cause__) if isinstance(request, Task) else None
        return pack({"lost": lost[:LONGEST]} if lost else describe_error(error))


def _take_away_files(besides: set[int]) -> None:
    """Use no files that multiprocessing shares among the judge and all of these processes."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in {*range(3, _FILES)}.difference(besides, {nothing}):
        with suppress(OSError):
            os.fstat(descriptor)
            os.dup2(nothing, descriptor)


def _attack(task: Task, connection: Connection) -> bytes:
    counter = task.target.counter
    counter.watch = _reporting(connection, counter)
    with collecting() as warned:
        result = run_task(task)
    counter.watch = None
    candidates = check_candidates(result.candidates, task.inputs, attack=task.attack.name)
    tensors, curve = {"candidates": candidates, "witnesses": result.witnesses}, None
    if result.trace is not None:
        tensors["trace"], curve = result.trace.values, list(result.trace.curve)
    header = {
        "seconds": result.seconds,
        "passes": [result.passes["forward"], result.passes["backward"]],
        "warnings": [text for text, kept in warned.items() if kept],
        "curve": curve,
    }
    return pack(header, {name: tensor for name, tensor in tensors.items() if tensor is not None})


def _lost(error: BaseException | None) -> str | None:
    """Return the note for an error that ended the attack from outside its code; None for any other."""
    if isinstance(error, SystemExit):
        return f"the attack left by SystemExit({error.code!r})"
    memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
    return f"the attack ran out of memory ({error})" if memory else None


def _reporting(connection: Connection, counter: PassCounter) -> Callable[[PassCounter], None]:
    """Return what reports now and then how many rows were sent forward and backward."""
    before, process, sent = counter.snapshot(), os.getpid(), time.monotonic()

    def report(counter: PassCounter) -> None:
        nonlocal sent
        # What an attack starts itself has this connection too.
        if time.monotonic() - sent >= _INTERVAL and os.getpid() == process:
            sent = time.monotonic()
            spent = counter.since(before)
            connection.send_bytes(pack({"progress": [spent.forward, spent.backward]}))

    return report
