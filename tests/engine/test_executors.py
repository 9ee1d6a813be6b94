"""Blocks on the workers of executors: the records of a run in this process, whatever becomes of the workers."""

import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from robust_ext import ThreatModel, binarization_test, evaluate_defense, mead, robust_accuracy
from robust_ext.core.errors import InvalidArgumentError, OutOfTimeError, RobustExtError, RobustExtWarning, warn
from robust_ext.demo.network import digits_network
from robust_ext.engine.context import RunContext, run_context
from robust_ext.engine.executors import make_executor, workers_of
from robust_ext.engine.isolation.messages import Packer
from robust_ext.engine.pool import Pool, call_all, pooling
from robust_ext.engine.remote import make_call, run_call
from tests.run_folders import noise, timeless

ROOT = Path(__file__).parents[2]
LINF = ThreatModel(norm="linf", epsilon=0.1)
NETWORK = digits_network()
X = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = NETWORK(X).argmax(1)
PLANTED = {"inner_points": 30, "random_inner": 5, "random_corners": 5, "canaries": 1, "batch_size": 1, "judge_seed": 7}
PLANTED |= {"witness_steps": 2, "witness_queries": 5}
# Forks begin at once; what spawned workers do differently is tested with other executors.
forked = partial(ProcessPoolExecutor, 2, mp_context=multiprocessing.get_context("fork"))


@pytest.fixture(scope="module")
def pool():
    with forked() as executor:
        yield executor


def brightness(x):
    return x.flatten(1).mean(1)


ATTACKS = {
    "ours": "robust_ext:APGD(steps=3)",
    "foolbox": "foolbox:LinfPGD(steps=3)",
    "art": "art:FastGradientMethod",
    "noise": noise,
}
DETECTED = {"detector_data": X.repeat(3, 1, 1, 1)}
FOUND_BY = ["robust_ext:ObjectivePGD(steps=2)", "robust_ext:OrthogonalPGD(steps=2)"]
DETECTORS = {"bright": brightness, "dark": lambda x: -brightness(x)}
QUICK = ["robust_ext:APGD(steps=2)", "robust_ext:Square(queries=3)"]
MORE = {"batch_size": 5, "judge_seed": 0}
EVALUATIONS = {
    "robust accuracy": partial(robust_accuracy, NETWORK, ATTACKS, X, Y, LINF, batch_size=3),
    "binarization": partial(binarization_test, NETWORK, ATTACKS, X[:6], LINF, **PLANTED),
    "sequential": partial(binarization_test, NETWORK, ATTACKS, X[:6], LINF, **PLANTED, sequential=True),
    "detector": partial(binarization_test, NETWORK, noise, X[:2], LINF, **PLANTED, detector=brightness, **DETECTED),
    "mead": partial(mead, NETWORK, FOUND_BY, X, Y, LINF, detectors=DETECTORS, resamples=0, **MORE, **DETECTED),
    "adaptive": partial(evaluate_defense, lambda x: (x * 8).round() / 8, QUICK, X, Y, LINF, classifier=NETWORK, **MORE),
}


def records(folder):
    """All that is kept of samples, by file; lines as they came, without their checksums and in order."""
    return {
        str(file.relative_to(folder)): sorted(
            line.rpartition(b', "checksum"')[0]
            for line in file.read_bytes().splitlines()
            if line.startswith(b'{"index": ')
        )
        for file in sorted(folder.rglob("records.jsonl"))
    }


def run(name, folder, **where):
    """The result of an evaluation, what is kept of it and what is heard."""
    heard = []
    listener = SimpleNamespace(on_record=heard.append, on_result=lambda result: None)
    result = EVALUATIONS[name](out=folder, callbacks=[listener], **where)
    return timeless(result.content), records(folder), heard


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    return cache(lambda name: run(name, tmp_path_factory.mktemp("here")))


@pytest.mark.parametrize("where", ["pool", "isolate"])
@pytest.mark.parametrize("name", EVALUATIONS)
def test_the_same_records(name, where, pool, here, tmp_path):
    expected = here(name)
    assert expected[1]
    assert run(name, tmp_path, **({"executor": pool} if where == "pool" else {"isolate": True})) == expected


def small(attack, **more):
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)).eval()
    network[1].weight.data = torch.linspace(-1, 1, 192).view(3, 64)
    network[1].bias.data.zero_()
    return robust_accuracy(network, {"one": attack}, X, network(X).argmax(1), LINF, batch_size=3, **more)


def deadly(marker, *, forgiving=True):
    """An attack that ends its process at the block of the fourth sample, until the file ``marker`` is there."""
    hit = X[3]

    def attack(model, x, y):
        if torch.equal(x[0], hit) and not marker.exists():
            if forgiving:
                marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return (x + 0.05).clamp(0, 1)

    return attack


