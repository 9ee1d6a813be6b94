"""Robust accuracy: closed forms on a linear model, curves by brute force, resuming."""

import json
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from robust_ext import robust_accuracy
from robust_ext.attacks.base import Attack, AttackTraits
from robust_ext.core.errors import AttackRefusedError, InvalidArgumentError
from robust_ext.core.threat import ThreatModel
from robust_ext.evaluations.robust_accuracy.api import curve, differences

EPSILONS = [0.05, 0.2, 0.4]
L2 = ThreatModel(norm="l2", epsilon=0.2, bounds=(-5.0, 6.0))


class Towards(Attack):
    """Steps straight to the boundary of a linear model and beyond: exact, where no bound is in the way."""

    def __init__(self, network, *, minimum_norm):
        self.name = "exact"
        self.traits = AttackTraits(batching="full", minimum_norm=minimum_norm)
        self.network = network
        # One for all copies of the attack, and none of its settings.
        self.calls = Mock()

    def search(self, target, inputs, labels, *, threat_model, generator):
        self.calls(len(inputs))
        if not self.traits.minimum_norm:
            return inputs + threat_model.epsilon * self._direction(inputs, labels)
        margin = self.network(inputs).diff(dim=1)[:, 0] * (1 - 2 * labels)
        # Rounding aside, this is the smallest; classes are 0 and 1.
        distance = (-margin / torch.linalg.vector_norm(self._weights())).clamp_min(0) * 1.0001 + 1e-6
        return inputs + distance[:, None, None, None] * self._direction(inputs, labels)

    def _weights(self):
        return self.network[1].weight.diff(dim=0)[0]

    def _direction(self, inputs, labels):
        unit = self._weights() / torch.linalg.vector_norm(self._weights())
        return (unit.view(1, *inputs.shape[1:]) * (1 - 2 * labels).view(-1, 1, 1, 1)).detach()


@pytest.fixture(scope="module")
def linear():
    torch.manual_seed(3)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 2)).eval()
    inputs = 0.5 + 0.1 * torch.randn(40, 1, 4, 4)
    with torch.no_grad():
        network[1].bias.sub_(network(inputs).mean(0))
        labels = network(inputs).argmax(1)
        labels[:4] = 1 - labels[:4]
        logits = network(inputs)
    network.requires_grad_(False)
    distances = (logits[:, 1] - logits[:, 0]).abs() / torch.linalg.vector_norm(network[1].weight.diff(dim=0)[0])
    return network, inputs.clamp(0, 1), labels, distances.numpy()


@pytest.mark.parametrize("minimum_norm", [True, False])
def test_closed_form_on_a_linear_model(linear, minimum_norm):
    network, inputs, labels, distances = linear
    attack = Towards(network, minimum_norm=minimum_norm)
    result = robust_accuracy(network, attack, inputs, labels, L2, epsilons=EPSILONS, batch_size=15)
    assert attack.calls.call_count == 3 * (1 if minimum_norm else len(EPSILONS))
    known = np.where(np.arange(40) < 4, 0, distances)
    for epsilon in EPSILONS:
        assert result.robust_accuracy(epsilon) == (known > epsilon).mean()
        assert result.robust_accuracy(epsilon, attack="exact") == (known > epsilon).mean()
    assert result.content["clean_accuracy"] == 0.9
    found = result.attacks["exact"]["distances"]
    if minimum_norm:
        np.testing.assert_allclose(found, known, rtol=1e-3, atol=1e-4)
    else:
        assert found is None


@given(
    smallest=st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, float("inf")]), max_size=12),
    epsilons=st.lists(st.sampled_from([0.05, 0.1, 0.3, 0.5]), min_size=1, max_size=4, unique=True),
)
def test_curves_by_counting(smallest, epsilons):
    rows = curve(np.array(smallest), sorted(epsilons), slack=[0.0] * len(epsilons))
    for row in rows:
        robust = sum(value > row["epsilon"] for value in smallest)
        assert row["robust_accuracy"] == (robust / len(smallest) if smallest else None)
        if smallest:
            assert row["interval"][0] <= row["robust_accuracy"] <= row["interval"][1]
    values = [row["robust_accuracy"] for row in rows]
    assert not smallest or values == sorted(values, reverse=True)


