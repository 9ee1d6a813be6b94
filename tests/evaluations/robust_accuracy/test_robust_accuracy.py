"""Robust accuracy: closed forms on a linear model, curves by brute force, resuming, and each sample."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from robust_ext import ThreatModel, robust_accuracy
from robust_ext.attacks.base import Attack, AttackTraits
from robust_ext.evaluations.robust_accuracy.api import curve
from tests.evaluations.small import INPUTS, LABELS, LINF, NETWORK, sign_step

EPSILONS = [0.05, 0.2, 0.4]
L2 = ThreatModel(norm="l2", epsilon=0.2, bounds=(-5.0, 6.0))


class Towards(Attack):
    """Steps straight to the boundary of a linear model and beyond: exact, where no bound is in the way."""

    def __init__(self, network, *, minimum_norm):
        self.name, self.network = "exact", network
        self.traits = AttackTraits(batching="full", minimum_norm=minimum_norm)
        # One for all copies of the attack, and none of its settings.
        self.calls = Mock()

    def search(self, target, inputs, labels, *, threat_model, generator):
        self.calls(len(inputs))
        weights, sides = self.network[1].weight.diff(dim=0)[0], 1 - 2 * labels
        length = torch.full(labels.shape, threat_model.epsilon)
        if self.traits.minimum_norm:
            margin = self.network(inputs).diff(dim=1)[:, 0] * sides
            # Rounding aside, this is the smallest; classes are 0 and 1.
            length = (-margin / weights.norm()).clamp_min(0) * 1.0001 + 1e-6
        return inputs + ((sides * length)[:, None] * weights / weights.norm()).view_as(inputs)


@pytest.fixture(scope="module")
def linear():
    torch.manual_seed(3)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 2)).eval().requires_grad_(False)
    inputs = 0.5 + 0.1 * torch.randn(40, 1, 4, 4)
    network[1].bias.sub_(network(inputs).mean(0))
    labels, logits = network(inputs).argmax(1), network(inputs)
    labels[:4] = 1 - labels[:4]
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


def test_worst_cases_are_those_of_each_sample_and_what_less_finds_counts_for_more(linear):
    network, inputs, labels, _ = linear

    def away(x, y, size):
        return x + size * (1 - 2 * y).view(-1, 1, 1, 1) * network[1].weight.diff(dim=0)[0].view(1, 1, 4, 4).sign()

    def half(start):
        return lambda model, x, y: torch.where(torch.arange(len(x)).view(-1, 1, 1, 1) % 2 == start, away(x, y, 0.9), x)

    # Two attacks that each break one half break everything together.
    given = inputs, labels, ThreatModel(norm="linf", epsilon=0.9, bounds=(-9.0, 9.0))
    result = robust_accuracy(network, {"even": half(0), "odd": half(1), "none": half(2)}, *given)
    assert result.robust_accuracy(0.9) == 0
    left = [result.robust_accuracy(0.9, attack=name) for name in result.attacks]
    assert all(0.3 < share < 0.7 for share in left[:2])
    apart = [one["difference"]["maximum"] for one in result.attacks.values()]
    assert apart == pytest.approx([share - min(left) for share in left])
    # An attack that only works at the smaller budget still lowers the curve at the larger one.
    shy = {"shy": lambda model, x, y, epsilon: away(x, y, epsilon if epsilon < 1 else 0.0)}
    result = robust_accuracy(network, shy, *given, epsilons=[2.0])
    assert result.robust_accuracy(0.9) == result.robust_accuracy(2.0) == 0


BUDGETS = [0.02, 0.1, 0.2]
# The first sample is misclassified as it is.
WRONG = torch.cat([(LABELS[:1] + 1) % 3, LABELS[1:]])
ATTACKS = {
    "search": "robust_ext:BoundarySearch(budget=200)",
    "square": "robust_ext:Square(queries=60)",
    "apgd": "robust_ext:APGD(steps=10)",
}


@pytest.fixture(scope="module")
def result():
    settings = {"epsilons": BUDGETS, "keep_candidates": True, "batch_size": 4}
    return robust_accuracy(NETWORK, ATTACKS, INPUTS, WRONG, LINF, **settings)


def test_successes_are_counted_among_samples_that_are_right_and_by_who_found_them(result):
    for row in result.rows():
        assert row["success_rate"] == pytest.approx((9 - round(10 * row["robust_accuracy"])) / 9)
    assert result.success_rate(0.1) == pytest.approx(1 - result.robust_accuracy(0.1) / 0.9)
    assert result.success_rate(0.1, attack="apgd") <= result.success_rate(0.1)
    for number, epsilon in enumerate(BUDGETS):
        found = result.found_by(epsilon)

        def broken(rows, number=number):
            return [place for place, one in enumerate(rows[number]["robust"]) if one == "0" and place]

        assert sorted(found) == broken(result.content["worst_case"])
        for name in ATTACKS:
            mine = [place for place, names in found.items() if name in names]
            assert mine == broken(result.attacks[name]["robust_accuracy"])


def test_the_nearest_examples(result):
    candidates = torch.from_numpy(result.candidates)
    far = (candidates - INPUTS).abs().flatten(1).amax(1)
    wrong = NETWORK(candidates).argmax(1) != WRONG
    nearest = {}
    for row in result.records:
        if row["broken_at"] is not None or (row["correct"] and row["outcome"] == "found"):
            nearest[row["index"]] = min(row["distance"], nearest.get(row["index"], np.inf))
    assert set(nearest) == {place for place in range(1, 10) if wrong[place]}
    assert far.tolist() == pytest.approx([nearest.get(place, 0) for place in range(10)], abs=1e-6)


def test_over_queries_by_counting(result):
    """What Square leaves by itself with so many queries."""
    first, *others = result.over_queries("square", 0.1)
    assert first == (0, 0.9)
    assert len(others) > 1
    for queries, robust in others:
        attack = {"square": f"robust_ext:Square(queries={queries}, schedule=60)"}
        again = robust_accuracy(NETWORK, attack, INPUTS, WRONG, LINF, batch_size=4)
        assert robust == pytest.approx(again.robust_accuracy(0.1))
    with pytest.raises(KeyError):
        result.over_queries("search", 0.1)
    # A function that returns what it did not query counts at the end of its queries.
    one = robust_accuracy(NETWORK, sign_step, INPUTS, LABELS, ThreatModel(norm="linf", epsilon=0.3))
    points = one.over_queries("sign_step", 0.3)
    assert [queries for queries, _ in points] == [0, 1]
    assert points[-1][1] == pytest.approx(one.robust_accuracy(0.3))