@pytest.fixture
def there(tmp_path):
    """Where a run is done on workers; in the end there is what one in this process keeps."""
    yield tmp_path / "there"
    small(deadly(tmp_path), out=tmp_path / "here")
    assert records(tmp_path / "there") == records(tmp_path / "here")


def test_a_worker_that_is_killed_changes_nothing(tmp_path, there):
    small(deadly(tmp_path / "marker"), executor=forked, out=there)
    assert (tmp_path / "marker").exists()


def test_a_block_that_always_ends_its_worker_is_named_and_all_others_are_kept(tmp_path, there):
    attack = deadly(tmp_path / "marker", forgiving=False)
    with pytest.raises(RobustExtError, match=r"executor: 1 blocks .*: one.*, samples 3 to 5 \("):
        small(attack, executor=forked, out=there)
    (kept,) = records(there).values()
    assert sorted(int(line.split()[1][:-1]) for line in kept) == [0, 1, 2, 6, 7, 8, 9, 10, 11]
    (tmp_path / "marker").touch()
    small(attack, executor=forked, out=there)


def test_an_executor_that_broke_and_cannot_be_made_anew_is_one_error(tmp_path, there):
    attack = deadly(tmp_path / "marker")
    with forked() as broken, pytest.raises(RobustExtError, match=r"it broke .* give a callable that makes one"):
        small(attack, executor=broken, out=there)
    small(attack, executor=forked, out=there)


class Here(Executor):
    def submit(self, fn, /, *args, **kwargs):
        done = Future()
        done.set_result(fn(*args, **kwargs))
        return done


REFUSED_TEXTS = [
    ("local:2", {"workers": 3}, "because --jobs states 3 workers"),
    ("local:3", {"devices": ["cpu", "cpu"]}, "workers: got 3, expected one a device"),
    ("none.py:make", {"workers": 3}, "workers: got 3, expected None"),
]


def test_what_is_no_executor_of_processes_is_refused(pool):
    for executor in (ThreadPoolExecutor(1), Here(), 4, list):
        with pytest.raises(InvalidArgumentError, match=r"^executor: got"):
            small(noise, executor=executor)
    for text, keywords, words in REFUSED_TEXTS:
        with pytest.raises(InvalidArgumentError, match=words):
            make_executor(text, **keywords)
    assert small(noise, executor=pool, devices=("cpu", "cpu")).content["attacks"]
    for wrong in ("cpu", (), ("nothing",), (3.5,)):
        with pytest.raises(InvalidArgumentError, match="devices: got"):
            small(noise, executor=pool, devices=wrong)


def parts_of(network, held, inputs):
    """What a worker has of its arguments; what is shared is one object."""
    return {"same": held["network"] is network, **held, "weight": network.weight, "inputs": inputs[0]}


def test_a_call_is_made_on_the_device_of_its_worker():
    """The device meta stands for another one: there is no second one to be had everywhere."""
    packer, network = Packer("a worker"), torch.nn.Linear(4, 3)
    held = {"network": network, "device": torch.device("cpu"), "elsewhere": torch.device("cuda", 1)}
    packer.share(X, rows=4)
    packer.share(network)
    call = replace(make_call(packer, parts_of, network=network, held=held, inputs=[X]), caller=("another", 0))
    parts = call.parts
    assert run_call(call) == {"missing": list(parts)}
    found = run_call(replace(call, device="meta", content=packer.parts))["value"]
    assert found["same"]
    assert found["weight"].is_meta
    assert (found["device"], found["elsewhere"]) == (torch.device("meta"), torch.device("cuda", 1))
    assert found["inputs"].shape == (4, 1, 8, 8)
    assert run_call(call) == {"missing": list(parts)}, "parts are those of a device"
    assert torch.equal(run_call(replace(call, content=packer.parts))["value"]["inputs"], X[:4])
    assert torch.equal(run_call(call)["value"]["weight"], network.weight), "parts are kept"
    assert len(packer.parts[parts[0]]) < X.numel() * 4, "of a view only what it shows is sent"


def test_the_time_that_is_given_ends_also_what_workers_do():
    begun = time.monotonic()
    with run_context(RunContext(deadline=begun + 0.3)), pytest.raises(OutOfTimeError):
        small(lambda model, x, y: time.sleep(60), executor=forked)
    assert time.monotonic() - begun < 10


def warns(number):
    warn(f"number {number}")
    if number == 3:
        raise ValueError("three")
    return number * torch.ones(2)


def test_calls_of_functions_and_their_warnings(pool):
    calls = [(warns, {"number": number}) for number in range(3)]
    with pooling(Pool(pool)), pytest.warns(RobustExtWarning) as warned:
        found = dict(call_all(calls, place=torch.device("cpu")))
    assert {number: value.tolist() for number, value in found.items()} == {0: [0, 0], 1: [1, 1], 2: [2, 2]}
    assert sorted(str(one.message) for one in warned) == ["number 0", "number 1", "number 2"]
    with (
        pooling(Pool(pool)),
        pytest.warns(RobustExtWarning, match="number 3"),
        pytest.raises(RobustExtError, match=r"(?s)a worker raised\n.*ValueError: three"),
    ):
        list(call_all([(warns, {"number": 3})] * 2, place=torch.device("cpu")))


