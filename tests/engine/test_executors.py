"""Every executor keeps what :mod:`concurrent.futures` promises, also for calls whose worker dies."""

import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import BrokenExecutor, CancelledError, Executor, ProcessPoolExecutor, as_completed, wait
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import robust_ext
from robust_ext.core.errors import InvalidArgumentError, MissingDependencyError, RobustExtError
from robust_ext.engine.executors import WorkerLostError, make_executor, workers_of
from robust_ext.engine.executors.local import cores
from robust_ext.engine.executors.slurm import SlurmExecutor
from tests.evaluations.small import INPUTS, LABELS, LINF, NETWORK, essence, sign_step

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
def test_an_executor(name, tmp_path, monkeypatch):
    # Workers import this file.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    make = factory(name, tmp_path)
    executor = make()
    assert isinstance(executor, Executor)
    assert workers_of(executor) == 2
    check_calls(executor, tmp_path)
    with pytest.raises(BrokenExecutor if name == "local" else WorkerLostError):
        executor.submit(os._exit, 1).result()
    if name == "local":
        executor.shutdown()
        check_records(make, tmp_path)
        return
    assert executor.submit(pow, 2, 3).result(timeout=60) == 8
    check_records(executor, tmp_path)
    check_end(executor)


def check_calls(executor, folder):
    """Results in any order, errors, other processes, calls that are cancelled."""
    asked = {executor.submit(pow, n, exp=2): n for n in range(20)}
    assert {asked[one]: one.result() for one in as_completed(asked)} == {n: n * n for n in range(20)}
    # A call is no other one with the same arguments.
    assert executor.submit(time.perf_counter_ns).result() != executor.submit(time.perf_counter_ns).result()
    with pytest.raises(ValueError, match=r"math domain error|nonnegative"):
        executor.submit(math.sqrt, -1).result()
    assert executor.submit(os.getpid).result() != os.getpid()
    assert executor.submit(os.getenv, "OMP_NUM_THREADS").result() == "1"
    # One that waits behind others is cancelled, and runs no more.
    others = [executor.submit(time.sleep, 0.5) for _ in range(6)]
    cancelled = executor.submit(open, folder / "written", "w")
    assert cancelled.cancel()
    with pytest.raises(CancelledError):
        cancelled.result()
    wait(others)
    executor.submit(time.sleep, 0).result()
    assert not (folder / "written").exists()


def check_records(executor, folder):
    """Two evaluations give the records of a run in this process, also where a worker is killed once in the midst."""
    marker = folder / "killed"

    def kills(model, x, y, threat_model):
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return sign_step(model, x, y, threat_model)

    attacks = {"kills": robust_ext.as_attack(kills, name="kills"), "APGD": "robust_ext:APGD(steps=3)"}
    given = {"executor": executor, "out": folder / "run"}
    there = [essence(robust_ext.robust_accuracy(NETWORK, attacks, INPUTS, LABELS, LINF, batch_size=2, **given))]
    assert marker.exists()
    planted = {"inner_points": 30, "random_inner": 10, "random_corners": 10, "batch_size": 4}
    there.append(essence(robust_ext.binarization_test(NETWORK, attacks, INPUTS, LINF, executor=executor, **planted)))
    here = [
        essence(robust_ext.robust_accuracy(NETWORK, attacks, INPUTS, LABELS, LINF, batch_size=2)),
        essence(robust_ext.binarization_test(NETWORK, attacks, INPUTS, LINF, **planted)),
    ]
    assert there == here


def check_end(executor):
    """Where the end does not wait, calls that run end too, and so do the workers."""
    pid = executor.submit(os.getpid).result()
    running = [executor.submit(time.sleep, 600) for _ in range(3)]
    begun = time.perf_counter()
    executor.shutdown(wait=False, cancel_futures=True)
    assert time.perf_counter() - begun < 30
    for one in running:
        with pytest.raises(CancelledError):
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
    "local:3": ({"devices": ["cpu", "cpu"]}, "workers: got 3, expected one a device .2.; name a device several times"),
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


@pytest.mark.skipif(find_spec("submitit") is None, reason="submitit is not installed")
def test_what_slurm_is_asked_for(tmp_path, monkeypatch):
    """One array of jobs, in a folder that nobody else reads; all are cancelled at the end."""
    commands = {"sbatch": f'cat "$1" > {tmp_path}/asked; echo Submitted batch job 7', "srun": "", "sacct": ""}
    commands["scancel"] = f"echo $1 >> {tmp_path}/cancelled"
    for name, words in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{words}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    folder = tmp_path / "run" / "slurm"
    executor = make_executor("slurm:fast", workers=3, devices=["cuda"], folder=folder)()
    assert workers_of(executor) == 3
    call = executor.submit(pow, 2, 3)
    executor.shutdown(wait=False)
    assert call.cancelled()
    asked = [line.removeprefix("#SBATCH --") for line in (tmp_path / "asked").read_text().splitlines()]
    assert {"partition=fast", "gpus-per-node=1", "cpus-per-task=1", "time=1440", "job-name=robust-ext"} <= set(asked)
    assert any(line.startswith("array=0-2") for line in asked)
    assert sorted((tmp_path / "cancelled").read_text().split()) == ["7_0", "7_1", "7_2"]
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(find_spec("submitit") is None, reason="submitit is not installed")
@pytest.mark.exhaustive
def test_jobs_that_never_begin_to_work(tmp_path, monkeypatch):
    """Calls are not left waiting: they raise what a job wrote."""
    monkeypatch.setattr("robust_ext.engine.executors.slurm._serve", eval)
    words = r"slurm: jobs end before they begin to work \(TypeError: globals must be .*\); see their files in .*jobs"
    with LocalSlurm(tmp_path / "jobs") as executor, pytest.raises(RobustExtError, match=words):
        executor.submit(pow, 2, 3).result(timeout=100)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("workers", "threads", "devices", "words"),
    [
        (1, 2, [], "workers of one thread each .dask worker --nthreads 1 .*; inproc.* has 2"),
        (0, 1, [], "a scheduler with workers; start some"),
        (1, 1, ["cuda"], 'workers with the resource GPU .*--resources "GPU=1"'),
    ],
)
def test_dask_clusters_that_are_refused(workers, threads, devices, words, monkeypatch):
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr("robust_ext.engine.executors.dask._PATIENCE", 2)
    there = {"n_workers": workers, "threads_per_worker": threads, "processes": False, "dashboard_address": None}
    with distributed.LocalCluster(**there) as cluster, pytest.raises(InvalidArgumentError, match=words):
        make_executor(f"dask:{cluster.scheduler_address}", devices=devices)()
