"""Distances, random points, projections and limits of single entries, against numpy, distributions and brute force."""

import hashlib
import itertools
import json
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from robust_ext.attacks._common.rows import project
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.threat import ThreatModel

NORMS = ("linf", "l2", "l1")
BOUNDS = ((0.0, 1.0), (-1.0, 1.0), (-2.5, 3.0))
DRAWS = ("sample_inner", "sample_surface", "sample_corners")
ORDER = {"linf": np.inf, "l2": 2, "l1": 1}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(threat_model, name, x, count, seed=0, **more):
    return getattr(threat_model, name)(x, count, key=seed, **more)


def offsets(points, x):
    return (points.double() - x.double()).flatten(1).numpy()


@pytest.mark.parametrize("norm", NORMS)
def test_distance_is_that_of_numpy(norm):
    """In float64, also for what float32 would round away; what is no number is in no ball."""
    threat_model = ThreatModel(norm=norm, epsilon=1)
    for shape, dtype in itertools.product([(5, 1), (3, 2, 4, 4), (0, 3)], [torch.float16, torch.float64]):
        a, b = (torch.randn(shape, generator=generator(seed)).to(dtype) for seed in (1, 2))
        found = threat_model.distance(a, b)
        rows = (a.double() - b.double()).numpy().reshape(shape[0], int(np.prod(shape[1:])))
        expected = [np.linalg.norm(row, ord=ORDER[norm]) if row.size else 0.0 for row in rows]
        assert found.dtype == torch.float64
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
    a = torch.tensor([[1.0]], dtype=torch.float64)
    assert float(threat_model.distance(a + 1e-12, a)) == pytest.approx(1e-12, rel=1e-3)
    candidates = torch.tensor([[torch.nan, 0.0], [torch.inf, 0.0], [0.1, 0.1]])
    assert threat_model.contains(candidates, torch.zeros(3, 2)).tolist() == [False, False, True]


@settings(max_examples=100)
@given(
    norm=st.sampled_from(NORMS),
    bounds=st.sampled_from(BOUNDS),
    name=st.sampled_from(DRAWS),
    epsilon=st.floats(1e-3, 20),
    shape=st.sampled_from([(), (1,), (2,), (3, 5), (1, 8, 8)]),
    seed=st.integers(0, 2**31),
    edge=st.booleans(),
)
def test_points_lie_in_bounds_and_in_the_ball(norm, bounds, name, epsilon, shape, seed, edge):
    threat_model = ThreatModel(norm=norm, epsilon=epsilon, bounds=bounds)
    x = torch.rand(shape, generator=generator(seed))
    x = (x.round() if edge else x) * threat_model.width + bounds[0]
    points = draw(threat_model, name, x, 20, seed)
    assert (points.shape, points.dtype) == ((20, *shape), torch.float32)
    assert bool(((points >= bounds[0]) & (points <= bounds[1])).all())
    assert bool(threat_model.contains(points.view(20, -1), x.reshape(1, -1).expand(20, -1)).all())


