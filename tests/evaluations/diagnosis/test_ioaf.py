"""The six indicators by their published definitions, on a network whose losses are known."""

import pytest
import torch
from torch import nn

from robust_ext import ThreatModel, diagnose
from robust_ext.evaluations.causes.indicators import ioaf, unstable_predictions
from tests.evaluations.diagnosis.traces import entry

LINF = ThreatModel(norm="linf", epsilon=0.1)
ADVERSARIAL = {"best": 1.0, "lowest": -3.0, "adversarial_at": 4, "recent": 0.0}


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("unavailable_gradients", {"trace": {"zero": 3}}, {"trace": {"zero": 0}}),
        ("unavailable_gradients", {"trace": {"graphs": 4, "gradients": 0}}, {"trace": {"graphs": 0, "gradients": 0}}),
        ("silent_success", {"trace": ADVERSARIAL}, {"trace": {"adversarial_at": None}}),
        ("silent_success", {"trace": ADVERSARIAL}, {"trace": ADVERSARIAL, "outcome": "found"}),
        (
            "incomplete_optimization",
            {"trace": {"best": -1.0, "lowest": -3.0, "recent": 0.101}},
            {"trace": {"best": -1.0, "lowest": -3.0, "recent": 0.099}},
        ),
        # A loss that never moves is finished, by their definition.
        (
            "incomplete_optimization",
            {"trace": {"best": -1.0, "lowest": -3.0, "recent": 2.0}},
            {"trace": {"best": -3.0, "lowest": -3.0, "recent": 0.0}},
        ),
    ],
)
def test_shares_of_samples(name, bad, good):
    entries = [entry(**bad), entry(**good), entry(**good), entry(**good)]
    assert ioaf(entries)[name] == 0.25


def test_what_was_not_measured_is_none_and_transfer_and_unbounded_attacks():
    fooled, kept = entry(outcome="found"), entry(trace={"adversarial_at": None})
    found = ioaf([fooled, kept])
    missing = ("unstable_predictions", "transfer_failure", "unconstrained_attack_failure")
    assert [found[name] for name in missing] == [None, None, None]
    found = ioaf([fooled, kept], unbounded=[fooled, kept, fooled, fooled], surrogate=[True, True])
    assert (found["unconstrained_attack_failure"], found["transfer_failure"]) == (0.25, 0.5)
    assert ioaf([])["silent_success"] is None


class Slope(nn.Module):
    """The margin of label 0 is the first value."""

    def forward(self, x):
        return torch.stack([x[:, 0], torch.zeros(len(x))], 1)


def test_unstable_predictions_in_closed_form():
    """At a margin of one half, u uniform in +-r moves the loss by |u| / .5, of mean r; a margin of 0 counts as 1."""
    inputs, labels = torch.tensor([[0.5, 0.5]] * 8), torch.zeros(8, dtype=torch.int64)
    found = unstable_predictions(Slope(), inputs, labels, threat_model=LINF, radius=0.3)
    assert found == pytest.approx(0.3, abs=0.03)
    assert unstable_predictions(Slope(), 0 * inputs, labels, threat_model=LINF, radius=0.3) == 1.0


def test_a_diagnosis_states_them_for_each_attack():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval()
    x = torch.rand(8, 1, 4, 4)
    settings = {"planted": 0, "queries": 5, "random_points": 5}
    result = diagnose(network, "robust_ext:APGD(steps=12)", x, network(x).argmax(1), LINF, **settings)
    (attack,) = result.content["attacks"]
    assert attack["ioaf"]["unavailable_gradients"] == attack["ioaf"]["unconstrained_attack_failure"] == 0.0
    assert 0 < attack["ioaf"]["unstable_predictions"] <= 1
    assert attack["ioaf"]["transfer_failure"] is None
