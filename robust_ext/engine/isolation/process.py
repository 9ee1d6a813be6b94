"""Processes that attacks run in, as the judge handles them."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.popen_forkserver import Popen
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from robust_ext.core.errors import IsolationError, RobustExtError
from robust_ext.core.objects import loaded_files
from robust_ext.engine.isolation.messages import REPLY_BYTES, Packer, unpack
from robust_ext.engine.isolation.serving import serve

# Seconds until a process has begun; seconds it may take to end once its connection is closed.
_BEGINNING, _ENDING = 300.0, 1.0
_SERVER = "robust_ext.engine.isolation.server"
# More rows than any attack sends, and more seconds than it takes.
_MOST = 2**40
_SET_DUMPABLE, _GET_DUMPABLE = 4, 3
_STARTING = threading.Lock()

T = TypeVar("T")


class LostError(Exception):
    """A process sent nothing, or no result: an outcome, ``"ended"`` or ``"timed_out"``, why, and if it was killed."""

    def __init__(self, outcome: str, text: str, *, killed: bool = False) -> None:
        super().__init__(outcome, text)
        self.outcome, self.text, self.killed = outcome, text, killed


class AttackProcess:
    """One process for one attack; ``timeout`` is in seconds for a request, None for none."""

    def __init__(self, *, timeout: float | None) -> None:
        self._timeout, self._sent, self._server = timeout, set[str](), 0
        self._connection, theirs = multiprocessing.Pipe()
        self._process: Popen | None = None
        arguments = theirs, torch.get_num_threads(), _path(), dict(os.environ)
        process = multiprocessing.get_context("forkserver").Process(target=serve, args=arguments, daemon=False)
        try:
            start_server()
            # By its own start, a process is refused to daemons, as the workers of dask are.
            with theirs, without_script(_variables(), arguments=False):
                self._process = _started(process)
            with self._ended_after(_BEGINNING):
                header, _ = unpack(self._connection.recv_bytes(REPLY_BYTES))
        except (OSError, EOFError, LostError) as error:
            self.close()
            words = error.text if isinstance(error, LostError) else f"{type(error).__name__}: {error}"
            raise IsolationError(
                f"a process for an attack could not be started ({words}; see what it printed); repeat the command, or "
                "run attacks in this process (isolate=False, --in-process)"
            ) from error
        self._server = int(header["server"])

    def request(
        self,
        obj: object,
        packer: Packer,
        *,
        read: Callable[[dict[str, Any], dict[str, Tensor]], T],
        room: int = 0,
        progress: Callable[[int, int], None] = lambda forward, backward: None,
    ) -> T:
        """Return the reply to an object, read by ``read``; raises :class:`LostError` without a reply.

        The reply may have ``room`` bytes of tensors. Meanwhile ``progress`` is called with rows sent forward and back.
        """
        content, needed = packer.pickle(obj)
        new = [name for name in needed if name not in self._sent]
        self._sent.update(new)
        with self._ended_after(self._timeout):
            for message in (json.dumps(new).encode(), *(packer.parts[name] for name in new), content):
                self._connection.send_bytes(message)
            while True:
                header, tensors = unpack(self._connection.recv_bytes(REPLY_BYTES + room))
                if "progress" not in header:
                    return read(header, tensors)
                forward, backward = (int(stated(rows)) for rows in header["progress"])
                progress(forward, backward)

    def close(self, *, patience: float = 0.0) -> str:
        """End the process and what it started; return how it ended."""
        process, self._process = self._process, None
        if process is None:
            return "it was stopped before"
        if patience:
            process.wait(patience)
        _kill(process.pid, self._connection)
        self._connection.close()
        # An attack may have stopped the process that reports how it ended.
        if self._server:
            with suppress(OSError):
                os.kill(self._server, signal.SIGCONT)
        status = process.wait(_ENDING)
        if status is None or status == 255:
            return "with the process that it was started from"
        if status >= 0:
            return f"exit status {status}"
        name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
        return f"killed by {name}" + (" (often: out of memory)" if name == "SIGKILL" else "")

    @contextmanager
    def _ended_after(self, seconds: float | None) -> Iterator[None]:
        """Kill the process at the deadline, even while it sends or reads."""
        over, process = threading.Event(), self._process
        assert process is not None

        def end() -> None:
            over.set()
            _kill(process.pid, self._connection)

        timer = threading.Timer(threading.TIMEOUT_MAX if seconds is None else min(seconds, threading.TIMEOUT_MAX), end)
        timer.daemon = True
        timer.start()
        try:
            yield
        except (EOFError, OSError) as error:
            if not over.is_set():
                words = self.close(patience=_ENDING)
                killed = words.startswith(("killed by SIGKILL", "with the process"))
                raise LostError("ended", f"the attack's process ended: {words}", killed=killed) from error
        except (LostError, RobustExtError):
            raise
        except Exception as error:
            raise LostError("ended", f"the attack's process sent what is no result ({str(error)[:200]})") from error
        finally:
            timer.cancel()
        if over.is_set():
            self.close()
            raise LostError("timed_out", f"the attack took more than {seconds:g} seconds and was stopped")


def _started(process: Any) -> Popen:
    """Start a process, later if its server was killed: the system may report that after the connection has failed."""
    for wait in (0.05, 0.2, 1.0, 5.0):
        try:
            return Popen(process)
        except (OSError, EOFError):
            time.sleep(wait)
    return Popen(process)


def _path() -> list[str]:
    """Return the import path of this process and of the files that it loaded."""
    files = (str(Path(str(one.__file__)).parent) for one in loaded_files().values())
    return [*(one or str(Path.cwd()) for one in sys.path), *dict.fromkeys(files)]


def stated(number: Any) -> float:
    """A number from a process, or the most that is believed of it; ValueError for anything else."""
    if not isinstance(number, (int, float)) or not number >= 0:
        raise ValueError(f"a number that is none: {str(number)[:50]}")
    return min(number, _MOST)


def start_server() -> None:
    """Start the server of attacks' processes with this process's imports, without waiting for it."""
    modules = sorted(name for name in sys.modules if name.startswith("robust_ext."))
    # Before Python 3.11 each process imports by itself, as nothing keeps the working directory off its path.
    forkserver.set_forkserver_preload([_SERVER, *modules] if sys.version_info >= (3, 11) else [])
    with without_script(_variables(), arguments=False):
        try:
            forkserver.ensure_running()
        except ChildProcessError:
            # A fork of a process that has such a server gets one of its own.
            forkserver._forkserver.__init__()  # type: ignore[misc]
            forkserver.ensure_running()


def _variables() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(_path()), "PYTHONSAFEPATH": "1"}


@contextmanager
def without_script(variables: Mapping[str, str], *, arguments: bool = True) -> Iterator[None]:
    """Hide this process's script from processes that start inside the block, and set variables for them.

    They would run a script without a ``__main__`` guard again; what they need of it travels by value. Without
    ``arguments`` they do not see those of the script either, which may hold the judge's seed and the run folder.
    """
    with _STARTING:
        before = {name: os.environ.get(name) for name in variables}
        main, argv = sys.modules["__main__"], sys.argv
        sys.modules["__main__"], sys.argv = types.ModuleType("__main__"), argv if arguments else argv[:1]
        os.environ.update(variables)
        try:
            yield
        finally:
            sys.modules["__main__"], sys.argv = main, argv
            for name, value in before.items():
                os.environ.pop(name)
                os.environ.update({} if value is None else {name: value})


def _kill(process: int, connection: Connection) -> None:
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(process, signal.SIGKILL)
    # What the attack started in a group of its own may hold the other end.
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as ours:
        ours.shutdown(socket.SHUT_RDWR)


def close_memory(value: int = 0) -> int:
    """Close this process's memory and open files to others of the same user, on Linux; return what was before."""
    if sys.platform != "linux":
        return value
    system = ctypes.CDLL(None)
    before = int(system.prctl(_GET_DUMPABLE))
    system.prctl(_SET_DUMPABLE, max(value, 0))
    return before


@contextmanager
def unreadable() -> Iterator[None]:
    """Close this process's memory and open files to others inside the block."""
    before = close_memory()
    try:
        yield
    finally:
        close_memory(before)


def hide_arguments() -> None:
    """Blank the arguments that other processes see of this one (``/proc/PID/cmdline``), on Linux.

    The judge's seed and the run folder may be among them.
    """
    libc = ctypes.CDLL(None)
    if sys.platform != "linux" or not hasattr(libc, "program_invocation_name"):
        return
    shown = Path("/proc/self/cmdline").read_bytes()
    program = sys.orig_argv[: max(1, len(sys.orig_argv) - len(sys.argv) + 1)]
    first = ctypes.c_void_p.in_dll(libc, "program_invocation_name").value
    kept = sum(len(os.fsencode(one)) + 1 for one in program)
    if first is not None and ctypes.string_at(first, len(shown)) == shown:
        ctypes.memset(first + kept, 0, max(0, len(shown) - kept))