@pytest.mark.parametrize("bounds", BOUNDS)
def test_linf_corners_move_every_value_by_epsilon_or_to_its_bound_and_surface_points_one_that_has_room(bounds):
    for epsilon in (0.05, 0.4, 3.0):
        threat_model = ThreatModel(norm="linf", epsilon=epsilon, bounds=bounds)
        x = torch.rand(50, generator=generator(3)) * threat_model.width + bounds[0]
        points = draw(threat_model, "sample_corners", x, 40).numpy()
        lower, upper = np.clip(x.numpy() - epsilon, *bounds), np.clip(x.numpy() + epsilon, *bounds)
        is_lower, is_upper = np.isclose(points, lower, atol=1e-6), np.isclose(points, upper, atol=1e-6)
        assert (is_lower | is_upper).all()
        # Both ends are drawn, evenly: 2000 fair coins stay within five standard deviations.
        assert abs((is_upper & ~is_lower).sum() - (is_lower & ~is_upper).sum()) < 5 * np.sqrt(2000)
    threat_model = ThreatModel(norm="linf", epsilon=0.3 * threat_model.width, bounds=bounds)
    # At most one side of each value lacks room for 0.3 of the width, so some value can nearly always go all the way.
    distances = abs(offsets(draw(threat_model, "sample_surface", x, 200), x)).max(1)
    np.testing.assert_allclose(distances, threat_model.epsilon, rtol=1e-6)
    # All go to their bounds where none has room.
    points = draw(ThreatModel(norm="linf", epsilon=0.9), "sample_surface", torch.tensor([0.5, 0.4, 0.2]), 100)
    assert points.unique(dim=0).tolist() == [list(corner) for corner in itertools.product((0, 1), repeat=3)]


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("radius", [0.95, 0.7])
def test_smaller_linf_corners_have_the_mean_of_those_at_epsilon(bounds, radius):
    """Where bounds clip too: the mean over all corners at epsilon is the middle of the clipped interval."""
    epsilon = 0.3 * (bounds[1] - bounds[0])
    x, threat_model = torch.linspace(*bounds, 41), ThreatModel(norm="linf", epsilon=epsilon, bounds=bounds)
    points = offsets(threat_model.sample_corners(x, 4000, key=2, radius=radius), x)
    assert abs(points).max() <= radius * epsilon + 1e-6
    low, high = (np.clip(x.double().numpy() + side * epsilon, *bounds) - x.double().numpy() for side in (-1, 1))
    np.testing.assert_allclose(points.mean(0), (low + high) / 2, atol=5 * epsilon / np.sqrt(4000))
    assert abs((points[:, 20] > 0).mean() - 0.5) < 5 * 0.5 / np.sqrt(4000)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("size", [1, 17, 64])
def test_points_depend_on_sample_key_and_index_alone(norm, name, size):
    """Whatever the blocks and their order, one sample or a batch, the layout and the type of the samples."""
    threat_model, keys = ThreatModel(norm=norm, epsilon=0.4), [7, 0, 2**64 - 1, 7]
    x = torch.rand(4, size, 2, generator=generator(size))
    before, state = x.clone(), torch.get_rng_state()
    many = draw(threat_model, name, x, 60, keys)
    for row, key in enumerate(keys):
        assert torch.equal(draw(threat_model, name, x[row], 60, key), many[row])
    for start, count in ((59, 1), (31, 28), (0, 31), (5, 0)):
        block = draw(threat_model, name, x[[2, 0]], count, [keys[2], 7], start=start)
        assert torch.equal(block, many[[2, 0], start : start + count])
    turned = x.transpose(0, 2).contiguous().transpose(0, 2)
    for same in (turned, x.double(), x.clone().requires_grad_()):
        assert torch.equal(draw(threat_model, name, same, 60, keys), many)
    half = x.half()
    assert torch.equal(draw(threat_model, name, half, 9, keys), draw(threat_model, name, half.float(), 9, keys))
    assert not torch.equal(draw(threat_model, name, x[0], 60, 8), many[0])
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)


DIGESTS = {
    "linf": ("26e8b8b44ff1", "1a323c7d9714", "a71ca0779e49"),
    "l2": ("cc9e217f1a42", "5352db34811a", "c42930b1efb9"),
    "l1": ("5946310d44ba", "97fa3b4f78d2", "b1be364635e8"),
}


def fixed_points(norm, name, device="cpu"):
    """Points around a fixed sample, of which some values lie near or at the bounds."""
    x = (torch.arange(300) * 37 % 301 / 300 * 1.2 - 0.1).clamp(0, 1).to(device)
    threat_model = ThreatModel(norm=norm, epsilon={"linf": 0.1, "l2": 2.5, "l1": 40.0}[norm])
    more = {} if name == "sample_surface" else {"radius": 0.95}
    return draw(threat_model, name, x, 50, 11, start=3, **more)


@pytest.mark.parametrize("norm", NORMS)
def test_points_are_those_that_were_written_down(norm):
    """Where they change, STREAMS of core.counted goes up, by which run folders of other points are refused."""
    found = [fixed_points(norm, name).numpy().astype("<f4").tobytes() for name in DRAWS]
    assert tuple(hashlib.blake2b(one, digest_size=6).hexdigest() for one in found) == DIGESTS[norm]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_points_have_the_same_bits_on_a_gpu_which_is_not_waited_for():
    for norm, name in itertools.product(NORMS, DRAWS):
        fixed_points(norm, name, "cuda")  # Its tables get there.
        torch.cuda.set_sync_debug_mode("error")
        try:
            there = fixed_points(norm, name, "cuda")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(there.cpu(), fixed_points(norm, name))


