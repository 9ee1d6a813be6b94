"""The linear-region attack: what it finds, and what it promises of its results, passes and rows."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from robust_ext import as_attack
from robust_ext.attacks.linear_region.attack import LinearRegion
from robust_ext.attacks.linear_region.boundary import BoundarySearch
from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.search import RegionSearch, WarmStart
from robust_ext.attacks.linear_region.starts import _nearest
from robust_ext.attacks.linear_region.state import SearchState
from robust_ext.attacks.running import run_attack
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.random import stream
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.datasets import load_dataset
from tests.attacks import problems
from tests.attacks.linear_region.test_solver import ORDER
from tests.attacks.problems import images, target_of

BOUNDS = (0.0, 1.0)
# Rows sent through a network to record it, and to see that it does the same again.
RECORDED = 7
SMALL = {"draws": 3, "target_classes": 1, "start_steps": 8, "survivors": 2, "hops": 2, "regions": 6}


def relu_net(values, classes, *, hidden=12, seed=0):
    """A random network with a hidden layer whose units fold inside the unit box."""
    generator = torch.Generator().manual_seed(seed)
    weight, folds = torch.randn(hidden, values, generator=generator), torch.rand(hidden, values, generator=generator)
    first = linear_net(weight, -(weight * folds).sum(1))
    weight, bias = torch.randn(classes, hidden, generator=generator), torch.randn(classes, generator=generator)
    return nn.Sequential(first, nn.ReLU(), linear_net(weight, bias * 0.1)).eval()


def linear_net(weight, bias):
    network = nn.Linear(weight.shape[1], weight.shape[0])
    network.load_state_dict({"weight": weight, "bias": bias})
    return network.eval()


def predicted(target, points):
    """The network's classes, without counting."""
    return problems.predicted(target.module.module, points)


def attack(target, inputs, labels, *, norm="l2", seed=0, **chosen):
    threat_model, targeted = ThreatModel(norm=norm, epsilon=0.1, bounds=target.bounds), chosen.pop("targeted", False)
    given = {"threat_model": threat_model, "generator": stream(seed), "targeted": targeted}
    started = replace(target, starting_points=chosen.pop("starting_points", None))
    return LinearRegion(**{**SMALL, **chosen}).run(started, inputs, labels, **given)


