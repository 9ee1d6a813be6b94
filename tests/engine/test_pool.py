"""Blocks on the workers of an executor: the records of a run in this process, whatever becomes of the workers."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from robust_ext import ThreatModel, binarization_test, evaluate_defense, mead, robust_accuracy
from robust_ext.core.errors import InvalidArgumentError, OutOfTimeError, RobustExtError, RobustExtWarning, warn
from robust_ext.demo.network import digits_network
from robust_ext.engine.context import RunContext, run_context
from robust_ext.engine.isolation.messages import Packer
from robust_ext.engine.pool import Pool, call_all, pooling
from robust_ext.engine.remote import Call, make_call, run_call

THREAT_MODEL = ThreatModel(norm="linf", epsilon=0.1)
X = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))
FEW = X[:6]
Y = digits_network()(X).argmax(1)
PLANTED = {
    "inner_points": 30,
    "random_inner": 5,
    "random_corners": 5,
    "canaries": 1,
    "witness_steps": 2,
    "witness_queries": 5,
    "judge_seed": 7,
}


def noise(model, x, y, generator):
    model(x)
    return (x + 0.1 * torch.rand(x.shape, generator=generator).sub(0.5)).clamp(0, 1)


ATTACKS = {
    "ours": "robust_ext:APGD(steps=3)",
    "foolbox": "foolbox:LinfPGD(steps=3)",
    "art": "art:FastGradientMethod",
    "noise": noise,
    "nothing": lambda model, x, y: x,
}

# Forks begin at once; what spawned workers do differently is tested with the executors.
forked = partial(ProcessPoolExecutor, 2, mp_context=multiprocessing.get_context("fork"))


@pytest.fixture(scope="module")
def pool():
    with forked() as executor:
        yield executor


def brightness(x):
    return x.flatten(1).mean(1)


def accuracy(attacks=ATTACKS, **more):
    return robust_accuracy(digits_network(), attacks, X, Y, THREAT_MODEL, batch_size=3, **more)


def planted(**more):
    return binarization_test(digits_network(), ATTACKS, FEW, THREAT_MODEL, batch_size=1, **PLANTED, **more)


EVALUATIONS = {
    "robust accuracy": accuracy,
    "binarization": planted,
    "sequential": partial(planted, sequential=True),
    "detector": lambda **more: binarization_test(
        digits_network(), noise, X[:2], THREAT_MODEL, batch_size=1, detector=brightness,
        detector_data=X.repeat(3, 1, 1, 1), **PLANTED, **more,
    ),
    "mead": lambda **more: mead(
        digits_network(), ["robust_ext:ObjectivePGD(steps=2)", "robust_ext:OrthogonalPGD(steps=2)"], X, Y,
        THREAT_MODEL, detectors={"bright": brightness, "dark": lambda x: -x.flatten(1).mean(1)},
        detector_data=X.repeat(3, 1, 1, 1), resamples=0, batch_size=5, judge_seed=0, **more,
    ),
    "adaptive": lambda **more: evaluate_defense(
        lambda x: (x * 8).round() / 8, ["robust_ext:APGD(steps=2)", "robust_ext:Square(queries=3)"], X, Y,
        THREAT_MODEL, classifier=digits_network(), batch_size=5, judge_seed=0, **more,
    ),
}  # fmt: skip


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


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The result, the folder and the heard records of each evaluation in this process."""
    made = {}

    def of(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
            made[name] = run(name, folder)
        return made[name]

    return of


def run(name, folder, **where):
    heard = []
    listener = SimpleNamespace(on_record=heard.append, on_result=lambda result: None)
    result = EVALUATIONS[name](out=folder, callbacks=[listener], **where)
    return timeless(result.content), records(folder), heard


def timeless(value):
    """Content without what differs between any two runs."""
    if isinstance(value, dict):
        measured = ("isolated", "time")
        return {key: timeless(one) for key, one in value.items() if "seconds" not in key and key not in measured}
    return [timeless(one) for one in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("where", ["pool", "isolate"])
@pytest.mark.parametrize("name", EVALUATIONS)
def test_the_same_records(name, where, pool, here, tmp_path):
    expected = here(name)
    assert expected[1]
    assert run(name, tmp_path, **({"executor": pool} if where == "pool" else {"isolate": True})) == expected


def small(attacks, **more):
    """Four blocks of three samples on a network of one layer."""
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)).eval()
    network[1].weight.data = torch.linspace(-1, 1, 192).view(3, 64)
    network[1].bias.data.zero_()
    labels = network(X).argmax(1)
    return robust_accuracy(network, {"one": attacks}, X, labels, THREAT_MODEL, batch_size=3, **more)


def deadly(marker, *, forgiving):
    """An attack that ends its process at the block of the fourth sample, until the file ``marker`` is there."""
    hit = X[3]

    def attack(model, x, y):
        if torch.equal(x[0], hit) and not marker.exists():
            if forgiving:
                marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return (x + 0.05).clamp(0, 1)

    return attack