@settings(max_examples=60)
@given(
    power=st.sampled_from((1, 2)),
    size=st.integers(1, 40),
    seed=st.integers(0, 2**31),
    zeros=st.booleans(),
    share=st.floats(0.01, 1.2),
)
def test_a_stretch_uses_up_the_budget(power, size, seed, zeros, share):
    """Against bisection in float64: room that differs by up to ten orders of magnitude, and none at all."""
    draws = np.random.default_rng(seed)
    base = np.where(draws.random(size) < 0.3 * zeros, 1.0, 1 - 10 ** draws.uniform(-6, 0, size)).astype(np.float32)
    x = torch.from_numpy(np.where(draws.random(size) < 0.5, base, 1 - base).astype(np.float32))
    exact = x.double().numpy()
    epsilon = share * np.linalg.norm(np.maximum(exact, 1 - exact), ord=power) + 1e-4
    ball, free = (ThreatModel(norm=f"l{power}", epsilon=epsilon, bounds=ends) for ends in ((0, 1), (-1e6, 1e6)))
    directions = offsets(draw(free, "sample_surface", x.double(), 8), x)
    for direction, moved in zip(directions, offsets(draw(ball, "sample_surface", x, 8), x), strict=True):
        room, low, high = np.where(direction > 0, 1 - exact, exact), 0.0, 1e12
        for _ in range(200):
            middle = (low + high) / 2
            short = np.linalg.norm(np.minimum(middle * abs(direction), room), ord=power) < epsilon
            low, high = (middle, high) if short else (low, middle)
        np.testing.assert_allclose(abs(moved), np.minimum(high * abs(direction), room), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("size", [1, 2, 5, 32])
@pytest.mark.parametrize("radius", [1.0, 0.95, 0.2])
def test_inner_radii_are_those_of_a_uniform_ball(norm, size, radius):
    """In every norm the share of the ball's volume within a radius r is r ** D."""
    sample = ThreatModel(norm=norm, epsilon=2.0, bounds=(-10, 10)).sample_inner
    points = sample(torch.zeros(size), 4000, key=11, radius=radius).double().numpy()
    radii = np.linalg.norm(points, ord=ORDER[norm], axis=1) / 2 / radius
    assert radii.max() <= 1 + 1e-6
    assert stats.kstest(np.minimum(radii, 1) ** size, "uniform").pvalue > 1e-3
    if size < 8:
        assert stats.chisquare(np.bincount((points > 0) @ 2 ** np.arange(size), minlength=2**size)).pvalue > 1e-3


@settings(max_examples=300)
@given(
    norm=st.sampled_from(NORMS),
    bounds=st.sampled_from((*BOUNDS, (0.0, 255.0), (1000.0, 1001.0), (-1e-3, 1e-4))),
    factor=st.floats(1, 1e7),
    size=st.sampled_from([1, 3, 64, 784, 3072]),
    seed=st.integers(0, 2**31),
    spread=st.sampled_from(("even", "one", "random", "corner")),
)
def test_float32_rounding_is_within_and_what_is_clearly_beyond_is_not(norm, bounds, factor, size, seed, spread):
    """Against float64: from the smallest epsilon that is accepted on."""
    scale = max(map(abs, bounds)) * {"linf": 1, "l2": size**0.5, "l1": size}[norm]
    threat_model = ThreatModel(norm=norm, epsilon=factor * 10 * 2**-24 * scale, bounds=bounds)
    threat_model.check_resolution(size)
    draws = np.random.default_rng(seed)
    x = draws.uniform(*bounds, (4, size)).astype(np.float32)
    d = {"even": np.ones((4, size)), "one": np.eye(4, size), "corner": np.sign(draws.normal(size=(4, size)))}.get(
        spread, draws.normal(size=(4, size))
    )
    d *= threat_model.epsilon / np.linalg.norm(d, ord=ORDER[norm], axis=1, keepdims=True).clip(1e-300)
    inputs = torch.from_numpy(x)
    for honest in ((x + d).clip(*bounds), x + np.float32(1) * d.astype(np.float32)):
        assert bool(threat_model.contains(torch.from_numpy(honest.astype(np.float32)), inputs).all())
    moved = d.any(1)
    excess = 1.12 if factor < 10 else 1.0102
    beyond = threat_model.contains(torch.from_numpy(x.astype(np.float64) + excess * d), inputs)
    assert not bool(beyond[torch.from_numpy(moved)].any())


WRONG = {
    "norm": ["L2", 2],
    "epsilon": [0, 1e300, -0.1, np.nan, np.inf, "0.1", None, [0.1, -1], [0.0, 0.0]],
    "bounds": [1, (0, 1, 2), (1, 1), (1, 0), (0, 1e300), (0, np.inf), ("0", 1), (1, 1 + 1e-12), (0, 1e-30)],
    "mask": [[False, False], ["a", "b"]],
    "kinds": [["real", "float"], ["real", "one-hot:a"]],
    "levels": [1],
    "weights": [[2.0, 1.0]],
}
WRONG["bounds"] += [([0, 1], [1, 1]), ([0, 1, 2], [1, 1])]
UNFIT = [
    ({"mask": [True, False, True]}, [[0.1, 0.2]], "broadcasts to one input"),
    ({"bounds": ([0, 0], [1, 0.1])}, [[0.1, 0.2]], "outside the bounds of 1 entries, the first at (1,)"),
    ({"levels": 3}, [[0.5, 0.2]], "off the grid"),
    ({"kinds": ["one-hot:a", "one-hot:a"]}, [[1, 1]], "without a single 1"),
]


def test_wrong_arguments_are_named_and_samples_that_do_not_fit_refused():
    for name, value in [(name, value) for name, values in WRONG.items() for value in values]:
        with pytest.raises(InvalidArgumentError, match=f"^{name}: "):
            ThreatModel(**{"norm": "linf", "epsilon": 0.1, name: value})
    for given_values, x, words in UNFIT:
        model = ThreatModel(**{"norm": "linf", "epsilon": 0.1, **given_values})
        with pytest.raises(InvalidArgumentError, match=re.escape(words)):
            model.check_samples(torch.tensor(x))
    # A radius is a share of epsilon, and a batch has a key a sample.
    for name, value in [*(("radius", value) for value in (0, -0.5, 1.01, np.nan)), ("key", [1, 2, 3])]:
        with pytest.raises(InvalidArgumentError, match=f"^{name}: got "):
            ThreatModel(norm="l2", epsilon=1).sample_inner(torch.zeros(2, 2), 3, **{"key": [1, 2], name: value})
    # At 1e-8 float32 moves values near 1 by up to three epsilons; at 1e-30 no step changes any value.
    for norm, epsilon in itertools.product(NORMS, (1e-30, 1e-8)):
        with pytest.raises(InvalidArgumentError, match=f"epsilon: got {epsilon:g}, .* in {norm}") as raised:
            ThreatModel(norm=norm, epsilon=epsilon).check_resolution(100)
        least = float(re.search("at least ([0-9.e-]+)", str(raised.value))[1])
        ThreatModel(norm=norm, epsilon=least).check_resolution(100)
    # Small budgets of large entries.
    model = ThreatModel(norm="linf", epsilon=[0.1, 0.1001], bounds=([0, 0], [1, 1e6]))
    with pytest.raises(InvalidArgumentError, match=r"for entry \(1,\)"):
        model.check_resolution(2)
    replace(model, mask=[True, False]).check_resolution(2)


LOW, HIGH = np.array([0.0, -2, 0, 10]), np.array([1.0, 2, 5, 20])


def table(norm="linf", **more):
    given = {"epsilon": np.array([0.2, 0.5, 1, 4]), "bounds": (LOW, HIGH), "mask": [True, True, False, True]}
    return ThreatModel(norm=norm, **{**given, **more})


def rows(count, seed=0):
    return torch.tensor(LOW + (HIGH - LOW) * np.random.default_rng(seed).random((count, 4)), dtype=torch.float32)


def exceeds(model, points, x):
    budget, fixed = np.array([0.2, 0.5, 1, 4]), np.array([False, False, True, False])
    d = (points.double() - x.double()).numpy()
    size = np.linalg.norm(d[:, ~fixed] / budget[~fixed], ord=ORDER[model.norm], axis=1) - 1
    beyond = np.maximum(points.numpy() - HIGH, LOW - points.numpy()).max(1)
    return np.maximum(np.maximum(size, beyond), np.abs(d[:, fixed]).max(1))


@pytest.mark.parametrize("norm", NORMS)
def test_points_lie_in_the_limits_and_reach_them(norm):
    x, model = rows(1)[0], table(norm)
    for name in DRAWS:
        points = getattr(model, name)(x, 400, key=3)
        assert exceeds(model, points, x.expand(400, 4)).max() < 1e-5
        if name != "sample_inner":
            np.testing.assert_allclose(model.distance(points, x.expand(400, 4)) / model.epsilon, 1, atol=1e-5)
    # Uniform in the ball of the three entries that may change: where nothing is clipped, its law is known.
    middle = torch.tensor((LOW + HIGH) / 2, dtype=torch.float32)
    points = model.sample_inner(middle, 4000, key=3)
    radii = (model.distance(points, middle.expand(4000, 4)) / model.epsilon).numpy()
    assert abs((radii**3).mean() - 0.5) < 0.02


@pytest.mark.parametrize("norm", NORMS)
def test_projection_is_the_nearest_of_many_points(norm):
    x, model = rows(20), table(norm)
    outside = x + torch.randn(20, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([0.3, 1, 1, 6])
    found = project(outside, x, model)
    assert exceeds(model, found, x).max() < 1e-4
    torch.testing.assert_close(project(found, x, model), found, atol=1e-4, rtol=1e-5)
    others = torch.cat([model.sample_inner(x, 3000, key=[1] * 20), model.sample_corners(x, 500, key=[1] * 20)], 1)
    scale = torch.tensor([0.2, 0.5, 1, 4]) / 4
    points = torch.cat([found[:, None], others], 1)
    away = ((points - outside[:, None]) / scale)[..., [0, 1, 3]].square().sum(-1)
    assert (away[:, 0] <= away[:, 1:].amin(1) + 1e-3).all()


@pytest.mark.parametrize("norm", NORMS)
@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), epsilon=st.floats(0.05, 1.5))
def test_rounding_stays_in_the_ball_and_on_the_grid(norm, seed, epsilon):
    generator = torch.Generator().manual_seed(seed)
    model = ThreatModel(norm=norm, epsilon=epsilon, levels=6)
    x = torch.randint(0, 6, (8, 3), generator=generator) / 5
    points = project(x + torch.randn(8, 3, generator=generator), x, model)
    rounded = model.snap(points, x)
    grid = torch.tensor(list(itertools.product(np.arange(0, 1.1, 0.2), repeat=3)), dtype=torch.float32)
    for row, found, start in zip(x, rounded, points, strict=True):
        valid = grid[model.distance(grid, row.expand_as(grid)) <= model.epsilon * (1 + 1e-6)]
        assert (valid - found).abs().amax(1).min() < 1e-6
        if norm == "linf":
            nearest = (valid - start).abs().sum(1).min()
            assert (found - start).abs().sum() <= nearest + 1e-5
    assert torch.equal(model.snap(rounded, x), rounded)