def problem(*, rows=4, values=8, classes=4, seed=0):
    target = target_of(relu_net(values, classes, seed=seed), (values,), classes)
    inputs = images(rows, (values,), seed=seed + 1)
    return target, inputs, predicted(target, inputs)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_smallest_perturbation_in_the_plane_is_that_of_a_fine_grid(norm, seed):
    target, inputs, labels = problem(rows=3, values=2, classes=3, seed=seed)
    axis = torch.linspace(0, 1, 801, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    found_classes = predicted(target, grid.float())
    found = attack(target, inputs, labels, norm=norm, draws=6, survivors=6, regions=48, gamma=3, start_steps=60)
    for row in range(3):
        offsets = grid[found_classes != labels[row]] - inputs[row].double()
        nearest = float(torch.linalg.vector_norm(offsets, ord=ORDER[norm], dim=1).min())
        # Near the true nearest point lies one of the grid, in a corner of less than a cell's width a little farther.
        cell = float(torch.linalg.vector_norm(torch.ones(2) / 800, ord=ORDER[norm]))
        assert nearest - 2 * cell <= float(found.distances[row]) <= 1.001 * nearest


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("targeted", [False, True])
@pytest.mark.parametrize("bounds", [BOUNDS, (-2.0, 3.0)])
def test_results_are_adversarial_in_bounds_and_as_far_as_stated(norm, targeted, bounds):
    target = target_of(relu_net(8, 4), (8,), 4, bounds)
    inputs = images(5, (8,), bounds, seed=2)
    before, state = inputs.clone(), torch.random.get_rng_state()
    labels = (predicted(target, inputs) + targeted) % 4
    found = attack(target, inputs, labels, norm=norm, targeted=targeted)
    assert torch.equal(inputs, before)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert int(found.found.sum()) >= 3
    assert torch.equal(found.candidates[~found.found], inputs[~found.found])
    assert bool(((predicted(target, found.candidates) == labels) == targeted)[found.found].all())
    assert bool(((found.candidates >= bounds[0]) & (found.candidates <= bounds[1])).all())
    offsets = (found.candidates.double() - inputs.double())[found.found]
    torch.testing.assert_close(found.distances[found.found], torch.linalg.vector_norm(offsets, ord=ORDER[norm], dim=1))


def test_inputs_that_are_misclassified_come_back_as_they_are():
    target, inputs, labels = problem()
    found = attack(target, inputs, (labels + 1) % 4)
    assert torch.equal(found.candidates, inputs)
    assert bool(found.found.all())
    assert found.distances.tolist() == [0.0] * 4
    assert int(found.regions.sum()) == 0
    # One pass to see that, and those that record the network.
    assert (target.counter.forward, target.counter.backward) == (len(inputs) + RECORDED, 0)


@pytest.mark.parametrize("starts", [("noise",), ("nearest",), ("descent", "boundary")])
def test_a_constant_network_has_no_adversarial_points(starts):
    target = target_of(linear_net(torch.zeros(3, 4), torch.tensor([0.0, 1.0, 0.0])), (4,), 3)
    inputs = torch.rand(2, 4, generator=torch.Generator().manual_seed(0))
    found = attack(target, inputs, torch.tensor([1, 1]), starts=starts, pool=torch.rand(3, 4))
    assert torch.equal(found.candidates, inputs)
    assert not bool(found.found.any())
    assert bool(found.distances.isinf().all())
    assert int(found.regions.sum()) == 0


@pytest.mark.parametrize("classes", ["runner-up", "all"])
def test_a_row_alone_is_as_in_its_batch(classes):
    target, inputs, labels = problem(rows=4)
    together = attack(target, inputs, labels, classes=classes, batch=3)
    for row in range(4):
        generator, one = stream(0), slice(row, row + 1)
        for _ in range(row):
            torch.randint(0, 2**32, (), generator=generator, dtype=torch.int64)
        given = {"threat_model": ThreatModel(norm="l2", epsilon=0.1), "generator": generator}
        alone = LinearRegion(**SMALL, classes=classes).run(target, inputs[one], labels[one], **given)
        torch.testing.assert_close(alone.distances[0], together.distances[row], rtol=1e-3, atol=0)


def test_the_seed_decides():
    parts = problem(rows=6, values=20)
    runs = [
        attack(*parts, seed=seed, starts=("noise",), draws=1, start_steps=2, hops=0, regions=1).candidates
        for seed in (0, 0, 1)
    ]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("starts", [("descent", "noise"), ()])
@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_passes_are_counted(starts, norm):
    target, inputs, labels = problem(rows=3)
    sent = []
    target.module.module.register_forward_pre_hook(lambda _, given: sent.append(len(given[0])))
    given = torch.rand(3, 40, 8, generator=torch.Generator().manual_seed(5)) if not starts else None
    found = attack(target, inputs, labels, starts=starts, starting_points=given, norm=norm)
    spent = target.counter.forward + target.counter.backward
    # All but the pass that records the network are some row's own.
    assert spent == int(found.history[-1].passes.sum()) + RECORDED
    # Replays of the recorded network come on top of what went through the module.
    assert target.counter.forward > sum(sent)


@pytest.mark.parametrize("regions", [0, 1000])
def test_budgets_are_kept(regions):
    target, inputs, labels = problem(rows=3)
    for budget in (1, 40, 300):
        found = attack(target, inputs, labels, budget=budget, hops=1000, regions=regions)
        # What was under way may end: a step of all starts and a bisection, or a round of regions.
        most = 2 * 100 * 2 + 200 if regions else 100
        assert int(found.history[-1].passes.max()) <= budget + most
        assert budget > 1 or int(found.regions.sum()) == 0
    hurried = attack(target, inputs, labels, budget=0.1, budget_unit="seconds", hops=10**6, regions=10**6)
    assert bool(hurried.found.all())
    given = {"budget_unit": "seconds", "starting_points": hurried.candidates[:, None]}
    assert torch.equal(attack(target, inputs, labels, budget=1e-9, **given).distances, hurried.distances)


@pytest.mark.parametrize("seed", range(5))
def test_a_round_keeps_the_nearest_of_all_draws_of_a_start(seed, monkeypatch):
    """Whatever the order in which they are visited; the draws of a start lie side by side."""
    found, before = torch.rand(12, generator=stream(seed)), torch.tensor([1.0, 0.5, 0.0])
    state = SearchState.begin(torch.arange(3), -torch.ones(3, 1), before, [stream(0)] * 3, "noise")
    search = object.__new__(RegionSearch)
    search._attack, search._warm = LinearRegion(batch=99), WarmStart.blank(state.points, 1)
    nothing = torch.zeros(0, dtype=torch.int64)
    better = [(place, torch.full((1,), float(place)), found[place]) for place in range(12)]
    monkeypatch.setattr(RegionSearch, "_visit", lambda *_: (nothing, search._warm.select(nothing), better))
    ended = search.round(state, torch.arange(3), draws=4, number=0, improvement=0.01)
    nearest = found.view(3, 4).min(1)
    assert torch.equal(ended.distances, torch.minimum(nearest.values, before))
    kept = torch.where(nearest.values < before, torch.arange(3) * 4 + nearest.indices, -1)
    assert torch.equal(ended.points[:, 0], kept.float())


def test_the_class_runs_as_any_attack_and_can_be_watched():
    target, inputs, labels = problem()
    model, chosen = ThreatModel(norm="l2", epsilon=0.1), LinearRegion(**SMALL)
    out = run_attack(chosen, target, inputs, labels, threat_model=model, generator=stream(0))
    assert torch.equal(out, attack(target, inputs, labels).candidates)
    assert chosen.refusal(threat_model=model) is None
    assert "gamma=6.0" in chosen.description
    assert chosen.traits.minimum_norm
    assert "pool=tensor of shape (3, 8)" in LinearRegion(pool=torch.zeros(3, 8)).description
    shown = []
    chosen.search(target, inputs, labels, threat_model=model, generator=stream(0), watch=shown.append)
    assert [step.number for step in shown] == list(range(len(shown)))
    assert all(step.number < step.total for step in shown)
    # Before the first step there is nothing yet; from then on the nearest points so far.
    assert shown[0].loss.tolist() == [-torch.inf] * 4
    for step in shown:
        known = torch.isfinite(step.loss)
        assert bool((predicted(target, step.points) != labels)[known].all())
        step = replace(
            step, points=torch.where(known[:, None], step.points, inputs), loss=step.loss.nan_to_num(neginf=0)
        )
        torch.testing.assert_close(-step.loss, (step.points - inputs).double().norm(dim=1), rtol=1e-5, atol=1e-6)


class RoundsByBatch(nn.Module):
    """A network whose first logit is rounded otherwise in batches of fewer than this many rows."""

    def __init__(self, network, *, fewer, by):
        super().__init__()
        self.network, self.fewer, self.by = network, fewer, by
        self.eval()

    def forward(self, x):
        logits = self.network(x)
        return logits + self.by * torch.eye(logits.shape[1])[0] * (-1 if len(x) < self.fewer else 1)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("rows", "fewer"), [(3, 2), (3, 4), (1, 2)])
