"""The linear-region attack and the search along the boundary: what they find, and what they promise."""

import copy
import math
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, kstest
from torch import nn

from robust_ext.attacks.linear_region.attack import LinearRegion
from robust_ext.attacks.linear_region.boundary import BoundarySearch
from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.plane_steps import fab_steps, then_trust_region, trust_region_steps
from robust_ext.attacks.linear_region.search import sample_near
from robust_ext.attacks.linear_region.state import KINDS
from robust_ext.attacks.linear_region.stepping import descent_steps, proximal_steps
from robust_ext.core.random import stream
from robust_ext.core.threat import NORMS, ThreatModel
from tests.attacks import problems
from tests.attacks.linear_region.test_solver import ORDER, exact, in_norms
from tests.attacks.problems import Lambda, images, target_of

# Rows sent through a network to record it, and to see that it does the same again.
RECORDED = 7
SMALL = {"draws": 3, "target_classes": 1, "start_steps": 8, "survivors": 2, "hops": 2, "regions": 6}


def linear_net(weight, bias):
    network = nn.Linear(weight.shape[1], weight.shape[0])
    network.load_state_dict({"weight": weight, "bias": bias})
    return network.eval()


def relu_net(values, classes, *, hidden=12, seed=0):
    """A random network with a hidden layer whose units fold inside the unit box."""
    generator = torch.Generator().manual_seed(seed)
    weight, folds = torch.randn(hidden, values, generator=generator), torch.rand(hidden, values, generator=generator)
    first = linear_net(weight, -(weight * folds).sum(1))
    weight, bias = torch.randn(classes, hidden, generator=generator), torch.randn(classes, generator=generator)
    return nn.Sequential(first, nn.ReLU(), linear_net(weight, bias * 0.1)).eval()


MIDDLE = {
    "gelu": lambda values: [nn.Linear(values, 8), nn.GELU()],
    "group norm": lambda values: [nn.Linear(values, 8), nn.GroupNorm(2, 8), nn.SiLU()],
}


def smooth_net(values, kind="gelu", seed=0):
    """A small drawn network of which every one of three classes has some of the unit box."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = nn.Sequential(*MIDDLE[kind](values), nn.Linear(8, 3)).eval()
    with torch.no_grad():
        network[-1].bias -= network(images(200, (values,))).mean(0)
    return network


def predicted(target, points):
    """The network's classes, without counting."""
    return problems.predicted(target.module.module, points)


def region(**chosen):
    return LinearRegion(**{**SMALL, **chosen})


def run(made, target, inputs, labels, *, norm="l2", seed=0, points=None, **extras):
    threat_model = ThreatModel(norm=norm, epsilon=0.1, bounds=target.bounds)
    started = replace(target, starting_points=points)
    return made.run(started, inputs, labels, threat_model=threat_model, generator=stream(seed), **extras)


def problem(*, rows=4, values=8, classes=4, bounds=(0.0, 1.0), seed=0, network=None):
    target = target_of(network or relu_net(values, classes, seed=seed), (values,), classes, bounds)
    inputs = images(rows, (values,), bounds, seed=seed + 1)
    return target, inputs, predicted(target, inputs)


