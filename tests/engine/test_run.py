"""The engine with a protocol of a few lines: what workers are given, what is kept, shared, gone on with and refused."""

from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import nn

from robust_ext.attacks.base import CallableAttack
from robust_ext.core.errors import AttackError, AttackRefusedError, RunFolderError
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.context import repairing
from robust_ext.engine.inputs import blocks_of
from robust_ext.engine.run import Block, Run
from robust_ext.engine.running import run_all
from robust_ext.engine.task import Check, Task, TaskResult, drive, run_task

LINF = ThreatModel(norm="linf", epsilon=0.1)
INPUTS = torch.rand(7, 4, generator=torch.Generator().manual_seed(0))
MODULE = nn.Linear(4, 3).eval()
TARGET = Target(module=MODULE, bounds=(0, 1), classes=3, input_shape=(4,), device=INPUTS.device)


@dataclass(frozen=True, kw_only=True)
class Noise(Run):
    """Adds noise to the samples, a task a block."""

    attack: CallableAttack
    refusable: bool = False

    def work(self, rows, needs):
        inputs, labels = INPUTS[rows.start : rows.stop], torch.zeros(len(rows), dtype=torch.int64)
        keywords = {"threat_model": LINF, "stream": (0, rows[0], "noise"), "counted": MODULE}
        task = Task(attack=self.attack, target=TARGET, inputs=inputs, labels=labels, **keywords)
        attempt = yield task, Check(module=MODULE, name=self.title)
        return Block.of(rows, range(7), attempt, attempt.verified.candidates, twice=[2 * row for row in rows])

    def tolerates(self, error):
        return self.refusable and isinstance(error, AttackRefusedError)


def noise(model, x, y, generator):
    model(x)
    return (x + 0.1 * torch.rand(x.shape, generator=generator)).clamp(0, 1)


def made(function=noise, kind=Noise, key="one", **more):
    blocks = blocks_of(7, 3)
    return kind(key=key, title=key, blocks=blocks, identity={"a": 1}, attack=CallableAttack(function), **more)


def run(*runs, out=None, worker=run_task):
    return drive(run_all(runs, out=out, progress=False, title="noise"), worker)


def essence(outcome):
    candidates = [outcome.store.load(f"candidates-{start:06d}")["candidates"] for start in (0, 3, 6)]
    return outcome.records, [part.tolist() for part in candidates]


def test_memory_and_folder_hold_the_same(tmp_path):
    here, there = run(made())["one"], run(made(), out=tmp_path)["one"]
    assert essence(here) == essence(there)
    kept = [[one[key] for key in ("index", "sample", "twice")] for one in here.records]
    assert kept == [[i, i, 2 * i] for i in range(7)]
    assert here.spent("attack").forward == 7


def test_a_worker_is_given_no_more_than_an_attacker_has():
    names = ["attack", "target", "inputs", "labels", "threat_model", "stream", "rows", "counted", "global_seed"]
    assert sorted(field.name for field in fields(Task)) == sorted(names)


def test_any_worker_will_do_and_is_not_believed():
    """What a worker returns is verified by who made the task; its own words on success are none."""

    def liar(task):
        return TaskResult(candidates=task.inputs + 5, seconds=0.0, passes={"forward": 0, "backward": 0})

    assert {record["outcome"] for record in run(made(), worker=liar)["one"].records} == {"out_of_bounds"}
    with pytest.raises(AttackError, match="one: returned str"):
        run(made(), worker=lambda task: replace(liar(task), candidates="found"))


@pytest.mark.parametrize("stop_at", [1, 2, 3])
def test_goes_on_where_it_was(tmp_path, stop_at):
    calls = []

    def worker(task):
        calls.append(len(task.inputs))
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        return run_task(task)

    with pytest.raises(KeyboardInterrupt):
        run(made(), out=tmp_path, worker=worker)
    assert essence(run(made(), out=tmp_path, worker=worker)["one"]) == essence(run(made())["one"])
    assert len(calls) == 4


def test_refusals_are_raised_or_reported():
    @dataclass(frozen=True, kw_only=True)
    class Refused(Noise):
        def prepare(self, store):
            raise AttackRefusedError("not here")

    with pytest.raises(AttackRefusedError, match="not here"):
        run(made(kind=Refused))
    outcomes = run(made(kind=Refused, refusable=True), made(key="two"))
    assert (outcomes["one"].refusal, len(outcomes["one"].records)) == ("not here", 0)
    assert (outcomes["two"].refusal, len(outcomes["two"].records)) == (None, 7)


def test_repairing_runs_the_damaged_block_and_no_other(tmp_path):
    whole, calls = essence(run(made(), out=tmp_path)["one"]), []
    file = tmp_path / "one" / "records.jsonl"
    file.write_text(file.read_text().replace('"twice": 8', '"twice": 9'))

    def worker(task):
        calls.append(len(task.inputs))
        return run_task(task)

    with pytest.raises(RunFolderError, match=r"records\.jsonl: line \d+ \(after sample 3\) does not match"):
        run(made(), out=tmp_path, worker=worker)
    with repairing():
        assert essence(run(made(), out=tmp_path, worker=worker)["one"]) == whole
    assert calls == [3]


def test_a_folder_of_other_points_from_the_same_seed_is_refused(tmp_path, monkeypatch):
    run(made(), out=tmp_path)
    monkeypatch.setattr("robust_ext.engine.run.STREAMS", 3)
    with pytest.raises(RunFolderError, match="streams: begun by a version that draws other points from the same seed"):
        run(made(), out=tmp_path)