def test_differences_to_the_best():
    """The lowest at each budget is the best, whichever attack it is of."""
    curves = [[{"robust_accuracy": value} for value in values] for values in ([0.9, 0.5], [0.8, 0.6], [0.9, 0.9])]
    found = differences(curves)
    assert [round(row["mean"], 12) for row in found] == [0.05, 0.05, 0.25]
    assert [round(row["maximum"], 12) for row in found] == [0.1, 0.1, 0.4]
    assert differences([]) == []


def test_worst_case_is_that_of_each_sample(linear):
    """Two attacks that each break one half break everything together."""
    network, inputs, labels, _ = linear

    def half(start):
        def attack(model, x, y):
            far = x + 5 * (0.5 - y.view(-1, 1, 1, 1)) * 2 * network[1].weight.diff(dim=0)[0].view(1, 1, 4, 4).sign()
            rows = torch.arange(len(x)).view(-1, 1, 1, 1) % 2 == start
            return torch.where(rows, far, x)

        return attack

    threat_model = ThreatModel(norm="linf", epsilon=5.0, bounds=(-9.0, 9.0))
    result = robust_accuracy(network, {"even": half(0), "odd": half(1)}, inputs, labels, threat_model)
    assert result.robust_accuracy(5.0) == 0
    for name in ("even", "odd"):
        assert 0.3 < result.robust_accuracy(5.0, attack=name) < 0.7


def test_found_with_less_counts_for_more(linear):
    """An attack that only works at the smaller budget still lowers the curve at the larger one."""
    network, inputs, labels, _ = linear

    def shy(model, x, y, epsilon):
        step = epsilon if epsilon < 1 else 0.0
        return x + step * (1 - 2 * y.view(-1, 1, 1, 1)) * network[1].weight.diff(dim=0)[0].view(1, 1, 4, 4).sign()

    threat_model = ThreatModel(norm="linf", epsilon=0.9, bounds=(-9.0, 9.0))
    result = robust_accuracy(network, {"shy": shy}, inputs, labels, threat_model, epsilons=[2.0])
    assert result.robust_accuracy(0.9) == result.robust_accuracy(2.0) == 0


def test_folder(linear, tmp_path):
    """It goes on, and takes further attacks and budgets, without running a finished attack again."""
    network, inputs, labels, _ = linear
    exact = Towards(network, minimum_norm=True)
    robust_accuracy(network, exact, inputs, labels, L2, out=tmp_path)
    more = {"exact": exact, "APGD": "robust_ext:APGD(steps=5)"}
    result = robust_accuracy(network, more, inputs, labels, L2, epsilons=EPSILONS, out=tmp_path)
    exact.calls.assert_called_once_with(40)
    saved = json.loads((tmp_path / "result.json").read_text())
    assert saved == json.loads(json.dumps({"format": 2, **result.content}))
    fresh = robust_accuracy(network, more, inputs, labels, L2, epsilons=EPSILONS)
    assert fresh.content["worst_case"] == saved["worst_case"]


def test_names_alike_but_for_signs_are_two_attacks(linear, tmp_path):
    network, inputs, labels, _ = linear
    same = dict.fromkeys(("b 1%", "b_1"), "robust_ext:APGD(steps=1)")
    result = robust_accuracy(network, same, inputs, labels, L2, out=tmp_path)
    assert [*result.attacks] == [*same]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epsilons": []}, "epsilons"),
        ({"epsilons": 0.1}, "epsilons"),
        ({"epsilons": [0.1, 0.1]}, "once"),
        ({"epsilons": [-0.1]}, "epsilons"),
        ({"epsilon": [0.1]}, "did you mean epsilons"),
    ],
)
def test_bad_input(linear, change, words):
    network, inputs, labels, _ = linear
    with pytest.raises(InvalidArgumentError, match=words):
        robust_accuracy(network, "robust_ext:APGD(steps=2)", inputs, labels, L2, **change)
    with pytest.raises(AttackRefusedError, match="linf"):
        robust_accuracy(network, "foolbox:LinfPGD(steps=2)", inputs, labels, L2)