def test_a_worker_that_is_killed_changes_nothing(tmp_path):
    attack = deadly(tmp_path / "marker", forgiving=True)
    found = small(attack, executor=forked, out=tmp_path / "there")
    assert (tmp_path / "marker").exists()
    assert found.content["worst_case"] == small(attack, out=tmp_path / "here").content["worst_case"]
    assert records(tmp_path / "there") == records(tmp_path / "here")


def test_a_block_that_always_ends_its_worker_is_named_and_all_others_are_kept(tmp_path):
    attack = deadly(tmp_path / "marker", forgiving=False)
    with pytest.raises(RobustExtError, match=r"executor: 1 blocks .*: one.*, samples 3 to 5 \("):
        small(attack, executor=forked, out=tmp_path / "there")
    (kept,) = records(tmp_path / "there").values()
    assert sorted(int(line.split()[1][:-1]) for line in kept) == [0, 1, 2, 6, 7, 8, 9, 10, 11]
    (tmp_path / "marker").touch()
    small(attack, executor=forked, out=tmp_path / "there")
    small(attack, out=tmp_path / "here")
    assert records(tmp_path / "there") == records(tmp_path / "here")


def test_an_executor_that_broke_and_cannot_be_made_anew_is_one_error(tmp_path):
    attack = deadly(tmp_path / "marker", forgiving=True)
    with forked() as broken, pytest.raises(RobustExtError, match=r"it broke .* give a callable that makes one"):
        small(attack, executor=broken, out=tmp_path / "there")
    small(attack, executor=forked, out=tmp_path / "there")
    small(attack, out=tmp_path / "here")
    assert records(tmp_path / "there") == records(tmp_path / "here")


def test_an_interrupted_run_goes_on_and_a_callback_hears_all_of_it(tmp_path, pool):
    class Interrupting:
        heard = 0

        def on_record(self, record):
            self.heard += 1
            if self.heard == 4:
                raise KeyboardInterrupt

        def on_result(self, result):
            pass

    attack, listener = deadly(tmp_path, forgiving=True), Interrupting()
    with pytest.raises(KeyboardInterrupt):
        small(attack, executor=pool, out=tmp_path / "there", callbacks=[listener])
    small(attack, executor=pool, out=tmp_path / "there", callbacks=[listener])
    small(attack, out=tmp_path / "here")
    assert listener.heard == 4 + 12
    assert records(tmp_path / "there") == records(tmp_path / "here")


class Here(Executor):
    """Calls in this process."""

    def submit(self, fn, /, *args, **kwargs):
        done = Future()
        done.set_result(fn(*args, **kwargs))
        return done


@pytest.mark.parametrize(
    ("executor", "words"),
    [
        (ThreadPoolExecutor(1), "got ThreadPoolExecutor, expected one whose workers are processes"),
        (lambda: ThreadPoolExecutor(1), "got ThreadPoolExecutor, expected one whose workers are processes"),
        (Here(), "got an executor that works in this process, expected one whose workers are processes"),
        (4, "got 4, expected a concurrent.futures.Executor, a callable that makes one, or a text"),
        (list, "got a callable that returns list, expected a callable that returns a concurrent.futures.Executor"),
        ("locale", "got locale, expected local"),
    ],
)
def test_what_is_no_executor_of_processes_is_refused(executor, words):
    with pytest.raises(InvalidArgumentError, match=f"^executor: {words}"):
        small(noise, executor=executor)


def test_devices(pool):
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
    call = make_call(packer, parts_of, network=network, held=held, inputs=[X])
    parts, call = call.parts, replace(call, caller=("another", 0))
    assert run_call(call) == {"missing": list(parts)}
    reply = run_call(replace(call, device="meta", content=packer.parts))
    found = reply["value"]
    assert found["same"]
    assert found["weight"].is_meta
    assert (found["device"], found["elsewhere"]) == (torch.device("meta"), torch.device("cuda", 1))
    assert found["inputs"].shape == (4, 1, 8, 8)
    assert run_call(call) == {"missing": list(parts)}, "parts are those of a device"
    assert torch.equal(run_call(replace(call, content=packer.parts))["value"]["inputs"], X[:4])
    assert torch.equal(run_call(call)["value"]["weight"], network.weight), "parts are kept"
    assert len(packer.parts[parts[0]]) < X.numel() * 4, "of a view only what it shows is sent"


def test_the_time_that_is_given_ends_also_what_workers_do():
    def slow(model, x, y):
        time.sleep(60)
        return x

    begun = time.monotonic()
    with run_context(RunContext(deadline=begun + 0.3)), pytest.raises(OutOfTimeError):
        small(slow, executor=forked)
    assert time.monotonic() - begun < 10


MINE = """
import os
from pathlib import Path
with (Path(__file__).parent / "loaded").open("a") as file:
    file.write(f"{os.getpid()}\\n")
def attack(model, x, y):
    return (x + 0.05).clamp(0, 1)
"""


