"""Models that take long: their probes are shown, take fewer rows, and end with the time that was given."""

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import robust_ext
from robust_ext import RobustExtWarning, ThreatModel
from robust_ext.core.errors import OutOfTimeError
from robust_ext.engine import progress
from robust_ext.engine.context import current_context, run_context
from robust_ext.engine.progress import showing
from robust_ext.evaluations.causes import output_probe
from robust_ext.evaluations.causes.probes import probe_model

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
@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.3])
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


def test_of_a_slow_model_fewer_rows_are_looked_at(monkeypatch):
    rows = []
    for slow in (10.0, 1e-9):
        monkeypatch.setattr(output_probe, "_SLOW", slow)
        layer = Sleeps(0)
        rows.append((probe_model(nn.Sequential(layer, NETWORK).eval(), X, Y, threat_model=LINF).rows, layer.passes))
    assert [count for count, _ in rows] == [32, 4]
    assert max(rows[1][1]) == 4


def test_passes_are_shown_as_they_come(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_FIRST", 0.0)
    monkeypatch.setattr(progress, "_LATER", 0.0)
    with showing("diagnosis", shown=True):
        probe_model(nn.Sequential(Sleeps(0), NETWORK).eval(), X, Y, threat_model=LINF)
    assert "probes of the model, pass 3" in capsys.readouterr().err


def test_a_slow_defense_ends_with_its_minutes():
    layer, begun = Sleeps(0.2), time.monotonic()
    with pytest.raises(OutOfTimeError, match="probes of the defense: the time is over"):
        robust_ext.evaluate_defense(
            nn.Sequential(layer, NETWORK).eval(), None, X, Y, LINF, classifier=NETWORK, minutes=1 / 60
        )
    assert time.monotonic() - begun < 5
    quick = robust_ext.evaluate_defense(
        nn.Sequential(Sleeps(0.0), NETWORK).eval(),
        "robust_ext:APGD(steps=2)",
        X,
        Y,
        LINF,
        classifier=NETWORK,
        minutes=9,
    )
    assert quick.content["not_run"] == []
