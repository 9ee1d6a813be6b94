from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy.stats import beta, binom, binomtest
from torch import Tensor, nn

from robust_ext.attacks.native import Step
from robust_ext.attacks.random_search import RandomSearch
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.testing.networks import Centred
from tests.attacks import problems
from tests.attacks.problems import Bounds


class Linear(nn.Module):
    """Class 1 where ``weight . x > threshold``."""

    def __init__(self, weight: Tensor, threshold: float) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.threshold = threshold
        self.batches: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.batches.append(x)
        along = x.flatten(1) @ self.weight - self.threshold
        return torch.stack([-along, along], 1)


def search(
    attack: RandomSearch, module: nn.Module, x: Tensor, y: Tensor, threat_model: ThreatModel, seed: int, **extras: Any
) -> Tensor:
    return problems.search(attack, module, x, y, threat_model, seed=seed, **extras)[0]


def images(count: int, bounds: Bounds) -> Tensor:
    return problems.images(count, (1, 3, 4), bounds)


def network(bounds: tuple[float, float] = (0.0, 1.0)) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)
        return nn.Sequential(Centred(bounds), *layers).eval()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-2.0, 2.0)])
@pytest.mark.parametrize("targeted", [False, True])
def test_keeps_what_a_loop_over_the_points_it_queried_would_keep(
    norm: str, bounds: tuple[float, float], targeted: bool
) -> None:
    module = network(bounds)
    x = images(7, bounds)
    epsilon = {"linf": 0.1, "l2": 0.2, "l1": 0.3}[norm] * (bounds[1] - bounds[0])
    threat_model = ThreatModel(norm=norm, epsilon=epsilon, bounds=bounds)
    y = module(x).argsort(1)[:, 2 if targeted else 3]
    queried: list[Tensor] = []
    module.register_forward_pre_hook(lambda _, arguments: queried.append(arguments[0].clone()))
    out = search(RandomSearch(points=30), module, x, y, threat_model, 3, targeted=targeted)
    rounds = list(queried)
    assert all(points.shape == x.shape for points in rounds)
    assert all(bool(threat_model.contains(points, x).all()) for points in rounds)
    solved = 0
    for row in range(len(x)):
        kept, highest = x[row], -math.inf
        for points in rounds:
            logits = module(points[row : row + 1])[0].tolist()
            others = [value for column, value in enumerate(logits) if column != int(y[row])]
            margin = (logits[int(y[row])] - max(others)) * (1 if targeted else -1)
            if margin > highest:
                kept, highest = points[row], margin
            if margin > 0:
                solved += 1
                break
        assert torch.equal(out[row], kept)
    assert bool(threat_model.contains(out, x).all())
    assert 0 < solved < len(x)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("outer", ["corners", "surface"])
def test_inner_and_outer_points_take_turns(norm: str, outer: str) -> None:
    threat_model = ThreatModel(norm=norm, epsilon=0.25, bounds=(-5.0, 5.0))
    module = Linear(torch.zeros(12), 1.0)
    x = images(3, (0.0, 1.0))
    search(RandomSearch(points=25, outer=outer), module, x, torch.zeros(3, dtype=torch.int64), threat_model, 0)
    far = torch.stack([threat_model.distance(points, x) for points in module.batches])
    on_surface = (far - 0.25).abs() < 1e-6
    assert far.shape == (25, 3)
    assert on_surface.all(1).tolist() == [False, True] * 12 + [False]
    assert on_surface.any(1).tolist() == [False, True] * 12 + [False]
    corner = (module.batches[1] - x).abs().flatten(1)
    assert bool((corner.amax(1) - corner.amin(1) < 1e-6).all()) == (outer == "corners" and norm != "l1")


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.25, 5), (1 / 3, 6), (0.9, 18), (1.0, 20)])
def test_the_share_of_outer_points(share: float, expected: int) -> None:
    threat_model = ThreatModel(norm="linf", epsilon=0.25)
    module = Linear(torch.zeros(12), 1.0)
    x = torch.full((1, 1, 3, 4), 0.5)
    attack = RandomSearch(points=20, outer_share=share)
    search(attack, module, x, torch.zeros(1, dtype=torch.int64), threat_model, 0)
    corners = [bool(((points - x).abs() == 0.25).all()) for points in module.batches]
    assert sum(corners) == expected


def trials(
    attack: RandomSearch, weight: Tensor, threshold: float, threat_model: ThreatModel, *, rows: int = 3000
) -> int:
    """How many of many equal rows at zero are solved; each draws points of its own."""
    module = Linear(weight, threshold)
    x = torch.zeros(rows, len(weight))
    out = search(attack, module, x, torch.zeros(rows, dtype=torch.int64), threat_model, 11)
    return int((module(out).argmax(1) == 1).sum())


