"""What an evaluation would cost against what it then took; what takes long ends with the time that was given."""

import cProfile
import pstats
import re
import time
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import robust_ext
from robust_ext import RobustExtWarning, ThreatModel
from robust_ext.cli.app import app
from robust_ext.core.cost import Cost
from robust_ext.core.errors import OutOfTimeError
from robust_ext.engine.context import current_context, run_context
from robust_ext.evaluations.causes.probes import probe_model
from tests.evaluations.diagnosis.zoo.layers import Rounding
from tests.evaluations.small import call
from tests.evaluations.subjects import SMALL, gradient, random_classifier, rounded

APGD, OTHER = "robust_ext:APGD(steps=10)", "foolbox:LinfPGD(steps=4)"
NETWORK, INPUTS, LABELS = random_classifier()
MANY = torch.rand(32, 1, 4, 4, generator=torch.Generator().manual_seed(0))
THEIRS, NEAR = NETWORK(MANY).argmax(1), ThreatModel(norm="linf", epsilon=0.05)

# Evaluations by their kind, attacks and settings, and the phases whose rows are known exactly before; others take at
# most what is stated.
CALLS = {
    "binarization": (APGD, {"depths": (1,), "canaries": 0, **SMALL}, {"features", "attack", "verify"}),
    "robust_accuracy": ([APGD], {"epsilons": (0.05, 0.1)}, {"attack", "verify"}),
    "mead": ([APGD], {}, {"attack", "verify"}),
    "test_time": (APGD, {"defense": rounded}, {"attack", "verify"}),
    "binarization, deeper": ([APGD, OTHER], SMALL, {"features"}),
}


@pytest.mark.parametrize("name", CALLS)
def test_rows_before_and_after(tmp_path, name):
    attacks, settings, exact = CALLS[name]

    def run():
        return call(name.split(",")[0], NETWORK, attacks, INPUTS, LABELS, out=tmp_path / "run", **settings)

    before = robust_ext.estimate(run)
    assert not (tmp_path / "run").exists()
    assert before.done == 0
    content = run().content
    rows = {(row["phase"], row["of"]): row for row in content["time"]["phases"]}
    assert set(before.costs) <= {*rows, ("random", None)}
    for key, cost in before.costs.items():
        for way in ("forward", "backward"):
            stated, counted = getattr(cost, way), rows[key][way]
            assert counted == pytest.approx(stated) if key[0] in exact else counted <= stated + 1e-6
    for column in ("forward", "backward", "seconds"):
        assert sum(row[column] for row in rows.values()) == pytest.approx(content["time"]["total"][column])
    assert rows["rest", None]["seconds"] >= 0
    after = robust_ext.estimate(run)
    assert (after.samples, after.done, after.total.forward) == (before.samples, before.samples, 0)
    taken = sum(file.stat().st_size for kind in ("records.jsonl", "arrays.bin") for file in tmp_path.rglob(kind))
    assert taken / 3 < before.size < taken * 3


@pytest.mark.parametrize(("norm", "masked"), [("linf", False), pytest.param("l2", True, marks=pytest.mark.exhaustive)])
def test_an_evaluation_is_estimated_with_its_certificate_and_search_at_most(tmp_path, norm, masked):
    model = nn.Sequential(Rounding(), NETWORK).eval() if masked else NETWORK

    def call():
        options = {"budget": "quick", "planted": 8, "out": tmp_path / "run"}
        return robust_ext.evaluate(model, INPUTS, LABELS, ThreatModel(norm=norm, epsilon=0.02), **options).content

    before = robust_ext.estimate(call)
    assert not (tmp_path / "run").exists()
    content = call()
    taken = {"suite": Cost(), "rest": Cost()}
    names = {one["name"] for one in content["steps"]}
    for row in content["time"]["phases"]:
        suite = row["phase"] == "attack" and row["of"].split(" ")[0] in names and norm in row["of"]
        taken["suite" if suite else "rest"] += Cost(row["forward"], row["backward"])
    certificate, search = (before.costs[name, None] for name in ("certificate", "search"))
    stated = sum((cost for (phase, _), cost in before.costs.items() if phase == "attack"), Cost())
    assert not before.total.unknown
    # The search ends a step later at most.
    assert 0.1 * stated.forward < taken["suite"].forward <= 1.05 * stated.forward
    assert taken["suite"].backward <= 1.05 * stated.backward
    assert (content["search"] is not None) == masked
    most = certificate.forward + before.costs["verify", None].forward + masked * search.forward
    assert taken["rest"].forward <= most