def test_kinds_are_rounded_and_groups_hold_a_single_one():
    kinds = ["integer", "real", *["one-hot:colour"] * 3]
    model = ThreatModel(norm="linf", epsilon=[2, 0.1, 1, 1, 1], bounds=([0, 0, 0, 0, 0], [9, 1, 1, 1, 1]), kinds=kinds)
    x = torch.tensor([[4, 0.5, 1, 0, 0]])
    points = torch.tensor([[5.6, 0.57, 0.3, 0.2, 0.9], [2.4, 0.5, 0.6, 0.5, 0.1]])
    assert model.snap(points, x.expand(2, 5)).tolist() == [[6, pytest.approx(0.57), 0, 0, 1], [2, 0.5, 1, 0, 0]]
    small = replace(model, epsilon=1.0, weights=[1, 0.1, 0.5, 1, 1])
    assert small.snap(points, x.expand(2, 5))[0].tolist() == [5, pytest.approx(0.57), 1, 0, 0]
    diamond = replace(model, norm="l1", epsilon=2.0, weights=None)
    # A change of colour takes the whole budget.
    changed = diamond.snap(torch.tensor([[4, 0.5, 0.1, 0.2, 0.9]]), x)
    assert changed.tolist() == [[4, 0.5, 0, 0, 1]]
    assert diamond.snap(torch.tensor([[5, 0.5, 0.45, 0.55, 0.0]]), x).tolist() == [[5, 0.5, 1, 0, 0]]


