"""Processes that attacks run in, as the judge handles them."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from robust_ext.core.validation import check_integer
from robust_ext.engine.isolation.forking import ZygoteError, zygote
from robust_ext.engine.isolation.messages import Pickled, receive_header, send_header

# Seconds a process may take to end once its connection is closed.
_PATIENCE = 1.0
# Seconds in which a message has to pass, once its first byte is there.
_TRANSFER = 600.0
_SET_DUMPABLE, _GET_DUMPABLE = 4, 3


class LostError(Exception):
    """A process sent nothing, or no result: an outcome, ``"ended"`` or ``"timed_out"``, why, and if it was killed."""

    def __init__(self, outcome: str, text: str, *, killed: bool = False) -> None:
        super().__init__(outcome, text)
        self.outcome, self.text, self.killed = outcome, text, killed


class AttackProcess:
    """One process for one attack; ``timeout`` is in seconds, None for none."""

    def __init__(self, *, timeout: float | None) -> None:
        self._zygote = zygote()
        self._timeout = timeout
        self._pickled = Pickled()
        patience = _TRANSFER if timeout is None else max(_PATIENCE, min(timeout, _TRANSFER))
        try:
            self._child, self._connection = self._zygote.fork(patience=patience)
        except ZygoteError:
            # It may have been killed since it was looked at.
            self._zygote = zygote()
            self._child, self._connection = self._zygote.fork(patience=patience)

    def share(self, obj: object) -> None:
        """Send an object once; tasks refer to it."""
        shared = self._pickled.share(obj)
        if shared is not None:
            self._send(shared[1], share=shared[0])

    def request(
        self,
        obj: object,
        *,
        progress: Callable[[int, int], None] | None = None,
        **header: Any,
    ) -> dict[str, Any]:
        """Send an object, and return the header that comes back; raises :class:`LostError` where none does.

        Meanwhile ``progress`` is called with rows sent forward and backward.
        """
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        self._send(self._pickled.dumps(obj), **header)
        while True:
            with self.receiving(deadline) as connection:
                found = receive_header(connection)
                if "progress" not in found:
                    return found
                forward, backward = (check_integer("progress", rows, minimum=0) for rows in found["progress"])
            if progress is not None:
                progress(forward, backward)

    @contextmanager
    def receiving(self, deadline: float | None = None, *, waiting: bool = True) -> Iterator[Connection]:
        """The connection, to receive from or (not waiting for anything) to send to.

        :class:`LostError` where the process has ended, hangs or sends nonsense.
        """
        try:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if waiting and not self._connection.poll(left):
                self.close(patience=0.0)
                raise LostError("timed_out", f"the attack took more than {self._timeout:g} seconds and was stopped")
            yield self._connection
        except (EOFError, OSError) as error:
            words = self.close()
            killed = words.startswith(("killed by SIGKILL", "with the process"))
            raise LostError("ended", f"the attack's process ended: {words}", killed=killed) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self.close(patience=0.0)
            raise LostError("ended", f"the attack's process sent what is no result ({error})") from error

    def close(self, *, patience: float = _PATIENCE) -> str:
        """End the process; how it ended, in words."""
        self._connection.close()
        if not self._child:
            return "it was stopped before"
        child, self._child = self._child, 0
        try:
            status = self._zygote.end(child, patience=patience)
        except ZygoteError:
            return "with the process that it was started from"
        if status >= 0:
            return f"exit status {status}"
        name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
        return f"killed by {name}" + (" (often: out of memory)" if name == "SIGKILL" else "")

    def _send(self, content: bytes, **header: Any) -> None:
        with self.receiving(waiting=False) as connection:
            send_header(connection, **header)
            connection.send_bytes(content)


@contextmanager
def unreadable() -> Iterator[None]:
    """This process's memory and open files are closed to other processes of the same user meanwhile, on Linux."""
    if sys.platform != "linux":
        yield
        return
    system = ctypes.CDLL(None)
    before = system.prctl(_GET_DUMPABLE)
    system.prctl(_SET_DUMPABLE, 0)
    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            system.prctl(_SET_DUMPABLE, max(before, 0))
