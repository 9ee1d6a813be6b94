"""Models that take long: their probes are shown, take fewer rows, and end with the time that was given."""

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import robust_ext
from robust_ext import RobustExtWarning, ThreatModel
from robust_ext.core.errors import OutOfTimeError
from robust_ext.engine.context import current_context, run_context
from robust_ext.evaluations.causes.probes import probe_model
from tests.evaluations.steps import gradient

X = torch.rand(32, 1, 4, 4, generator=torch.Generator().manual_seed(0))
LINF = ThreatModel(norm="linf", epsilon=0.05)
torch.manual_seed(0)
NETWORK = nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3)).eval()
Y = NETWORK(X).argmax(1)


class Sleeps(nn.Module):
    """A layer that takes seconds for each pass."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.passes = seconds, []

    def forward(self, x):
        self.passes.append(len(x))
        time.sleep(self.seconds)
        return x * 1


class Tries(Sleeps):
    """One that catches whatever is raised inside."""

    def __init__(self, seconds):
        super().__init__(seconds)
        self.inner = nn.Identity()

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
    with (
        run_context(replace(current_context(), deadline=begun + seconds)),
        pytest.warns(RobustExtWarning, match="the time is over"),
    ):
        probe = probe_model(model, X, Y, threat_model=LINF)
    assert probe.findings == ()
    assert time.monotonic() - begun < seconds + 1
    assert len(slow.passes) <= 1 + seconds / 0.05
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_a_slow_defense_ends_with_its_minutes():
    layer, begun = Sleeps(0.2), time.monotonic()
    with pytest.raises(OutOfTimeError, match="probes of the defense: the time is over"):
        robust_ext.evaluate_defense(
            nn.Sequential(layer, NETWORK).eval(), None, X, Y, LINF, classifier=NETWORK, minutes=1 / 60
        )
    assert time.monotonic() - begun < 5


class Clock:
    """A clock that jumps a day ahead."""

    def __init__(self, monkeypatch):
        self.ahead, real = 0.0, time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: real() + self.ahead)

    def jump(self):
        self.ahead += 86_400


class Rounding(nn.Module):
    """Levels, of which no gradient comes back."""

    def forward(self, x):
        return (x * 15).round() / 15


FEW = {"planted": 4, "inner_points": 30, "queries": 10, "random_points": 10, "minutes": 600}
REFERENCES = ["random points", "one gradient step", "APGD on the margin", "APGD on the smoothed model", "Square"]


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def step(model, x, y, threat_model, end=lambda gradient, x: None):
    """One step, before which ``end`` may end the time."""
    slope = gradient(model, x, y)
    end(slope, x)
    model(x)
    return (x + threat_model.epsilon * slope.sign()).clamp(0, 1)


def step_until(end):
    def attack(model, x, y, threat_model):
        return step(model, x, y, threat_model, end)

    return attack


def test_a_diagnosis_ends_with_its_minutes(clock):
    attacks = {"first": step, "last": step_until(lambda *_: clock.jump())}
    with pytest.warns(RobustExtWarning, match="The time was over"):
        result = robust_ext.diagnose(NETWORK, attacks, X, Y, LINF, **FEW)
    whole = robust_ext.diagnose(NETWORK, {"first": step}, X, Y, LINF, **{**FEW, "minutes": None})
    assert result.content["left_out"] == ["last", *REFERENCES]
    assert whole.content["left_out"] == []
    assert [one["name"] for one in whole.content["references"]] == REFERENCES
    keys = ("name", "robust_accuracy", "score", "planted")
    ((cut,), (uncut,)) = (
        [{key: one[key] for key in keys} for one in each.content["attacks"]] for each in (result, whole)
    )
    assert cut == uncut


def test_no_attack_may_be_done_in_the_minutes(clock):
    with pytest.warns(RobustExtWarning, match="The time was over"):
        result = robust_ext.diagnose(NETWORK, {"only": step_until(lambda *_: clock.jump())}, X, Y, LINF, **FEW)
    assert result.content["attacks"] == result.content["references"] == []
    # Where not even the model's outputs are known, nothing can be stated.
    slow = Sleeps(0.0)
    slow.register_forward_hook(lambda *_: clock.jump())
    with pytest.raises(OutOfTimeError):
        robust_ext.diagnose(nn.Sequential(slow, NETWORK).eval(), {"only": step}, X, Y, LINF, **FEW)


def test_remedies_end_with_the_minutes(clock):
    rounded = nn.Sequential(Rounding(), NETWORK).eval()
    labels = rounded(X).argmax(1)

    def with_gradient(gradient, x):
        if gradient.any():
            clock.jump()

    keywords = {**FEW, "try_remedies": True, "references": False}
    result = robust_ext.diagnose(rounded, {"only": step}, X, labels, LINF, **keywords)
    assert result.content["tried"]
    assert result.content["left_out"] == []
    with pytest.warns(RobustExtWarning, match="The time was over"):
        cut = robust_ext.diagnose(rounded, {"only": step_until(with_gradient)}, X, labels, LINF, **keywords)
    assert (cut.content["tried"], cut.content["left_out"]) == ([], ["remedies"])
    assert cut.likely == replace(result.likely, remedies=cut.likely.remedies)
