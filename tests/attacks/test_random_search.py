from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta, binom, binomtest
from torch import Tensor, nn

from robust_ext.attacks.native import Step
from robust_ext.attacks.random_search import RandomSearch
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.target import Target, module_device
from robust_ext.core.threat import NORMS, ThreatModel


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


def as_target(module: nn.Module, threat_model: ThreatModel, classes: int, shape: tuple[int, ...]) -> Target:
    return Target(
        module=module,
        bounds=threat_model.bounds,
        classes=classes,
        input_shape=shape,
        device=module_device(module),
    )


def search(
    attack: RandomSearch, module: nn.Module, x: Tensor, y: Tensor, threat_model: ThreatModel, seed: int, **extras: Any
) -> Tensor:
    classes = module(x[:1]).shape[1]
    target = as_target(module, threat_model, classes, tuple(x.shape[1:]))
    generator = torch.Generator().manual_seed(seed)
    return attack.search(target, x, y, threat_model=threat_model, generator=generator, **extras)


class Centred(nn.Module):
    """From inputs in the bounds to values in [-2, 2]."""

    def __init__(self, bounds: tuple[float, float]) -> None:
        super().__init__()
        self.bounds = bounds

    def forward(self, x: Tensor) -> Tensor:
        low, high = self.bounds
        return (x - low) / (high - low) * 4 - 2


def network(bounds: tuple[float, float] = (0.0, 1.0)) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)
        return nn.Sequential(Centred(bounds), *layers).eval()


def images(count: int, bounds: tuple[float, float]) -> Tensor:
    unit = torch.rand(count, 1, 3, 4, generator=torch.Generator().manual_seed(1))
    return unit * (bounds[1] - bounds[0]) + bounds[0]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-2.0, 2.0)])
@pytest.mark.parametrize("targeted", [False, True])
def test_keeps_what_a_loop_over_the_points_it_asked_for_would_keep(
    norm: str, bounds: tuple[float, float], targeted: bool
) -> None:
    module = network(bounds)
    x = images(7, bounds)
    epsilon = {"linf": 0.1, "l2": 0.2, "l1": 0.3}[norm] * (bounds[1] - bounds[0])
    threat_model = ThreatModel(norm=norm, epsilon=epsilon, bounds=bounds)
    y = module(x).argsort(1)[:, 2 if targeted else 3]
    asked: list[Tensor] = []
    module.register_forward_pre_hook(lambda _, arguments: asked.append(arguments[0].clone()))
    out = search(RandomSearch(points=30), module, x, y, threat_model, 3, targeted=targeted)
    rounds = asked[1:]  # The first is this test's own question for the number of classes.
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
    far = torch.stack([threat_model.distance(points, x) for points in module.batches[1:]])
    on_surface = (far - 0.25).abs() < 1e-6
    assert far.shape == (25, 3)
    assert on_surface.all(1).tolist() == [False, True] * 12 + [False]
    assert on_surface.any(1).tolist() == [False, True] * 12 + [False]
    corner = (module.batches[2] - x).abs().flatten(1)
    assert bool((corner.amax(1) - corner.amin(1) < 1e-6).all()) == (outer == "corners" and norm != "l1")


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.25, 5), (1 / 3, 6), (0.9, 18), (1.0, 20)])
def test_the_share_of_outer_points(share: float, expected: int) -> None:
    threat_model = ThreatModel(norm="linf", epsilon=0.25)
    module = Linear(torch.zeros(12), 1.0)
    x = torch.full((1, 1, 3, 4), 0.5)
    attack = RandomSearch(points=20, outer_share=share)
    search(attack, module, x, torch.zeros(1, dtype=torch.int64), threat_model, 0)
    corners = [bool(((points - x).abs() == 0.25).all()) for points in module.batches[1:]]
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


@given(size=st.integers(1, 5), points=st.integers(1, 25), seed=st.integers(0, 9))
@settings(deadline=None, max_examples=15)
def test_a_row_gets_the_same_whatever_the_other_rows_are(size: int, points: int, seed: int) -> None:
    module, x = network(), images(6, (0.0, 1.0))
    y = module(x).argmax(1)
    threat_model = ThreatModel(norm="linf", epsilon=0.1)
    attack = RandomSearch(points=points)
    together = search(attack, module, x, y, threat_model, seed)
    assert torch.equal(search(attack, module, x[:size], y[:size], threat_model, seed), together[:size])
    others = x.flip(0)
    others[size] = x[size]
    labels = module(others).argmax(1)
    assert torch.equal(search(attack, module, others, labels, threat_model, seed)[size], together[size])


def test_batches_that_share_a_generator_equal_one_batch() -> None:
    module, x = network(), images(6, (0.0, 1.0))
    y = module(x).argmax(1)
    threat_model = ThreatModel(norm="l2", epsilon=0.3)
    target = as_target(module, threat_model, 4, (1, 3, 4))
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
    few, many = (module.batches[1:] for module in modules)
    assert (len(few), len(many)) == (13, 27)
    assert all(torch.equal(a, b) for a, b in zip(few, many, strict=False))


def test_ends_when_all_rows_are_solved() -> None:
    module = Linear(torch.ones(1), -5.0)
    threat_model = ThreatModel(norm="linf", epsilon=1.0, bounds=(-2.0, 2.0))
    seen: list[Step] = []
    x = torch.zeros(4, 1)
    search(RandomSearch(), module, x, torch.zeros(4, dtype=torch.int64), threat_model, 0, watch=seen.append)
    assert len(module.batches) == 2
    assert [(step.number, step.total) for step in seen] == [(0, 400)]
    assert torch.equal(seen[0].points, module.batches[1])
    torch.testing.assert_close(seen[0].loss, 2 * (module.batches[1].squeeze(1) + 5))
    assert seen[0].gradient is None


def test_answers_of_nan_are_no_success() -> None:
    class Mute(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.new_full((len(x), 3), torch.nan)

    x = images(2, (0.0, 1.0))
    threat_model = ThreatModel(norm="linf", epsilon=0.1)
    out = search(RandomSearch(points=5), Mute(), x, torch.tensor([0, 1]), threat_model, 0)
    assert torch.equal(out, x)


def test_no_rows() -> None:
    x = torch.zeros(0, 1, 3, 4)
    target = as_target(network(), ThreatModel(norm="linf", epsilon=0.1), 4, (1, 3, 4))
    out = RandomSearch().search(
        target,
        x,
        torch.zeros(0, dtype=torch.int64),
        threat_model=ThreatModel(norm="linf", epsilon=0.1),
        generator=torch.Generator().manual_seed(0),
    )
    assert out.shape == x.shape


@pytest.mark.parametrize(
    "wrong", [{"points": 0}, {"points": 1.5}, {"outer": "middle"}, {"outer_share": -0.1}, {"outer_share": 1.1}]
)
def test_wrong_settings_raise(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        RandomSearch(**wrong)
