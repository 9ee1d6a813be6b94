"""Every executor keeps what :mod:`concurrent.futures` promises, also for calls whose worker dies."""

import math
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import BrokenExecutor, Executor, as_completed
from pathlib import Path

import pytest

import robust_ext
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.objects import refusing_code
from robust_ext.engine.executors import cores, make_executor, workers_of
from tests.evaluations.small import INPUTS, LABELS, LINF, NETWORK, essence, sign_step

PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"


def factory(name, folder):
    """What makes the executor of this name with two workers, on this machine."""
    if name == "local":
        return make_executor("local:2")
    if name == "dask":
        pytest.importorskip("distributed")
        return make_executor("dask", workers=2)
    pytest.importorskip("ray")
    (code,) = re.findall(r"```python no-run\n(# cluster.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    file = folder / "cluster.py"
    file.write_text(code.replace('address="auto"', 'address="local", num_cpus=2, log_to_driver=False'))
    return make_executor(f"{file}:OnRay")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["local", "dask", "ray"])
# Ray leaves files and sockets to the end of the process.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
def test_an_executor(name, tmp_path, monkeypatch):
    # Workers import this file.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    make = factory(name, tmp_path)
    executor = make()
    assert isinstance(executor, Executor)
    assert workers_of(executor) == 2
    check_calls(executor, tmp_path)
    with pytest.raises(BrokenExecutor if name == "local" else Exception, match=r"(?i)terminated|died|killed|ended"):
        executor.submit(os._exit, 1).result()
    if name == "local":
        executor.shutdown()
        check_records(make, tmp_path, both=True)
        return
    assert executor.submit(pow, 2, 3).result(timeout=120) == 8
    check_records(executor, tmp_path)
    pid = executor.submit(os.getpid).result()
    begun = time.perf_counter()
    executor.shutdown(wait=False)
    assert time.perf_counter() - begun < 60
    assert gone(pid)


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


def check_records(executor, folder, *, both=False):
    """Evaluations give the records of a run in this process, also where a worker is killed once in the midst."""
    marker = folder / "killed"

    def kills(model, x, y, threat_model):
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return sign_step(model, x, y, threat_model)

    attacks = {"kills": robust_ext.as_attack(kills, name="kills"), "APGD": "robust_ext:APGD(steps=3)"}
    # Without early ends of random search, whose passes tell how many blocks were ahead.
    planted = {"inner_points": 30, "random_inner": 10, "random_corners": 10, "batch_size": 4, "random_stops": False}
    found = []
    for name, where in (("there", {"executor": executor}), ("here", {})):
        given = {"batch_size": 2, "out": folder / name, **where}
        found.append([essence(robust_ext.robust_accuracy(NETWORK, attacks, INPUTS, LABELS, LINF, **given))])
        assert marker.exists()
        if both:
            found[-1].append(essence(robust_ext.binarization_test(NETWORK, attacks, INPUTS, LINF, **planted, **where)))
    assert found[0] == found[1]


def gone(pid, seconds=60.0):
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


REFUSED = {
    "locale": ({}, "executor: got locale, expected local, local:N, dask.*did you mean local"),
    "local:": ({}, "executor: got local:, expected local, local:N"),
    "local:0": ({}, "local:N with a number of workers from 1"),
    "local:two": ({}, "local:N with a number of workers from 1"),
    "local:2": ({"workers": 3}, "expected local, because --jobs states 3 workers"),
    "local": ({"workers": 0}, "workers: got 0"),
    "local:3": ({"devices": ["cpu", "cpu"]}, "workers: got 3, expected one a device .2.; name a device several times"),
    "ray:auto": ({}, "executor: got ray:auto, expected file.py:name of a function .* has one for Ray"),
    "slurm": ({}, "executor: got slurm, expected dask:ADDRESS; docs/clusters.md has a script for Slurm"),
    "none.py:make": ({"workers": 3}, r"workers: got 3, expected None .no --jobs., as none.py:make decides"),
}


def test_what_is_refused():
    for text, (keywords, words) in REFUSED.items():
        with pytest.raises(InvalidArgumentError, match=words):
            make_executor(text, **keywords)


def test_an_executor_of_a_file(tmp_path):
    code = "from concurrent.futures import ProcessPoolExecutor as Pool\ndef make(workers=2): return Pool(workers)\n"
    (tmp_path / "mine.py").write_text(code)
    assert workers_of(make_executor(f"{tmp_path}/mine.py:make")()) == 2
    make = make_executor(f"{tmp_path}/mine.py:make(workers=3)")
    assert workers_of(make()) == 3
    assert make() is not make(), "one that broke is made again"
    with refusing_code(), pytest.raises(InvalidArgumentError, match=r"executor: got .*which is code"):
        make_executor(f"{tmp_path}/mine.py:make")
    with pytest.raises(InvalidArgumentError, match=r"executor: got none\.py, expected an existing Python file"):
        make_executor("none.py:make")()