@in_norms
@pytest.mark.parametrize("kind", MIDDLE)
def test_the_smallest_perturbation_in_the_plane_is_that_of_a_fine_grid(kind, norm):
    target, inputs, labels = problem(rows=3, values=2, classes=3, network=smooth_net(2, kind), seed=3)
    axis = torch.linspace(0, 1, 801, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    classes = predicted(target, grid.float())
    assert len(classes.unique()) > 1
    found = run(BoundarySearch(draws=4, start_steps=20, survivors=3, hops=4), target, inputs, labels, norm=norm)
    assert bool((predicted(target, found.candidates) != labels).all())
    # Near the true nearest point lies one of the grid, in a corner of less than a cell's width a little farther.
    cell = float(torch.linalg.vector_norm(torch.ones(2) / 800, ord=ORDER[norm]))
    for row in range(3):
        offsets = grid[classes != labels[row]] - inputs[row].double()
        nearest = float(torch.linalg.vector_norm(offsets, ord=ORDER[norm], dim=1).min())
        assert nearest - 2 * cell <= float(found.distances[row]) <= 1.02 * nearest + cell / 4


@in_norms
def test_results_are_the_optimum_over_all_regions(norm):
    """Of the nearest points in each of the 32 patterns of a hidden layer, by HiGHS and quadprog, the nearest."""
    network = relu_net(4, 3, hidden=5, seed=4)
    target, inputs, labels = problem(rows=2, values=4, classes=3, network=network, seed=4)
    weight, bias, outer, shift = (part.detach().double() for part in network.parameters())
    found = run(LinearRegion(budget=900), target, inputs, labels, norm=norm)
    for row, label in enumerate(labels.tolist()):
        best = torch.inf
        for pattern, other in product(product((0.0, 1.0), repeat=5), {0, 1, 2} - {label}):
            on = torch.tensor(pattern).double()
            signs, normal = 2 * on - 1, (outer[other] - outer[label]) * on
            matrix = torch.cat([signs[:, None] * weight, (normal @ weight)[None]])
            offset = torch.cat([signs * bias, (normal @ bias + shift[other] - shift[label])[None]])
            best = min(best, exact(norm, matrix.numpy(), offset.numpy(), inputs[row].double().numpy(), (0.0, 1.0)))
        assert best - 1e-6 <= float(found.distances[row]) <= 1.005 * best


@in_norms
@pytest.mark.parametrize("targeted", [False, True])
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-2.0, 3.0)])
def test_results_are_adversarial_in_bounds_and_as_far_as_stated(norm, targeted, bounds):
    target, inputs, labels = problem(rows=5, bounds=bounds)
    before, state, labels = inputs.clone(), torch.random.get_rng_state(), (labels + targeted) % 4
    found = run(region(), target, inputs, labels, norm=norm, targeted=targeted)
    assert torch.equal(inputs, before)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert int(found.found.sum()) >= 3
    assert torch.equal(found.candidates[~found.found], inputs[~found.found])
    assert bool(((predicted(target, found.candidates) == labels) == targeted)[found.found].all())
    assert bool(((found.candidates >= bounds[0]) & (found.candidates <= bounds[1])).all())
    offsets = (found.candidates.double() - inputs.double())[found.found]
    torch.testing.assert_close(found.distances[found.found], torch.linalg.vector_norm(offsets, ord=ORDER[norm], dim=1))


@settings(max_examples=6)
@given(norm=st.sampled_from(NORMS), seed=st.integers(0, 2**20), smooth=st.booleans(), budget=st.sampled_from([30, 400]))
def test_no_result_is_farther_than_any_start(norm, seed, smooth, budget):
    network = smooth_net(8, seed=seed) if smooth else relu_net(8, 3, seed=seed)
    target, inputs, labels = problem(rows=2, classes=3, network=network, seed=seed)
    # Points of other classes and of the inputs' own; those that are adversarial are limits.
    points = images(6, (8,), seed=seed + 2)
    distances = torch.linalg.vector_norm((points - inputs[:, None]).double(), ord=ORDER[norm], dim=2)
    limits = torch.where(predicted(target, points) != labels[:, None], distances, torch.inf).amin(1)
    kind, only_starts = (BoundarySearch, {"hops": 0}) if smooth else (LinearRegion, {"hops": 0, "regions": 0})
    # Starts get .4 of the budget where something follows them, and else all of it.
    alone, found = (
        run(
            kind(draws=2, target_classes=2, start_steps=6, **chosen),
            target,
            inputs,
            labels,
            norm=norm,
            points=points.expand(2, 6, 8),
        )
        for chosen in ({"budget": 0.4 * budget, **only_starts}, {"budget": budget, "hops": 1})
    )
    for result in (alone, found):
        assert bool((result.distances <= limits).all())
        assert bool((predicted(target, result.candidates) != labels)[result.found].all())
        assert [kind is not None for kind in result.kinds] == result.found.tolist()
        assert set(result.kinds) <= {*KINDS, None}
    assert bool((found.distances <= alone.distances).all())
    assert all(bool((later.distances <= earlier.distances).all()) for earlier, later in pairwise(found.history))