@pytest.mark.parametrize(
    "words",
    [
        "mead --detector=lid --arm=linf:0.1=robust_ext:APGD()",
        pytest.param(f"diagnose --attack={APGD} --eps=0.1", marks=pytest.mark.exhaustive),
    ],
)
def test_a_dry_run_of_a_command_prints_its_cost_and_writes_nothing(tmp_path, words):
    options = f"--samples=4 --dry-run --out={tmp_path / 'run'} --model=digits --data=digits --in-process"
    found = CliRunner().invoke(app, [*words.split(), *options.split()])
    assert found.exit_code == 0, found.output
    assert re.search(r"^in all +[\d,]+ +[\d,]+ +[\d.]+$", found.output, re.M)
    assert not (tmp_path / "run").exists()


class Sleeps(nn.Module):
    """A layer that takes seconds for each pass."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.passes = seconds, []

    def forward(self, x):
        self.passes.append(len(x))
        time.sleep(self.seconds)
        return x * 1


@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_probes_end_with_the_time_and_blame_nothing(seconds):
    slow = Sleeps(0.05)
    model, begun = nn.Sequential(slow, NETWORK).eval(), time.monotonic()
    ended = run_context(replace(current_context(), deadline=begun + seconds))
    with ended, pytest.warns(RobustExtWarning, match="the time is over"):
        probe = probe_model(model, MANY, THEIRS, threat_model=NEAR)
    assert probe.findings == ()
    assert time.monotonic() - begun < seconds + 1
    assert len(slow.passes) <= 1 + seconds / 0.05
    assert not any(part._forward_pre_hooks for part in model.modules())


FEW = {"planted": 4, "inner_points": 30, "queries": 10, "random_points": 10, "minutes": 600}
REFERENCES = ["random points", "one gradient step", "APGD on the margin", "APGD on the smoothed model", "Square"]


@pytest.fixture
def jump(monkeypatch):
    """Lets the clock jump a day ahead."""
    real, days = time.monotonic, []
    monkeypatch.setattr(time, "monotonic", lambda: real() + 86_400 * len(days))
    return lambda *_: days.append(1)


def step_until(end):
    """One step, before which ``end`` may end the time."""

    def step(model, x, y, threat_model):
        slope = gradient(model, x, y)
        end(slope)
        model(x)
        return (x + threat_model.epsilon * slope.sign()).clamp(0, 1)

    return step


step = step_until(lambda slope: None)


def test_a_diagnosis_ends_with_its_minutes(jump):
    with pytest.warns(RobustExtWarning, match="The time was over"):
        cut = robust_ext.diagnose(NETWORK, {"first": step, "last": step_until(jump)}, MANY, THEIRS, NEAR, **FEW).content
    whole = robust_ext.diagnose(NETWORK, {"first": step}, MANY, THEIRS, NEAR, **{**FEW, "minutes": None}).content
    assert (cut["left_out"], whole["left_out"]) == (["last", *REFERENCES], [])
    assert [one["name"] for one in whole["references"]] == REFERENCES
    ((one,), (other,)) = (each["attacks"] for each in (cut, whole))
    keys = ("name", "robust_accuracy", "score", "planted")
    assert [one[key] for key in keys] == [other[key] for key in keys]
    # No attack may be done in the minutes.
    with pytest.warns(RobustExtWarning, match="The time was over"):
        none = robust_ext.diagnose(NETWORK, {"only": step_until(jump)}, MANY, THEIRS, NEAR, **FEW).content
    assert none["attacks"] == none["references"] == []
    # Where not even the model's outputs are known, nothing can be stated.
    slow = Sleeps(0.0)
    slow.register_forward_hook(jump)
    with pytest.raises(OutOfTimeError):
        robust_ext.diagnose(nn.Sequential(slow, NETWORK).eval(), {"only": step}, MANY, THEIRS, NEAR, **FEW)


def test_calls_of_functions_grow_with_the_samples(tmp_path):
    """No other work on the machine disturbs their number."""
    listener, calls = Mock(spec=["on_record", "on_result"]), []
    for blocks in (2, 4, 8, 16):
        x = torch.rand(64 * blocks, 1, 4, 4, generator=torch.Generator().manual_seed(0))
        given = x, NETWORK(x).argmax(1), NEAR
        with cProfile.Profile() as profile:
            robust_ext.robust_accuracy(
                NETWORK, lambda model, x, y: x, *given, out=tmp_path / f"{blocks}", callbacks=[listener]
            )
        calls.append(pstats.Stats(profile).total_calls)
    # Twice as many more take twice as many more calls, beside what is made once; what is quadratic takes four times.
    assert calls[3] - calls[2] < 2.6 * (calls[2] - calls[1])
    assert listener.on_record.call_count == 64 * (2 + 4 + 8 + 16)
