"""Models that take long, whose probes and diagnoses end with the time that was given; and runs of many samples."""

import cProfile
import pstats
import time
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import robust_ext
from robust_ext import RobustExtWarning, ThreatModel
from robust_ext.core.errors import OutOfTimeError
from robust_ext.engine.context import current_context, run_context
from robust_ext.evaluations.causes.probes import probe_model
from tests.evaluations.diagnosis.zoo.layers import Rounding
from tests.evaluations.small import NETWORK
from tests.evaluations.steps import gradient

X = torch.rand(32, 1, 4, 4, generator=torch.Generator().manual_seed(0))
Y = NETWORK(X).argmax(1)
LINF = ThreatModel(norm="linf", epsilon=0.05)


class Sleeps(nn.Module):
    """A layer that takes seconds for each pass."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.passes, self.inner = seconds, [], nn.Identity()

    def forward(self, x):
        self.passes.append(len(x))
        time.sleep(self.seconds)
        return x * 1


class Tries(Sleeps):
    """One that catches whatever is raised inside."""

    def forward(self, x):
        try:
            return self.inner(super().forward(x))
        except Exception:
            return x.detach()


@pytest.mark.parametrize("layer", [Sleeps, Tries])
@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_probes_end_with_the_time_and_blame_nothing(layer, seconds):
    slow = layer(0.05)
    model, begun = nn.Sequential(slow, NETWORK).eval(), time.monotonic()
    ended = run_context(replace(current_context(), deadline=begun + seconds))
    with ended, pytest.warns(RobustExtWarning, match="the time is over"):
        probe = probe_model(model, X, Y, threat_model=LINF)
    assert probe.findings == ()
    assert time.monotonic() - begun < seconds + 1
    assert len(slow.passes) <= 1 + seconds / 0.05
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_a_slow_defense_ends_with_its_minutes():
    model, begun = nn.Sequential(Sleeps(0.2), NETWORK).eval(), time.monotonic()
    with pytest.raises(OutOfTimeError, match="probes of the defense: the time is over"):
        robust_ext.evaluate_defense(model, None, X, Y, LINF, classifier=NETWORK, minutes=1 / 60)
    assert time.monotonic() - begun < 5


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
        cut = robust_ext.diagnose(NETWORK, {"first": step, "last": step_until(jump)}, X, Y, LINF, **FEW).content
    whole = robust_ext.diagnose(NETWORK, {"first": step}, X, Y, LINF, **{**FEW, "minutes": None}).content
    assert (cut["left_out"], whole["left_out"]) == (["last", *REFERENCES], [])
    assert [one["name"] for one in whole["references"]] == REFERENCES
    ((one,), (other,)) = (each["attacks"] for each in (cut, whole))
    keys = ("name", "robust_accuracy", "score", "planted")
    assert [one[key] for key in keys] == [other[key] for key in keys]
    # No attack may be done in the minutes.
    with pytest.warns(RobustExtWarning, match="The time was over"):
        none = robust_ext.diagnose(NETWORK, {"only": step_until(jump)}, X, Y, LINF, **FEW).content
    assert none["attacks"] == none["references"] == []
    # Where not even the model's outputs are known, nothing can be stated.
    slow = Sleeps(0.0)
    slow.register_forward_hook(jump)
    with pytest.raises(OutOfTimeError):
        robust_ext.diagnose(nn.Sequential(slow, NETWORK).eval(), {"only": step}, X, Y, LINF, **FEW)


def test_remedies_end_with_the_minutes(jump):
    rounded = nn.Sequential(Rounding(), NETWORK).eval()
    given = X, rounded(X).argmax(1), LINF
    keywords = {**FEW, "try_remedies": True, "references": False}
    result = robust_ext.diagnose(rounded, {"only": step}, *given, **keywords)
    assert result.content["tried"]
    assert result.content["left_out"] == []
    # A remedy is what brings a gradient.
    until = step_until(lambda slope: jump() if slope.any() else None)
    with pytest.warns(RobustExtWarning, match="The time was over"):
        cut = robust_ext.diagnose(rounded, {"only": until}, *given, **keywords)
    assert (cut.content["tried"], cut.content["left_out"]) == ([], ["remedies"])
    assert cut.likely == replace(result.likely, remedies=cut.likely.remedies)


def still(model, x, y):
    return x


def accuracy(inputs, **given):
    return robust_ext.robust_accuracy(NETWORK, still, inputs, NETWORK(inputs).argmax(1), LINF, **given)


def planted(inputs, **given):
    few = {"inner_points": 8, "random_inner": 2, "random_corners": 2, "depths": (1,), "canaries": 0, "batch_size": 64}
    return robust_ext.binarization_test(NETWORK, still, inputs, LINF, sequential=False, **few, **given)


@pytest.mark.parametrize("evaluation", [accuracy, pytest.param(planted, marks=pytest.mark.exhaustive)])
def test_calls_of_functions_grow_with_the_samples(evaluation, tmp_path):
    """No other work on the machine disturbs their number."""
    listener, calls = Mock(spec=["on_record", "on_result"]), []
    for blocks in (2, 4, 8, 16):
        inputs = torch.rand(64 * blocks, 1, 4, 4, generator=torch.Generator().manual_seed(0))
        with cProfile.Profile() as profile:
            evaluation(inputs, out=tmp_path / f"{blocks}", callbacks=[listener])
        calls.append(pstats.Stats(profile).total_calls)
    # Twice as many more take twice as many more calls, beside what is made once; what is quadratic takes four times.
    assert calls[3] - calls[2] < 2.6 * (calls[2] - calls[1])
    assert listener.on_record.call_count == 64 * (2 + 4 + 8 + 16)