@pytest.mark.exhaustive
def test_code_of_an_attack_is_loaded_in_its_own_process_only(tmp_path):
    """Neither here nor in the workers, which judge."""
    (tmp_path / "mine.py").write_text(MINE)
    with forked() as executor:
        found = small(f"{tmp_path / 'mine.py'}:attack", executor=executor, isolate=True)
        judges = {os.getpid(), *executor._processes}
    assert found.content["isolated"]
    loaded = {int(line) for line in (tmp_path / "loaded").read_text().split()}
    assert loaded
    assert not loaded & judges


class Breaking(Executor):
    """Two workers that take a call at a time, in turns; what is in flight fails with one that ends its worker."""

    made = 0

    def __init__(self, deadly, times):
        type(self).made += 1
        self.workers, self._deadly, self._times = 8, deadly, times
        self._flying = []

    def submit(self, fn, /, *args, **kwargs):
        done = Future()
        self._flying.append((done, args[0]))
        if args[0].parts == (self._deadly,) and self._times:
            self._times.pop()
            for other, _ in self._flying:
                other.set_exception(BrokenExecutor("a worker ended"))
            self._flying = []
        elif len(self._flying) > 4:
            self.finish()
        else:
            threading.Timer(0.01, self.finish).start()
        return done

    def finish(self):
        flying, self._flying = self._flying, []
        for done, call in flying:
            done.set_result({"value": call.parts[0]})

    def shutdown(self, wait=True, *, cancel_futures=False):
        pass


@pytest.mark.parametrize(("times", "lost"), [(1, []), (50, [13])])
def test_what_fails_runs_again_alone(times, lost):
    Breaking.made, deaths = 0, [None] * times
    calls = ((number, Call(packed=b"", parts=(number,))) for number in range(40))
    replies = dict(Pool(partial(Breaking, 13, deaths)).run(calls, {}))
    assert sorted(replies) == list(range(40))
    assert [number for number, reply in replies.items() if "lost" in reply] == lost
    assert all(reply == {"value": number} for number, reply in replies.items() if number not in lost)
    assert Breaking.made == (2 if times == 1 else 3)


def test_where_no_worker_returns_anything_the_first_calls_say_so():
    begun = []

    class Useless(Breaking):
        def submit(self, fn, /, *args, **kwargs):
            begun.append(args)
            done = Future()
            done.set_exception(ModuleNotFoundError("No module named 'robust_ext'"))
            return done

    calls = ((number, Call(packed=b"")) for number in range(4000))
    with pytest.raises(RobustExtError, match=r"no worker returned anything \(ModuleNotFoundError: No module named"):
        list(Pool(partial(Useless, None, [])).run(calls, {}))
    assert len(begun) < 40


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
import torch
from torch import nn
import robust_ext

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 3, bias=False)
        self.layer.weight.data = torch.linspace(-1, 1, 48).view(3, 16)
    def forward(self, x):
        return self.layer(x.flatten(1))

step = 0.04
def attack(model, x, y):
    if torch.equal(x[0], inputs[9]):
        print("working", os.getpid(), flush=True)
        time.sleep(float(sys.argv[2]))
    return (x + step).clamp(0, 1)

inputs = torch.rand(12, 1, 4, 4, generator=torch.Generator().manual_seed(0))
network = Net().eval()
labels = network(inputs).argmax(1)
out = sys.argv[1]
made = loky = None
if sys.argv[3] == "loky":
    import loky
    made = lambda: loky.get_reusable_executor(max_workers=2)
elif sys.argv[3] != "here":
    made = sys.argv[3]
threat_model = robust_ext.ThreatModel(norm="linf", epsilon=0.1)
options = {"batch_size": 3, "out": out, "executor": made}
robust_ext.robust_accuracy(network, {"mine": attack}, inputs, labels, threat_model, **options)
"""


@contextmanager
def script(out, seconds, where):
    """The script, which has no file, as in a notebook, and no guard against being run again in a worker."""
    command = [sys.executable, "-c", SCRIPT, str(out), str(seconds), where]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        try:
            yield process
        finally:
            # The block would wait for one that is still there.
            process.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Records of the script where it runs in its own process."""
    folder = tmp_path_factory.mktemp("here")
    with script(folder, 0, "here") as process:
        assert process.wait(timeout=120) == 0, process.stderr.read()
    return records(folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", ["local:2", "loky"])
def test_what_a_notebook_defines_and_ctrl_c(tmp_path, where, undisturbed):
    """Workers end at once, also while they work, and the same call goes on."""
    if where == "loky":
        pytest.importorskip("loky")
    with script(tmp_path / "there", 600, where) as process:
        worker = int(process.stdout.readline().split()[1])
        time.sleep(1)
        begun = time.monotonic()
        # As a terminal sends it, to all of them.
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=60)
        assert time.monotonic() - begun < 10
        assert "KeyboardInterrupt" in process.stderr.read()
    assert not Path(f"/proc/{worker}").exists() or worker_state(worker) == "Z"
    (kept,) = records(tmp_path / "there").values()
    assert 0 < len(kept) < 12
    with script(tmp_path / "there", 0, where) as process:
        assert process.wait(timeout=120) == 0, process.stderr.read()
    assert records(tmp_path / "there") == undisturbed


def worker_state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