def test_equal_arrays_are_equal_models_in_every_form():
    one, other = table(), table(mask=torch.tensor([1, 1, 0, 1]).bool())
    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == one  # noqa: S301 - our own bytes
    assert one != table(mask=[True, False, True, True])
    assert one != replace(one, epsilon=2.0)
    assert json.loads(json.dumps(one.described)) == one.described != table(mask=[True, False, True, True]).described
    # Budgets of 0 are entries that may not change, and arrays of one value are numbers.
    weighted = ThreatModel(norm="linf", epsilon=2, weights=[0.5, 1, 1], mask=[True, False, True])
    assert ThreatModel(norm="linf", epsilon=[1, 0, 2]) == weighted
    plain = ThreatModel(norm="linf", epsilon=0.1)
    same = ThreatModel(norm="linf", epsilon=np.full((3, 1, 1), 0.1), bounds=(np.zeros(4), 1), mask=np.ones((4, 4)))
    assert same == plain
    assert same.described == {"norm": "linf", "epsilon": 0.1, "bounds": [0.0, 1.0]}


def test_linf_surface_goes_to_the_bounds_where_no_value_has_room_and_l2_corners_move_equally_where_there_is():
    points = draw(ThreatModel(norm="linf", epsilon=0.9), "sample_surface", torch.tensor([0.5, 0.4, 0.2]), 100)
    assert set(points.unique().tolist()) == {0.0, 1.0}
    assert len(points.unique(dim=0)) == 8
    x = torch.full((16,), 0.5)
    moved = offsets(draw(ThreatModel(norm="l2", epsilon=0.4), "sample_corners", x, 10), x)
    np.testing.assert_allclose(abs(moved), 0.1, atol=1e-6)


