"""Every executor keeps what :mod:`concurrent.futures` promises, also for calls whose worker dies."""

import math
import os
import subprocess
import sys
import time
from concurrent.futures import BrokenExecutor, CancelledError, Executor, ProcessPoolExecutor, as_completed, wait
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from robust_ext.core.errors import InvalidArgumentError, MissingDependencyError
from robust_ext.engine.executors import WorkerLostError, make_executor, workers_of
from robust_ext.engine.executors.local import cores
from robust_ext.engine.executors.slurm import SlurmExecutor

PACKAGES = {"dask": "distributed", "ray": "ray", "slurm": "submitit"}


class LocalSlurm(SlurmExecutor):
    """Jobs that are processes of this machine, as submitit has them for tests."""

    def __init__(self, folder):
        super().__init__(folder, workers=2, cluster="local")

    def close(self):
        super().close()
        while not all(job.done() for job in self._jobs):
            time.sleep(0.05)


def factory(name, folder):
    """What makes the executor of this name with two workers, on this machine."""
    if name == "local":
        return make_executor("local:2")
    pytest.importorskip(PACKAGES[name])
    if name == "slurm":
        return partial(LocalSlurm, folder / "slurm")
    return make_executor(name, workers=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["local", "dask", "ray", "slurm"])
def test_an_executor(name, tmp_path):
    executor = factory(name, tmp_path)()
    assert isinstance(executor, Executor)
    assert workers_of(executor) == 2
    # Results, in any order; a call is no other one with the same arguments.
    asked = {executor.submit(pow, n, exp=2): n for n in range(20)}
    assert {asked[one]: one.result() for one in as_completed(asked)} == {n: n * n for n in range(20)}
    assert executor.submit(time.perf_counter_ns).result() != executor.submit(time.perf_counter_ns).result()
    # An exception of the call, with its own type and text.
    with pytest.raises(ValueError, match=r"math domain error|nonnegative"):
        executor.submit(math.sqrt, -1).result()
    # Other processes, of one thread each.
    sleeping = [executor.submit(time.sleep, 0.2) for _ in range(2)]
    pids = {one.result() for one in [executor.submit(os.getpid) for _ in range(20)]}
    assert os.getpid() not in pids
    assert executor.submit(os.getenv, "OMP_NUM_THREADS").result() == "1"
    wait(sleeping)
    # A call that was cancelled; one that waits behind others runs no more.
    others = [executor.submit(time.sleep, 0.5) for _ in range(2)]
    cancelled = executor.submit(open, tmp_path / "written", "w")
    for _ in range(4):
        others.append(executor.submit(time.sleep, 0))
    if cancelled.cancel():
        with pytest.raises(CancelledError):
            cancelled.result()
    wait(others)
    # A worker that dies.
    with pytest.raises(BrokenExecutor if name == "local" else WorkerLostError):
        executor.submit(os._exit, 1).result()
    if name == "local":
        executor.shutdown()
        return
    assert executor.submit(pow, 2, 3).result(timeout=60) == 8
    # At an end that does not wait, calls that run end too.
    pid = executor.submit(os.getpid).result()
    running = [executor.submit(time.sleep, 600) for _ in range(3)]
    begun = time.perf_counter()
    executor.shutdown(wait=False, cancel_futures=True)
    assert time.perf_counter() - begun < 30
    for one in running:
        with pytest.raises((CancelledError, BrokenExecutor)):
            one.result(timeout=30)
    assert gone(pid)
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(pow, 2, 3)


def gone(pid, seconds=30.0):
    """Whether a process ends within these seconds."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


# No __main__ guard: a worker does not run the script again.
KILLED = """
import os, time
from robust_ext.engine.executors import make_executor
executor = make_executor("local:1")()
print(executor.submit(os.getpid).result(), executor.submit(os.getenv, "OMP_NUM_THREADS").result(), flush=True)
executor.submit(time.sleep, 600)
os.kill(os.getpid(), 9)
"""


@pytest.mark.exhaustive
def test_workers_end_with_a_process_that_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    pid, threads = done.stdout.split()
    assert done.returncode == -9
    assert int(threads) == cores()
    assert gone(int(pid))


def test_what_workers_are_counted_as():
    assert workers_of(make_executor("local", workers=3)()) == 3
    assert workers_of(make_executor("local", devices=["cpu", "cpu"])()) == 2
    assert workers_of(make_executor("local")()) == cores()
    assert workers_of(ProcessPoolExecutor(4)) == 4
    # Those of executors that others write.
    assert workers_of(SimpleNamespace(max_workers=5)) == 5
    assert workers_of(SimpleNamespace(num_workers=0)) == 1
    assert workers_of(SimpleNamespace(_client=SimpleNamespace(ncores=lambda: {"tcp://a": 1, "tcp://b": 1}))) == 2
    assert workers_of(SimpleNamespace()) == cores()


REFUSED = {
    "locale": ({}, "executor: got locale, expected local, local:N, dask.*did you mean local"),
    "local:": ({}, "executor: got local:, expected local, local:N"),
    "local:0": ({}, "local:N with a number of workers from 1"),
    "local:two": ({}, "local:N with a number of workers from 1"),
    "local:2": ({"workers": 3}, "as 3 workers .--jobs. are stated besides"),
    "local": ({"workers": 0}, "workers: got 0"),
    "dask:tcp://127.0.0.1:1": ({"devices": ["cuda:1"]}, "devices: got cuda:1, expected devices without numbers"),
    "slurm": ({}, "a folder that all nodes share"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused(text):
    keywords, words = REFUSED[text]
    kind = text.partition(":")[0]
    missing = kind in PACKAGES and find_spec(PACKAGES[kind]) is None
    if missing:
        words = rf'pip install "robust-ext\[{kind}\]"'
    with pytest.raises(MissingDependencyError if missing else InvalidArgumentError, match=words):
        make_executor(text, **keywords)


@pytest.mark.skipif(find_spec("distributed") is None, reason="distributed is not installed")
def test_a_scheduler_that_is_not_there(monkeypatch):
    monkeypatch.setattr("robust_ext.engine.executors.dask._PATIENCE", 0.2)
    with pytest.raises(InvalidArgumentError, match="the address of a Dask scheduler"):
        make_executor("dask:tcp://127.0.0.1:9")()


@pytest.mark.skipif(find_spec("submitit") is None, reason="submitit is not installed")
def test_a_machine_without_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InvalidArgumentError, match="a machine with Slurm's commands"):
        make_executor("slurm", folder=tmp_path / "jobs")()
