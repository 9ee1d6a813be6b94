"""The engine with a protocol of a few lines: what workers get, what is kept, gone on with, refused and shown."""

import io
import re
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import robust_ext
from robust_ext import ThreatModel, binarization_test, evaluate_defense, mead, robust_accuracy
from robust_ext.attacks.base import CallableAttack
from robust_ext.core.errors import AttackError, RunFolderError
from robust_ext.core.target import PassCounter, Target
from robust_ext.engine import progress
from robust_ext.engine.context import repairing
from robust_ext.engine.inputs import blocks_of
from robust_ext.engine.progress import phase, showing, watching
from robust_ext.engine.run import Block, Run
from robust_ext.engine.running import run_all
from robust_ext.engine.task import Check, Task, TaskResult, drive, run_task

LINF = ThreatModel(norm="linf", epsilon=0.1)
INPUTS = torch.rand(7, 4, generator=torch.Generator().manual_seed(0))
MODULE = nn.Linear(4, 3).eval()
TARGET = Target(module=MODULE, bounds=(0, 1), classes=3, input_shape=(4,), device=INPUTS.device)


@dataclass(frozen=True, kw_only=True)
class Noise(Run):
    attack: CallableAttack

    def work(self, rows, needs):
        inputs, labels = INPUTS[rows.start : rows.stop], torch.zeros(len(rows), dtype=torch.int64)
        keywords = {"threat_model": LINF, "stream": (0, rows[0], "noise"), "counted": MODULE}
        task = Task(attack=self.attack, target=TARGET, inputs=inputs, labels=labels, **keywords)
        attempt = yield task, Check(module=MODULE, name=self.title)
        return Block.of(rows, range(7), attempt, attempt.verified.candidates, twice=[2 * row for row in rows])


def noise(model, x, y, generator):
    model(x)
    return (x + 0.1 * torch.rand(x.shape, generator=generator)).clamp(0, 1)


def run(out=None, worker=run_task):
    one = Noise(key="one", title="one", blocks=blocks_of(7, 3), identity={"a": 1}, attack=CallableAttack(noise))
    return drive(run_all((one,), out=out, progress=False, title="noise"), worker)


def essence(outcome):
    candidates = [outcome.store.load(f"candidates-{start:06d}")["candidates"] for start in (0, 3, 6)]
    return outcome.records, [part.tolist() for part in candidates]


def test_a_worker_is_given_no_more_than_an_attacker_has_and_is_not_believed():
    """What a worker returns is verified by who made the task; its own words on success are none."""
    names = ["attack", "target", "inputs", "labels", "threat_model", "stream", "rows", "counted", "global_seed"]
    assert sorted(field.name for field in fields(Task)) == sorted(names)

    def liar(task):
        return TaskResult(candidates=task.inputs + 5, seconds=0.0, passes={"forward": 0, "backward": 0})

    assert {record["outcome"] for record in run(worker=liar)["one"].records} == {"out_of_bounds"}
    with pytest.raises(AttackError, match="one: returned str"):
        run(worker=lambda task: replace(liar(task), candidates="found"))


def test_repairing_runs_the_damaged_block_alone_and_a_folder_of_other_points_is_refused(tmp_path, monkeypatch):
    whole, calls = essence(run(out=tmp_path)["one"]), []
    file = tmp_path / "one" / "records.jsonl"
    file.write_text(file.read_text().replace('"twice": 8', '"twice": 9'))
    with pytest.raises(RunFolderError, match=r"records\.jsonl: line \d+ \(after sample 3\) does not match"):
        run(out=tmp_path)
    with repairing():
        assert essence(run(out=tmp_path, worker=lambda task: calls.append(task) or run_task(task))["one"]) == whole
    assert [len(task.inputs) for task in calls] == [3]
    monkeypatch.setattr("robust_ext.engine.run.STREAMS", 3)
    with pytest.raises(RunFolderError, match="streams: begun by a version that draws other points from the same seed"):
        run(out=tmp_path)


FOLDERS = (Path(robust_ext.__file__).parent, Path(__file__).parents[2] / "adapters")
EVALUATIONS = {
    "binarization_test": lambda net, x, y, probe: binarization_test(net, probe, x, LINF, inner_points=10),
    "robust_accuracy": lambda net, x, y, probe: robust_accuracy(net, probe, x, y, LINF),
    "mead": lambda net, x, y, probe: mead(net, [probe], x, y, LINF, detectors=lambda x: x.flatten(1).std(1)),
    "evaluate_defense": lambda net, x, y, probe: evaluate_defense(lambda x: x, [probe], x, y, LINF, classifier=net),
}


@pytest.mark.parametrize("evaluation", EVALUATIONS)
def test_at_most_five_frames_of_this_project_lie_between_a_call_and_the_host_s_attack(evaluation):
    paths = []

    def attack(*arguments, **keywords):
        frame, path = sys._getframe(1), []
        while frame is not None:
            if any(Path(frame.f_code.co_filename).is_relative_to(folder) for folder in FOLDERS):
                path.insert(0, frame.f_code.co_qualname)
            frame = frame.f_back
        paths.append(path)
        return base.__call__(*arguments, **keywords)

    base = pytest.importorskip("foolbox").attacks.LinfFastGradientAttack
    probe = type("Probe", (base,), {"__call__": attack})()
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 20), nn.ReLU(), nn.Linear(20, 4)).eval()
    x = torch.rand(4, 1, 4, 4)
    EVALUATIONS[evaluation](network, x, network(x).argmax(1), probe)
    assert paths
    for path in paths:
        assert path[0] == evaluation
        assert len(path) <= 5, path


@pytest.fixture
def clock(monkeypatch):
    made = SimpleNamespace(now=1000.0, monotonic=lambda: made.now)
    monkeypatch.setattr(progress, "time", made)
    return made


@pytest.fixture(params=[False, True], ids=["log", "terminal"])
def stream(request, monkeypatch):
    made = io.StringIO()
    made.isatty = lambda: request.param
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=made))
    return made


def test_a_line_a_minute_where_there_is_no_terminal_and_a_bar_on_one(clock, stream):
    with showing("binarization", shown=True, total=64, unit="sample") as bar:
        for words, seconds, done in (("planting", 130, 32), ("attack", 65, 0)):
            phase(words)
            # Three rows go forward once a tenth of a second.
            with watching(counter := PassCounter()):
                for _ in range(seconds * 10):
                    clock.now += 0.1
                    counter.count_forward(3)
            bar.advance(done)
    written = stream.getvalue()
    assert "32 of 64 samples in 3 min 15 s\n" in written
    # Half of the samples took 130 seconds.
    assert re.search(r"32 of 64 samples \[\d min \d+ s, about \d min \d+ s left\] attack, [\d,]+ rows forward", written)
    if stream.isatty():
        assert "━" in written
        assert 100 < written.count("planting, ") < 130 / 0.25 + 5
    else:
        # After five seconds, after a minute each, and the end.
        assert written.count("\n") == 5
        assert re.match(r"binarization: 0 of 64 samples \[5 s\] planting, 150 rows forward\n", written)
