"""The portfolio of starts: no result is farther than any start, all norms against the optimum over all regions."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from robust_ext.attacks.linear_region.attack import LinearRegion
from robust_ext.attacks.linear_region.boundary import BoundarySearch
from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.state import KINDS
from robust_ext.attacks.linear_region.stepping import descent_steps, proximal_steps
from robust_ext.core.random import stream
from robust_ext.core.target import PassCounter
from robust_ext.core.threat import NORMS, ThreatModel
from tests.attacks.linear_region.test_attack import linear_net, predicted, problem, relu_net
from tests.attacks.linear_region.test_solver import ORDER, exact
from tests.attacks.problems import images, target_of

SMALL = {"draws": 2, "target_classes": 2, "start_steps": 6}


def smooth_net(seed):
    generator = torch.Generator().manual_seed(seed)
    first = linear_net(torch.randn(6, 8, generator=generator), torch.randn(6, generator=generator))
    return nn.Sequential(first, nn.GELU(), linear_net(torch.randn(3, 6, generator=generator), torch.zeros(3))).eval()


def run(attack, network, inputs, labels, norm, *, seed=0, points=None):
    target = target_of(network, (8,), 3)
    object.__setattr__(target, "starting_points", points)
    threat_model = ThreatModel(norm=norm, epsilon=0.1)
    return attack.run(target, inputs, labels, threat_model=threat_model, generator=stream(seed))


@settings(max_examples=6, deadline=None)
@given(norm=st.sampled_from(NORMS), seed=st.integers(0, 2**20), smooth=st.booleans(), budget=st.sampled_from([30, 400]))
def test_no_result_is_farther_than_any_start(norm, seed, smooth, budget):
    network = smooth_net(seed) if smooth else relu_net(8, 3, seed=seed)
    kind = BoundarySearch if smooth else LinearRegion
    inputs, pool = images(2, (8,), seed=seed + 1), images(30, (8,), seed=seed + 2)
    target = target_of(network, (8,), 3)
    labels, classes = predicted(target, inputs), predicted(target, pool)
    # Points of other classes and of the inputs' own; those that are adversarial are limits.
    points = pool[:6].expand(2, 6, 8)
    distances = torch.linalg.vector_norm((points - inputs[:, None]).double(), ord=ORDER[norm], dim=2)
    limits = torch.where(classes[:6] != labels[:, None], distances, torch.inf).amin(1)
    ended = {"hops": 0} if smooth else {"hops": 0, "regions": 0}
    # Starts get .4 of the budget where something follows them, and else all of it.
    alone = run(kind(**SMALL, budget=0.4 * budget, **ended), network, inputs, labels, norm, points=points)
    found = run(kind(**SMALL, budget=budget, hops=1), network, inputs, labels, norm, points=points)
    for result in (alone, found):
        assert bool((result.distances <= limits).all())
        assert bool((predicted(target, result.candidates) != labels)[result.found].all())
        assert [kind is not None for kind in result.kinds] == result.found.tolist()
        assert set(result.kinds) <= {*KINDS, None}
    assert bool((found.distances <= alone.distances).all())
    for earlier, later in zip(found.history, found.history[1:], strict=False):
        assert bool((later.distances <= earlier.distances).all())


@pytest.mark.parametrize("norm", NORMS)
def test_results_are_the_optimum_over_all_regions(norm):
    """Of the nearest points in each of the 32 patterns of a hidden layer, by HiGHS and quadprog, the nearest."""
    network = relu_net(4, 3, hidden=5, seed=4)
    inputs = images(2, (4,), seed=5)
    target = target_of(network, (4,), 3)
    labels = predicted(target, inputs)
    (first, _, last) = network
    weight, bias, outer, shift = (part.detach().double() for layer in (first, last) for part in layer.parameters())
    threat_model = ThreatModel(norm=norm, epsilon=0.1)
    found = LinearRegion(budget=900).run(target, inputs, labels, threat_model=threat_model, generator=stream(0))
    for row, label in enumerate(labels.tolist()):
        best = torch.inf
        for pattern in product((0.0, 1.0), repeat=5):
            on = torch.tensor(pattern).double()
            signs = (2 * on - 1)[:, None]
            for other in {0, 1, 2} - {label}:
                normal = (outer[other] - outer[label]) * on
                matrix = torch.cat([signs * weight, (normal @ weight)[None]])
                height = normal @ bias + shift[other] - shift[label]
                offset = torch.cat([signs[:, 0] * bias, height[None]])
                best = min(best, exact(norm, matrix.numpy(), offset.numpy(), inputs[row].double().numpy(), (0.0, 1.0)))
        assert best - 1e-6 <= float(found.distances[row]) <= 1.005 * best


@pytest.mark.parametrize("norm", NORMS)
def test_descents_reach_the_nearest_point_of_a_linear_network(norm):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(2, 10, generator=generator)
    inputs = 0.45 + 0.1 * torch.rand(5, 10, generator=generator)
    target = target_of(linear_net(weight, -weight.sum(1) / 2), (10,), 2)
    labels = predicted(target, inputs)
    model = ThreatModel(norm=norm, epsilon=0.1)
    oracle = BoundaryOracle(target, inputs, labels, threat_model=model, targeted=False)
    samples = torch.arange(5)
    take, count = (proximal_steps, 960) if norm == "l1" else (descent_steps, 80)
    points, distances = take(oracle, inputs, samples, steps=count, going=lambda rows: rows >= 0)
    normal = (weight[1] - weight[0]).double()
    dual = {"linf": 1, "l2": 2, "l1": torch.inf}[norm]
    expected = ((inputs.double() - 0.5) @ normal).abs() / torch.linalg.vector_norm(normal, ord=dual)
    assert bool((predicted(target, points) != labels).all())
    torch.testing.assert_close(distances, expected, rtol=0.1 if norm == "l1" else 0.01, atol=1e-5)
    assert torch.equal(oracle.nearest, distances)


def test_starts_that_win_are_named_and_classes_are_aimed_at():
    target, inputs, labels = problem()
    model = ThreatModel(norm="l2", epsilon=0.1)
    for kind in ("descent", "boundary", "noise"):
        chosen = BoundarySearch(starts=(kind,), start_steps=10, target_classes=3, hops=0)
        found = chosen.run(target, inputs, labels, threat_model=model, generator=stream(0))
        assert set(found.kinds) == {kind}
    target.counter.forward = target.counter.backward = 0
    none = BoundarySearch(starts=("descent",), start_steps=5, target_classes=0, hops=0)
    none.run(target, inputs, labels, threat_model=model, generator=stream(0))
    # One pass of each input first, five steps, at most eight halvings, and three passes of each point that is found.
    assert target.counter.backward == 4 * 5
    assert 4 * 6 <= target.counter.forward <= 4 * 17
    assert target.counter != PassCounter(0, 0)