def assert_rate(hits: int, rows: int, probability: float) -> None:
    """A wrong rate fails here; a right one does once in a million seeds, and the seed is fixed."""
    assert 0.05 < probability < 0.95
    assert binomtest(hits, rows, probability).pvalue > 1e-6


@pytest.mark.parametrize("points", [1, 4])
def test_success_rate_of_corners_is_that_of_coin_flips(points: int) -> None:
    # 9 coordinates of +-1: their sum is above 4.5 where at least 7 are up.
    single = float(binom.sf(6, 9, 0.5))
    threat_model = ThreatModel(norm="linf", epsilon=1.0, bounds=(-2.0, 2.0))
    hits = trials(RandomSearch(points=points, outer_share=1.0), torch.ones(9), 4.5, threat_model)
    assert_rate(hits, 3000, 1 - (1 - single) ** points)


def test_success_rate_of_points_in_the_cube() -> None:
    threat_model = ThreatModel(norm="linf", epsilon=1.0, bounds=(-2.0, 2.0))
    weight = torch.tensor([1.0, 0.0, 0.0])
    hits = trials(RandomSearch(points=3, outer_share=0.0), weight, 0.6, threat_model)
    assert_rate(hits, 3000, 1 - 0.8**3)


def test_success_rate_on_the_sphere() -> None:
    # (1 + u) / 2 of a coordinate u of a point on the sphere in D dimensions is Beta((D - 1) / 2, (D - 1) / 2).
    threat_model = ThreatModel(norm="l2", epsilon=1.0, bounds=(-2.0, 2.0))
    weight = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])
    hits = trials(RandomSearch(points=2, outer="surface", outer_share=1.0), weight, 0.4, threat_model)
    assert_rate(hits, 3000, 1 - float(beta.cdf(0.7, 2, 2)) ** 2)


def test_success_rate_of_both_kinds_in_turn() -> None:
    # In one dimension inner points are uniform in [-1, 1] and corners its ends.
    threat_model = ThreatModel(norm="linf", epsilon=1.0, bounds=(-2.0, 2.0))
    hits = trials(RandomSearch(points=2), torch.ones(1), 0.8, threat_model)
    assert_rate(hits, 3000, 1 - 0.9 * 0.5)


def test_batches_that_share_a_generator_equal_one_batch() -> None:
    module, x = network(), images(6, (0.0, 1.0))
    y = module(x).argmax(1)
    threat_model = ThreatModel(norm="l2", epsilon=0.3)
    target = problems.target_of(module, (1, 3, 4))
    generator = torch.Generator().manual_seed(5)
    parts = [
        RandomSearch(points=20).search(target, a, b, threat_model=threat_model, generator=generator)
        for a, b in zip(x.split(4), y.split(4), strict=True)
    ]
    assert torch.equal(torch.cat(parts), search(RandomSearch(points=20), module, x, y, threat_model, 5))


def test_equal_rows_get_points_of_their_own() -> None:
    module, x = network(), images(1, (0.0, 1.0)).expand(5, -1, -1, -1)
    threat_model = ThreatModel(norm="l2", epsilon=0.01)
    out = search(RandomSearch(points=3), module, x, module(x).argmax(1), threat_model, 0)
    assert len(out.unique(dim=0)) == 5


def test_more_points_go_on_where_fewer_stop() -> None:
    threat_model = ThreatModel(norm="l1", epsilon=0.5)
    modules = [Linear(torch.zeros(12), 1.0) for _ in range(2)]
    for module, points in zip(modules, (13, 27), strict=True):
        x = images(2, (0.0, 1.0))
        search(RandomSearch(points=points), module, x, torch.zeros(2, dtype=torch.int64), threat_model, 4)
    few, many = (module.batches for module in modules)
    assert (len(few), len(many)) == (13, 27)
    assert all(torch.equal(a, b) for a, b in zip(few, many, strict=False))


def test_ends_when_all_rows_are_solved() -> None:
    module = Linear(torch.ones(1), -5.0)
    threat_model = ThreatModel(norm="linf", epsilon=1.0, bounds=(-2.0, 2.0))
    seen: list[Step] = []
    x = torch.zeros(4, 1)
    search(RandomSearch(), module, x, torch.zeros(4, dtype=torch.int64), threat_model, 0, watch=seen.append)
    assert len(module.batches) == 1
    assert [(step.number, step.total) for step in seen] == [(0, 400)]
    assert torch.equal(seen[0].points, module.batches[0])
    torch.testing.assert_close(seen[0].loss, 2 * (module.batches[0].squeeze(1) + 5))
    assert seen[0].gradient is None
