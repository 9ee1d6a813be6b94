"""Workers that are jobs of Slurm: submitit submits them, and each then computes one call after another.

A job of its own for every call would begin with the queue and with seconds of imports, and would have to be sent the
network each time. The jobs connect to this process instead, and show each other that they know a key, which lies in the
jobs' folder (readable for its owner alone). What is sent is pickled; without the key nothing is read.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from queue import SimpleQueue
from subprocess import CalledProcessError
from typing import Any, TypeVar

import cloudpickle

from robust_ext.core.errors import InvalidArgumentError, RobustExtError
from robust_ext.engine.executors.cluster import ClusterExecutor, WorkerLostError, imported

T = TypeVar("T")

_JOBS = 8
_MINUTES = 24 * 60
_LOOK = 1.0  # Seconds between looks at the jobs


class SlurmExecutor(ClusterExecutor):
    """Calls on jobs of one core each; a job that ends is replaced.

    Other options of ``sbatch`` are stated by its own variables, as in ``SBATCH_ACCOUNT`` and ``SBATCH_TIMELIMIT``;
    these go before the 24 hours that are the default here.

    Args:
        folder: Where jobs leave their files.
        partition: Of Slurm; None for its default.
        workers: The number of jobs, 8 by default.
        gpus: Whether each has a GPU.
        cluster: What submitit calls the kind of cluster; ``"local"`` is made of processes of this machine.

    Raises:
        InvalidArgumentError: There is no Slurm here, or it refuses the jobs.
        MissingDependencyError: ``submitit`` is not installed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        partition: str | None = None,
        workers: int | None = None,
        gpus: bool = False,
        cluster: str = "slurm",
    ) -> None:
        super().__init__()
        submitit = imported("submitit", extra="slurm")
        self._text = "slurm" if partition is None else f"slurm:{partition}"
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        try:
            self._submitter = submitit.AutoExecutor(folder, cluster=cluster)
        except RuntimeError as error:
            raise InvalidArgumentError("executor", self._text, f"a machine with Slurm's commands ({error})") from error
        self._submitter.update_parameters(
            name="robust-ext",
            timeout_min=_MINUTES,
            cpus_per_task=1,
            gpus_per_node=int(gpus) or None,
            slurm_partition=partition,
        )
        self._workers = workers or _JOBS
        self._key = secrets.token_bytes(32)
        self._listener = Listener(("", 0), backlog=self._workers)
        self._calls: SimpleQueue[tuple[Future[Any], bytes] | None] = SimpleQueue()
        self._closed = threading.Event()
        self._fruitless = 0  # Jobs that ended since one began to work
        self._failure: RobustExtError | None = None
        self._jobs = self._submitted(self._workers)
        for work in (self._accept, self._watch):
            threading.Thread(target=work, daemon=True).start()

    @property
    def workers(self) -> int:
        """How many calls run at a time, once all jobs do."""
        return self._workers

    def begin(
        self, function: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Future[T], Callable[[], object]]:
        """A call for the next job that is free."""
        if self._failure is not None:
            raise self._failure
        future: Future[T] = Future()
        self._calls.put((future, cloudpickle.dumps((function, args, kwargs))))
        return future, future.cancel

    def close(self) -> None:
        """End all jobs."""
        self._closed.set()
        self._calls.put(None)
        for job in self._jobs:
            job.cancel(check=False)
        # The thread that accepts waits for a connection.
        with contextlib.suppress(OSError):
            Client(("localhost", self._listener.address[1])).close()
        self._listener.close()

    def _submitted(self, count: int) -> list[Any]:
        address = (socket.gethostname(), self._listener.address[1])
        try:
            with self._submitter.batch():
                return [self._submitter.submit(_serve, address, self._key) for _ in range(count)]
        except CalledProcessError as error:
            raise InvalidArgumentError("executor", self._text, f"jobs that Slurm accepts ({error.stderr})") from error

    def _accept(self) -> None:
        while not self._closed.is_set():
            connection = self._listener.accept()
            threading.Thread(target=self._drive, args=(connection,), daemon=True).start()

    def _drive(self, connection: Connection) -> None:
        """Send calls to one job, until it ends or there are no more."""
        with connection, contextlib.suppress(AuthenticationError, EOFError, OSError):
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            self._fruitless = 0
            while (call := self._calls.get()) is not None:
                future, content = call
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    connection.send_bytes(content)
                    value, error = cloudpickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    future.set_exception(WorkerLostError("the job that ran the call ended"))
                    return
                except Exception as unreadable:
                    value, error = None, unreadable
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(error)
            self._calls.put(None)

    def _watch(self) -> None:
        """Replace jobs that end; where none begins to work, every call raises that with what one wrote."""
        while not self._closed.wait(_LOOK):
            for job in [job for job in self._jobs if job.done()]:
                self._jobs.remove(job)
                self._fruitless += 1
                try:
                    if self._fruitless > self._workers:
                        wrote = ["nothing", *str(job.stderr() or "").strip().splitlines()][-1]
                        files = f"see their files in {self._folder}"
                        raise RobustExtError(f"{self._text}: jobs end before they begin to work ({wrote}); {files}")
                    self._jobs += self._submitted(1)
                except RobustExtError as error:
                    self._failure = error
            while self._failure is not None and not self._calls.empty():
                call = self._calls.get()
                if call is not None and call[0].set_running_or_notify_cancel():
                    call[0].set_exception(self._failure)


def _serve(address: tuple[str, int], key: bytes) -> None:
    """Compute what comes from this address until it closes; for the job."""
    with Client(address, authkey=key) as connection, contextlib.suppress(EOFError):
        while True:
            content = connection.recv_bytes()
            try:
                function, args, kwargs = cloudpickle.loads(content)
                reply = cloudpickle.dumps((function(*args, **kwargs), None))
            except Exception as error:
                reply = cloudpickle.dumps((None, error))
            connection.send_bytes(reply)
