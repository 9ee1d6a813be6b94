"""The standard suite: what it costs, where warm members begin, and targets that it has to fit."""

import pytest
import torch
from torch import nn

from robust_ext.attacks.base import Attack, AttackTraits
from robust_ext.attacks.linear_region.boundary import BoundarySearch
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.evaluations.evaluate import api, evaluate
from robust_ext.evaluations.evaluate.suite import Member

UNTESTED = {"planted": 0, "search": False}


def linear(classes, values):
    """A linear classifier, inputs in the middle of the bounds and their predictions, all of them about as likely."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(values, classes)).eval()
    inputs = 0.4 + 0.2 * torch.rand(24, values)
    network[1].bias.data -= network(inputs).mean(0).detach()
    return network, inputs, network(inputs).argmax(1)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize(("budget", "stated"), [("quick", 460), ("standard", 1750)])
def test_a_sample_that_stands_takes_the_passes_that_are_stated(budget, stated, norm):
    network, inputs, labels = linear(10, 16)
    inputs = inputs.view(-1, 1, 4, 4)
    content = evaluate(network, inputs, labels, ThreatModel(norm=norm, epsilon=1e-4), budget=budget, **UNTESTED).content
    robust = content["worst_case"]["robust"].count("1")
    assert robust > 20
    passes = sum(sum(one["passes"].values()) for one in content["steps"] if one["samples"] == robust)
    assert passes / robust == pytest.approx(stated, rel=0.05)


@pytest.mark.parametrize("norm", NORMS)
def test_two_classes_and_inputs_that_are_no_images(norm):
    network, inputs, labels = linear(2, 6)
    weight = (network[1].weight[1] - network[1].weight[0]).detach().double()
    dual = {"linf": weight.abs().sum(), "l2": weight.norm(), "l1": weight.abs().max()}[norm]
    logits = network.double()(inputs.double()).detach()
    distances = (logits[:, 1] - logits[:, 0]).abs() / dual
    network.float()
    epsilon = float(distances.sort().values[11:13].mean())
    assert epsilon < 0.3
    result = evaluate(network, inputs, labels, ThreatModel(norm=norm, epsilon=epsilon), budget="quick", **UNTESTED)
    expected = "".join("01"[bool(one > epsilon)] for one in distances)
    assert result.content["worst_case"]["robust"] == expected
    names = ["APGD-CE", "BoundarySearch", "APGD-T-warm", "APGD-T", "Square"]
    assert [one["name"] for one in result.content["steps"]] == names


class Recorder(Attack):
    name, traits = "Recorder", AttackTraits()

    def __init__(self):
        self.begun = []

    def search(self, target, inputs, labels, *, threat_model, generator):
        self.begun.append((inputs, target.starting_points))
        return inputs


def test_warm_members_begin_at_the_nearest_adversarial_points(monkeypatch):
    network, inputs, labels = linear(2, 6)
    recorder = Recorder()
    members = [
        Member(attack=BoundarySearch(budget=200), white_box=True),
        Member(attack=recorder, white_box=False, warm=True),
    ]
    monkeypatch.setattr(api, "standard_suite", lambda *_, **__: members)
    logits = network(inputs).detach()
    weight = (network[1].weight[1] - network[1].weight[0]).detach()
    distances = (logits[:, 1] - logits[:, 0]).abs() / weight.abs().sum()
    threat_model = ThreatModel(norm="linf", epsilon=float(distances.sort().values[11:13].mean()))
    evaluate(network, inputs, labels, threat_model, **UNTESTED)
    rows = distances > threat_model.epsilon
    ((begun, points),) = recorder.begun
    assert torch.equal(begun, inputs[rows])
    # All of them lie outside the ball, where the classifier's boundary is.
    torch.testing.assert_close((points[:, 0] - begun).abs().amax(1), distances[rows], rtol=5e-3, atol=0)
    assert bool((network(points[:, 0]).argmax(1) != labels[rows]).all())