def test_l1_corners_are_vertices():
    """All values but one are where they were or at a bound, and which one differs from draw to draw."""
    threat_model = ThreatModel(norm="l1", epsilon=1.3)
    x = torch.rand(20, generator=generator(5)) * 0.8 + 0.1
    points = draw(threat_model, "sample_corners", x, 50).double().numpy()
    still = np.isclose(points, x.double().numpy(), atol=1e-6)
    bound = (points == 0) | (points == 1)
    assert ((~still & ~bound).sum(1) <= 1).all()
    assert (~still).any(0).all()
    np.testing.assert_allclose(abs(offsets(torch.tensor(points), x)).sum(1), 1.3, atol=1e-5)


def inner(norm, size, count, radius=1.0):
    sample = ThreatModel(norm=norm, epsilon=2.0, bounds=(-10, 10)).sample_inner
    return sample(torch.zeros(size), count, key=11, radius=radius).double().numpy() / 2.0


@pytest.mark.parametrize("norm", NORMS)
def test_inner_points_are_distributed_like_rejection_samples(norm):
    """Uniform in the cube, kept where in the ball: the same marginal, sum and sign distributions."""
    cube = np.random.default_rng(0).uniform(-1, 1, (200_000, 3))
    kept = cube[np.linalg.norm(cube, ord=ORDER[norm], axis=1) <= 1][:20_000]
    points = inner(norm, 3, 6000)
    for direction in ([1, 0, 0], [0, 0, 1], [1, 1, 1], [1, -1, 0]):
        assert stats.ks_2samp(points @ direction, kept @ direction).pvalue > 1e-3
    assert stats.chisquare(np.bincount((points > 0) @ [1, 2, 4], minlength=8)).pvalue > 1e-3


@pytest.mark.parametrize(("norm", "size", "sizes"), [("l2", 3, stats.uniform(0, 1)), ("l1", 4, stats.beta(1, 3))])
def test_surface_points_are_uniform(norm, size, sizes):
    """Archimedes: a coordinate of a uniform point on the sphere in three dimensions is uniform; of one on the simplex
    in D dimensions it is Beta(1, D - 1)."""
    threat_model = ThreatModel(norm=norm, epsilon=1.0, bounds=(-5, 5))
    points = draw(threat_model, "sample_surface", torch.zeros(size), 4000).double().numpy()
    for axis in range(size):
        assert stats.kstest(abs(points[:, axis]), sizes.cdf).pvalue > 1e-3
    assert stats.chisquare(np.bincount((points > 0) @ 2 ** np.arange(size), minlength=2**size)).pvalue > 1e-3