@pytest.mark.parametrize("by", [1e-5, -1e-4])
def test_the_nearest_points_are_adversarial_in_any_batch(norm, rows, fewer, by):
    _, inputs, labels = problem(rows=rows)
    network = RoundsByBatch(relu_net(8, 4), fewer=fewer, by=by)
    target, model = target_of(network, (8,), 4), ThreatModel(norm=norm, epsilon=0.1)
    search = BoundarySearch(draws=2, target_classes=1, start_steps=40, hops=2)
    found = search.run(target, inputs, labels, threat_model=model, generator=stream(0))
    several = network(found.candidates.repeat_interleave(9, 0)).argmax(1).view(rows, 9)[:, 0]
    alone = torch.cat([network(row[None]).argmax(1) for row in found.candidates])
    assert bool(found.found.all())
    assert bool((several != labels).all())
    assert bool((alone != labels).all())
    assert torch.equal(found.distances, model.distance(found.candidates, inputs))


def test_the_papers_algorithm_solves_every_class_of_all_its_regions_to_the_end():
    target, inputs, labels = problem(rows=3)
    pool = torch.rand(60, 8, generator=torch.Generator().manual_seed(5))
    given = {"threat_model": ThreatModel(norm="l2", epsilon=0.1), "generator": stream(0)}
    made = LinearRegion.paper(pool, points=3, regions=8)
    assert [made.sharing(number, 24) for number in (0, 3, 7)] == [(3, 1)] * 3
    found = made.run(target, inputs, labels, **given)
    assert {kind for kind in found.kinds if kind} == {"nearest"}
    # A region counts once, whatever the number of its classes.
    assert 0 < int(found.regions.max()) <= 24
    assert bool(found.found.all())
    started = replace(made, regions=0).run(target, inputs, labels, **given)
    assert bool((found.distances <= started.distances * (1 + 1e-6)).all())
    assert float(found.distances.mean()) < 0.9 * float(started.distances.mean())