@pytest.mark.parametrize("starts", [("noise",), ("nearest",), ("descent", "boundary")])
def test_misclassified_inputs_and_constant_networks_end_at_the_input(starts):
    target, inputs, labels = problem()
    found = run(region(), target, inputs, (labels + 1) % 4)
    assert torch.equal(found.candidates, inputs)
    assert (found.distances.tolist(), bool(found.found.all()), int(found.regions.sum())) == ([0.0] * 4, True, 0)
    # One pass to see that, and those that record the network.
    assert (target.counter.forward, target.counter.backward) == (len(inputs) + RECORDED, 0)
    network = linear_net(torch.zeros(3, 8), torch.tensor([0.0, 1.0, 0.0]))
    target, inputs, labels = problem(classes=3, network=network)
    found = run(region(starts=starts, pool=torch.rand(3, 8)), target, inputs, labels)
    assert torch.equal(found.candidates, inputs)
    assert found.distances.tolist() == [torch.inf] * 4
    assert (bool(found.found.any()), int(found.regions.sum())) == (False, 0)


@pytest.mark.parametrize("classes", ["runner-up", "all"])
def test_a_row_alone_is_as_in_its_batch_and_the_seed_decides(classes):
    target, inputs, labels = problem()
    together = run(region(classes=classes, batch=3), target, inputs, labels)
    for row in range(4):
        generator, one = stream(0), slice(row, row + 1)
        torch.randint(0, 2**32, (row,), generator=generator, dtype=torch.int64)
        given = {"threat_model": ThreatModel(norm="l2", epsilon=0.1), "generator": generator}
        alone = region(classes=classes).run(target, inputs[one], labels[one], **given)
        torch.testing.assert_close(alone.distances[0], together.distances[row], rtol=1e-3, atol=0)
    short, parts = region(starts=("noise",), draws=1, start_steps=2, hops=0, regions=1), problem(rows=6, values=20)
    first, again, other = (run(short, *parts, seed=seed).candidates for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("starts", [("descent", "noise"), ()])
@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_passes_are_counted(starts, norm):
    (target, inputs, labels), sent = problem(), []
    target.module.module.register_forward_pre_hook(lambda _, given: sent.append(len(given[0])))
    points = torch.rand(4, 40, 8, generator=torch.Generator().manual_seed(5)) if not starts else None
    found = run(region(starts=starts), target, inputs, labels, points=points, norm=norm)
    spent = target.counter.forward + target.counter.backward
    # All but the pass that records the network are some row's own.
    assert spent == int(found.history[-1].passes.sum()) + RECORDED
    # Replays of the recorded network come on top of what went through the module.
    assert target.counter.forward > sum(sent)
    target.counter.forward = target.counter.backward = 0
    short = BoundarySearch(starts=("descent",), start_steps=5, target_classes=0, hops=0)
    assert set(run(short, target, inputs, labels).kinds) <= {"descent", None}
    # One pass of each input first, five steps, at most eight halvings, and three passes of each point that is found.
    assert target.counter.backward == 4 * 5
    assert 4 * 6 <= target.counter.forward <= 4 * 17


@pytest.mark.parametrize("regions", [0, 1000])
def test_budgets_are_kept(regions):
    parts = problem(rows=3)
    for budget in (1, 40, 300):
        found = run(region(budget=budget, hops=1000, regions=regions), *parts)
        # What was under way may end: a step of all starts and a bisection, or a round of regions.
        most = 2 * 100 * 2 + 200 if regions else 100
        assert int(found.history[-1].passes.max()) <= budget + most
        assert budget > 1 or int(found.regions.sum()) == 0
    hurried = run(region(budget=0.1, budget_unit="seconds", hops=10**6, regions=10**6), *parts)
    assert bool(hurried.found.all())
    again = run(region(budget=1e-9, budget_unit="seconds"), *parts, points=hurried.candidates[:, None])
    assert torch.equal(again.distances, hurried.distances)


@in_norms
@pytest.mark.parametrize(("rows", "fewer"), [(3, 2), (3, 4), (1, 2)])
@pytest.mark.parametrize("by", [1e-5, -1e-4])
def test_the_nearest_points_are_adversarial_in_any_batch(norm, rows, fewer, by):
    _, inputs, labels = problem(rows=rows)
    plain = relu_net(8, 4)
    # The first logit is rounded otherwise in batches of fewer rows.
    network = Lambda(lambda x: plain(x) + by * torch.eye(4)[0] * (-1 if len(x) < fewer else 1))
    search = BoundarySearch(draws=2, target_classes=1, start_steps=40, hops=2)
    found = run(search, target_of(network, (8,), 4), inputs, labels, norm=norm)
    several = network(found.candidates.repeat_interleave(9, 0)).argmax(1).view(rows, 9)[:, 0]
    alone = torch.cat([network(row[None]).argmax(1) for row in found.candidates])
    assert bool((found.found & (several != labels) & (alone != labels)).all())
    assert torch.equal(found.distances, ThreatModel(norm=norm, epsilon=1).distance(found.candidates, inputs))


def test_the_papers_algorithm_solves_every_class_of_all_its_regions_to_the_end():
    parts, pool = problem(rows=3), torch.rand(60, 8, generator=torch.Generator().manual_seed(5))
    made = LinearRegion.paper(pool, points=3, regions=8)
    assert [made.sharing(number, 24) for number in (0, 3, 7)] == [(3, 1)] * 3
    found, started = run(made, *parts), run(replace(made, regions=0), *parts)
    assert {kind for kind in found.kinds if kind} == {"nearest"}
    # A region counts once, whatever the number of its classes.
    assert 0 < int(found.regions.max()) <= 24
    assert bool((found.found & (found.distances <= started.distances * (1 + 1e-6))).all())
    assert float(found.distances.mean()) < 0.9 * float(started.distances.mean())


STEPS = 14


def sigmoid(t):
    return 1 / (1 + np.exp(-t))


class Plain:
    """One input of a network in float64, and the points at which it is looked at."""

    def __init__(self, network, x, label):
        self.network, self.x, self.label = copy.deepcopy(network).double(), x.double().numpy(), label
        self.seen = []

    def look(self, z):
        """Margin, its gradient, and whether the point is adversarial."""
        self.seen.append(z.copy())
        point = torch.from_numpy(z)[None].requires_grad_()
        logits = self.network(point)[0]
        others = torch.cat([logits[: self.label], logits[self.label + 1 :]])
        margin = others.max() - logits[self.label]
        (gradient,) = torch.autograd.grad(margin, point)
        margin, largest = float(margin.detach()), float(logits.detach().abs().max())
        return margin, gradient[0].numpy(), margin > 2e-6 * (1 + largest)

    def descents(self, norm):
        order = {"linf": np.inf, "l2": 2}[norm]
        u, known = np.zeros_like(self.x), np.inf
        for i in range(STEPS):
            m, g, adversarial = self.look(self.x + u)
            far, falling = np.linalg.norm(u, order), (1 + math.cos(math.pi * i / (STEPS - 1))) / 2
            known = min(known, far) if adversarial else known
            c = 0.001 + ({"linf": 0.1, "l2": 0.3}[norm] - 0.001) * falling
            length = 0.01 + ({"linf": 1.0, "l2": 5.0}[norm] - 0.01) * falling
            if i == 0:
                r = far + (0 if adversarial else abs(m) / np.linalg.norm(g, {"linf": 1, "l2": 2}[norm]))
            else:
                r = (1 - c) * min(r, far) if adversarial else min((1 + c) * r, known)
            u = u + length * r * (np.sign(g) if norm == "linf" else g / np.linalg.norm(g))
            u = np.clip(u, -r, r) if norm == "linf" else u * min(1, r / np.linalg.norm(u))
            u = np.clip(self.x + u, 0, 1) - self.x

    def proximal(self, norm):
        u, h, v = np.zeros_like(self.x), 0, 0
        nu, weight = math.log(100), sigmoid(math.log(100))
        for i in range(STEPS):
            m, g, adversarial = self.look(self.x + u)
            h, v = 0.9 * h + 0.1 * g * sigmoid(-m), 0.999 * v + 0.001 * (g * sigmoid(-m)) ** 2
            scale, length = np.sqrt(v / (1 - 0.999 ** (i + 1))), 0.3 * 0.01 ** (i / STEPS)
            u = np.clip(self.x + u + length * h / (1 - 0.9 ** (i + 1)) / scale, 0, 1) - self.x
            threshold = length * (1 - weight) / weight * np.minimum(1 / scale, 5 / scale.max())
            u = np.sign(u) * np.maximum(0, np.abs(u) - threshold)
            change = 0.01 + 0.09 * (1 - i / STEPS)
            nu = np.clip(nu - change if adversarial else nu + change, -math.log(1e6), math.log(1e6))
            weight = 0.9 * weight + 0.1 * sigmoid(nu)

    def boundary(self, norm):
        z = self.x.copy()
        for i in range(STEPS):
            m, g, _ = self.look(z)
            height = g @ z - m + 0.002 * np.linalg.norm(g) * np.linalg.norm(z - self.x)
            w = 0.5 * 0.1 ** (i / (STEPS - 1))
            z = (1 - w) * self.beyond(z, g, height) + w * self.beyond(self.x, g, height)
        self.seen.append(z)

    @staticmethod
    def beyond(v, g, height):
        """The nearest point of the box to v with g . a >= height, in l2: clip(v + t g), by bisection over t."""
        low, high = 0.0, 1e3
        for _ in range(200 if g @ v < height else 0):
            middle = (low + high) / 2
            low, high = (low, middle) if g @ np.clip(v + middle * g, 0, 1) >= height else (middle, high)
        return np.clip(v + low * g, 0, 1)


def path(take, network, inputs, norm, *, points=None, steps=STEPS):
    """The oracle after steps, all points at which the network was queried, ``(B, D)``, and what the steps returned."""
    target, seen = target_of(network, (8,), 3), []
    oracle = BoundaryOracle(
        target, inputs, predicted(target, inputs), threat_model=ThreatModel(norm=norm, epsilon=0.1), targeted=False
    )
    handle = target.module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()[0].numpy().copy()))
    points = inputs if points is None else points
    ended = take(oracle, points, torch.tensor([0]), steps=steps, going=lambda rows: rows >= 0)
    handle.remove()
    return oracle, np.stack(seen), ended


