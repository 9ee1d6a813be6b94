"""The process that attacks' processes are forked from, as the judge handles it."""

from __future__ import annotations

import atexit
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from robust_ext.core.errors import IsolationError
from robust_ext.core.objects import loaded_files

# Seconds it may take to end once its socket is closed.
_PATIENCE = 1.0
# Seconds that a process may read nothing while something is sent to it, at least: it may be importing libraries.
_SENDING = 120.0
# The path of this process, not the working directory that -m and -c put first: a clone there may be another version.
_START = f"import sys; sys.path[:] = sys.argv[2:]; from {__package__}.zygote import main; main()"


class ZygoteError(IsolationError):
    """The process that attacks are started from is gone."""


class Zygote:
    """The process that others are forked from, see :mod:`robust_ext.engine.isolation.zygote`."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            path = [one or str(Path.cwd()) for one in sys.path]
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", _START, str(theirs.fileno()), *path],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._lines = self._socket.makefile("rb")
        self._imported: set[str] = set()
        self._path: list[str] = []
        self._unread = 0  # Replies that nobody waited for

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def prepare(self) -> None:
        """Let it import what this process has of the project, without waiting for it."""
        wanted = {name for name in sys.modules if name.startswith("robust_ext.")}
        path = [*sys.path, *dict.fromkeys(str(Path(str(one.__file__)).parent) for one in loaded_files().values())]
        if wanted - self._imported or path != self._path:
            self._send({"path": path, "modules": sorted(wanted - self._imported)})
            self._imported, self._path = self._imported | wanted, path
            self._unread += 1

    def fork(self, *, patience: float) -> tuple[int, Connection]:
        """A process and the connection to it; a message from it has to pass in so many seconds."""
        self.prepare()
        ours, theirs = socket.socketpair()
        # A large network takes its time to be read; what comes back is small, and there once it begins to come.
        for option, seconds in ((socket.SO_RCVTIMEO, patience), (socket.SO_SNDTIMEO, max(patience, _SENDING))):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), 0))
        try:
            with theirs:
                child = self._request({"threads": torch.get_num_threads()}, theirs.fileno())
        except ZygoteError:
            ours.close()
            raise
        return child, Connection(ours.detach())

    def end(self, child: int, *, patience: float) -> int:
        """The exit status of a process, which is killed where it does not end by itself in time."""
        status: int = self._request({"end": child, "patience": patience})
        return status

    def close(self) -> None:
        """End it and all that it forked."""
        self._lines.close()
        self._socket.close()
        try:
            self._process.wait(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _request(self, request: dict[str, Any], *descriptors: int) -> Any:
        self._send(request, *descriptors)
        self._unread += 1
        with self._guarded():
            while self._unread:
                found = json.loads(self._lines.readline())
                self._unread -= 1
        return found

    def _send(self, request: dict[str, Any], *descriptors: int) -> None:
        with self._guarded():
            line = json.dumps(request).encode() + b"\n"
            if descriptors:
                socket.send_fds(self._socket, [line], descriptors)
            else:
                self._socket.sendall(line)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            raise ZygoteError(
                f"the process that attacks are started from ended (status {self._process.poll()}: {error}); repeat the "
                "command, or run attacks in this process (isolate=False, --in-process)"
            ) from error


@cache
def _zygotes() -> dict[int, Zygote]:
    found: dict[int, Zygote] = {}

    def close() -> None:
        # A forked process has that of another.
        if os.getpid() in found:
            found[os.getpid()].close()

    atexit.register(close)
    return found


def zygote() -> Zygote:
    """That of this process, started where there is none."""
    found = _zygotes()
    process = os.getpid()
    if process in found and not found[process].alive:
        found.pop(process).close()
    if process not in found:
        found[process] = Zygote()
    return found[process]