def test_images_of_the_pool_that_the_network_gets_wrong_are_no_starts():
    """With labels the nearest image is sought among those that are right; brute force over the pool."""
    target, inputs, labels = problem(rows=3)
    pool = torch.rand(60, 8, generator=torch.Generator().manual_seed(5))
    threat_model, predicted = ThreatModel(norm="l2", epsilon=0.1), target.module(pool).argmax(1)

    def nearest(right):
        """Of the likeliest class other than the label that has an image."""
        found = []
        for row, label in zip(inputs, labels.tolist(), strict=True):
            ranked = target.module(row[None])[0].argsort(descending=True).tolist()
            aim = next(one for one in ranked if one != label and bool(((predicted == one) & right).any()))
            images = pool[(predicted == aim) & right]
            found.append(images[(images - row).norm(dim=1).argmin()])
        return torch.stack(found)

    def starts(pool_labels):
        made = LinearRegion.paper(pool, labels=pool_labels, points=1)
        oracle = BoundaryOracle(target, inputs, labels, threat_model=threat_model, targeted=False)
        return _nearest(oracle, pool, made.pool_labels, made.draws, made.batch)

    every = nearest(torch.ones(60, dtype=torch.bool))
    assert torch.equal(starts(None), every)
    # Those are labelled wrongly.
    pool_labels = torch.where((pool[:, None] == every).all(2).any(1), -1, predicted)
    assert torch.equal(starts(pool_labels), nearest(pool_labels == predicted))
    assert (starts(pool_labels) != every).any(1).all()
    with pytest.raises(InvalidArgumentError, match="pool_labels"):
        LinearRegion.paper(pool, labels=pool_labels[:3], regions=1).run(
            target, inputs, labels, threat_model=threat_model, generator=stream(0)
        )


def test_the_papers_algorithm_by_name():
    data = load_dataset("digits", split="train")
    made = as_attack("robust_ext:LinearRegion.paper(pool='digits', points=3, regions=400, gamma=9)")
    assert (made.draws, made.survivors, made.regions, made.iterations, made.gamma) == (3, 3, 1200, 500, 9)
    assert made.pool_labels.tolist() == data.labels.tolist()
    assert made.pool.shape == (len(data), 1, 8, 8)
    with pytest.raises(InvalidArgumentError, match="point="):
        as_attack("robust_ext:LinearRegion.paper(pool='digits', point=3)")