SCRIPT = """
import os, sys, time
import torch, robust_ext
from torch import nn
class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1))
step = 0.04
def attack(model, x, y):
    if torch.equal(x[0], inputs[9]):
        print("working", os.getpid(), flush=True)
        time.sleep(float(sys.argv[2]))
    return (x + step).clamp(0, 1)
torch.manual_seed(0)
inputs, network = torch.rand(12, 1, 4, 4), Net(16, 3).eval()
labels, threat_model = network(inputs).argmax(1), robust_ext.ThreatModel(norm="linf", epsilon=0.1)
options = {"batch_size": 3, "out": sys.argv[1], "executor": None if sys.argv[3] == "here" else sys.argv[3]}
robust_ext.robust_accuracy(network, {"mine": attack}, inputs, labels, threat_model, **options)
"""


@pytest.mark.exhaustive
def test_what_a_notebook_defines_and_ctrl_c(tmp_path):
    """Workers end at once, also while they work, and the same call goes on.

    The script has no file, as in a notebook, and no guard against being run again in a worker.
    """
    script, pipes = [sys.executable, "-c", SCRIPT], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [*script, str(tmp_path / "there"), "600", "local:2"]
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        try:
            worker = int(process.stdout.readline().split()[1])
            time.sleep(1)
            begun = time.monotonic()
            # As a terminal sends it, to all of them.
            os.killpg(process.pid, signal.SIGINT)
            process.wait(timeout=60)
            assert time.monotonic() - begun < 10
            assert "KeyboardInterrupt" in process.stderr.read()
        finally:
            # The block would wait for one that is still there.
            process.kill()
    assert gone(worker, seconds=1)
    (kept,) = records(tmp_path / "there").values()
    assert 0 < len(kept) < 12
    for folder in ("there", "here"):
        subprocess.run([*script, str(tmp_path / folder), "0", "here"], timeout=120, check=True)
    assert records(tmp_path / "there") == records(tmp_path / "here")


def gone(pid, seconds=60.0):
    """Whether a process ends in time, or has and waits for its parent."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def made(name, folder):
    if name != "ray":
        pytest.importorskip({"local": "concurrent", "dask": "distributed"}[name])
        return make_executor(name, workers=2)
    pytest.importorskip("ray")
    page = (ROOT / "docs/clusters.md").read_text()
    (code,) = re.findall(r"```python no-run\n(# cluster.py\n.*?)```", page, re.DOTALL)
    small = '"local", num_cpus=2, include_dashboard=False, object_store_memory=10**8, log_to_driver=False'
    (folder / "cluster.py").write_text(code.replace('"auto"', small))
    return make_executor(f"{folder / 'cluster.py'}:OnRay")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["local", "dask", "ray"])
# Ray leaves files and sockets to the end of the process.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
def test_every_executor_keeps_what_concurrent_futures_promises(name, tmp_path, there, monkeypatch):
    """Also for calls whose worker dies."""
    # Workers import this file.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "120")
    make = made(name, tmp_path)
    executor = make()
    assert workers_of(executor) == 2
    asked = {executor.submit(pow, n, exp=2): n for n in range(20)}
    assert {asked[one]: one.result() for one in as_completed(asked)} == {n: n * n for n in range(20)}
    # A call is no other one with the same arguments.
    assert executor.submit(time.perf_counter_ns).result() != executor.submit(time.perf_counter_ns).result()
    with pytest.raises(ValueError, match=r"math domain error|nonnegative"):
        executor.submit(math.sqrt, -1).result()
    assert executor.submit(os.getenv, "OMP_NUM_THREADS").result() == "1"
    # One of this machine is made anew.
    small(deadly(tmp_path / "marker"), executor=make if name == "local" else executor, out=there)
    pid, begun = executor.submit(os.getpid).result(), time.perf_counter()
    assert pid != os.getpid()
    executor.shutdown(wait=False)
    assert time.perf_counter() - begun < 60
    assert gone(pid)


def test_an_interrupted_run_goes_on_and_a_callback_hears_all_of_it(tmp_path, there, pool):
    heard = []

    def hear(record):
        heard.append(record)
        if len(heard) == 4:
            raise KeyboardInterrupt

    given = {"callbacks": [SimpleNamespace(on_record=hear, on_result=lambda result: None)], "out": there}
    with pytest.raises(KeyboardInterrupt):
        small(deadly(tmp_path), executor=pool, **given)
    small(deadly(tmp_path), executor=pool, **given)
    assert len(heard) == 4 + 12
