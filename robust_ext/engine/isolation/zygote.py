"""The process that attacks' processes are forked from: it has imported what they need, and has seen nothing else.

:mod:`robust_ext.engine.isolation.forking` starts it. It serves one judge over the socket whose number is its first
argument, a line of JSON a request, until the judge closes it, and then ends with all that it forked.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

# Between looks at a process that is about to end.
_PATIENCE = 0.005
_SET_DEATH_SIGNAL = 1


def main() -> None:
    """Serve until the judge is gone."""
    # Here, so that an installation in which it cannot be imported is no fault of an attack.
    from robust_ext.engine.isolation.serving import serve

    judge = socket.socket(fileno=int(sys.argv[1]))
    children: set[int] = set()
    # What an attack prints is not the judge's output.
    os.dup2(2, 1)
    received, descriptors = b"", list[int]()
    try:
        while True:
            content, more, _, _ = socket.recv_fds(judge, 2**20, 1)
            if not content:
                return
            received, descriptors = received + content, descriptors + more
            *lines, received = received.split(b"\n")
            for line in lines:
                found = _answer(json.loads(line), descriptors, children, judge, serve)
                judge.sendall(json.dumps(found).encode() + b"\n")
    except ConnectionError:
        return
    finally:
        for child in children:
            _kill(child)


def _answer(
    request: Mapping[str, Any],
    descriptors: list[int],
    children: set[int],
    judge: socket.socket,
    serve: Callable[[Connection], None],
) -> Any:
    if "modules" in request:
        sys.path[:] = request["path"]
        for name in request["modules"]:
            # One that cannot be imported here is missed, if at all, where it is used.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        return None
    if "end" in request:
        children.discard(request["end"])
        return _end(request["end"], request["patience"])
    descriptor = descriptors.pop(0)
    child = os.fork()
    if child == 0:
        judge.close()
        _become_worker(descriptor, request["threads"], serve)
    os.close(descriptor)
    children.add(child)
    return child


def _become_worker(descriptor: int, threads: int, serve: Callable[[Connection], None]) -> None:
    """Serve tasks from this connection, then end; for the forked process."""
    status = 1
    try:
        # A group of its own, so that what an attack starts ends with it, and Ctrl-C reaches the judge alone.
        os.setpgid(0, 0)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
            # Where memory runs out, it is the attack that ends, not its judge.
            with contextlib.suppress(OSError):
                Path("/proc/self/oom_score_adj").write_text("1000")
        torch.set_num_threads(threads)
        serve(Connection(descriptor))
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def _end(child: int, patience: float) -> int:
    """The exit status of a forked process, as ``subprocess`` has it; killed where it does not end in time."""
    deadline = time.monotonic() + patience
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            break
        if time.monotonic() >= deadline:
            _kill(child)
            _, status = os.waitpid(child, 0)
            break
        time.sleep(_PATIENCE)
    # What it started may have outlived it.
    _kill(child)
    return os.waitstatus_to_exitcode(status)


def _kill(child: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(child, signal.SIGKILL)