@pytest.mark.parametrize(
    ("take", "plain", "norm"),
    [
        (descent_steps, Plain.descents, "linf"),
        (descent_steps, Plain.descents, "l2"),
        (proximal_steps, Plain.proximal, "l1"),
        (fab_steps, Plain.boundary, "l2"),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_paths_are_those_of_the_formulas(take, plain, norm, seed):
    network, inputs = smooth_net(8, seed=seed), images(1, (8,), seed=seed)
    oracle, seen, _ = path(take, network, inputs, norm)
    expected = Plain(network, inputs[0], int(oracle.labels[0]))
    plain(expected, norm)
    assert len(seen) == len(expected.seen)
    np.testing.assert_allclose(seen, np.stack(expected.seen), atol=1e-4)
    assert np.abs(np.diff(np.stack(expected.seen), axis=0)).max() > 0.01


@pytest.mark.parametrize("seed", range(3))
def test_trust_region_steps_begin_where_steps_in_another_norm_ended(seed):
    network, inputs = smooth_net(8, seed=seed), images(1, (8,), seed=seed)
    both = partial(then_trust_region, first=descent_steps, last=5, norm="l2")
    oracle, seen, _ = path(both, network, inputs, "l1", steps=20)
    other, first, (points, _) = path(descent_steps, network, inputs, "l2", steps=15)
    _, last, _ = path(trust_region_steps, network, inputs, "l1", points=points, steps=5)
    np.testing.assert_array_equal(seen, np.concatenate([first, last]))
    assert int(oracle.passes[0]) == int(other.passes[0]) + 2 * 5 + 1


def test_samples_are_distributed_as_in_equations_12_to_14():
    count, values, q, gamma = 4000, 6, 0.8, 3.0
    inputs, delta = torch.zeros(1, values).double(), torch.tensor([[0.3, -0.2, 0.5, 0.1, -0.4, 0.2]]).double()
    rows, size = (inputs + delta).expand(count, values), float(delta.norm())
    streams = [stream(0, number) for number in range(count)]
    sampled = sample_near(rows, inputs.expand_as(rows), streams, q=q, gamma=gamma, bounds=(-9.0, 9.0))
    moved = (sampled - rows).numpy()
    r, outward = np.linalg.norm(moved, axis=1), (delta / size)[0].numpy()
    assert kstest((r / size) ** (1 / gamma), "uniform").pvalue > 0.01
    inward = -(moved @ outward) / r
    assert binomtest(int((inward > 0).sum()), count, q).pvalue > 0.01
    # X_2 is uniform in [0, pi], so that its sine has the distribution of that of a uniform angle in [0, pi / 2].
    assert kstest(np.arcsin(np.abs(inward).clip(0, 1)) / (np.pi / 2), "uniform").pvalue > 0.01
    across = moved + (inward * r)[:, None] * outward
    directions = across / np.linalg.norm(across, axis=1, keepdims=True)
    isotropic = (np.eye(values) - np.outer(outward, outward)) / (values - 1)
    np.testing.assert_allclose(directions.T @ directions / count, isotropic, atol=0.02)
    np.testing.assert_allclose(directions.mean(0), 0, atol=0.03)
