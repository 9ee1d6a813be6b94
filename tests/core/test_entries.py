"""Limits of single entries against brute force: every value of small grids, and what hypothesis finds."""

import base64
import itertools
import json
import math
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from robust_ext.attacks._common.rows import project
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.threat import ThreatModel

NORMS = ("linf", "l2", "l1")
POWER = {"linf": np.inf, "l2": 2, "l1": 1}
DRAWS = ("sample_inner", "sample_surface", "sample_corners")
LOW, HIGH = np.array([0.0, -2, 0, 10]), np.array([1.0, 2, 5, 20])


def table(norm="linf", **more):
    given = {"epsilon": np.array([0.2, 0.5, 1, 4]), "bounds": (LOW, HIGH), "mask": [True, True, False, True]}
    return ThreatModel(norm=norm, **{**given, **more})


def rows(count, seed=0):
    return torch.tensor(LOW + (HIGH - LOW) * np.random.default_rng(seed).random((count, 4)), dtype=torch.float32)


def exceeds(model, points, x):
    """How far points go beyond what is allowed, by numpy alone."""
    budget, fixed = np.array([0.2, 0.5, 1, 4]), np.array([False, False, True, False])
    d = (points.double() - x.double()).numpy()
    size = np.linalg.norm(d[:, ~fixed] / budget[~fixed], ord=POWER[model.norm], axis=1) - 1
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
    inside = project(found, x, model)
    torch.testing.assert_close(inside, found, atol=1e-4, rtol=1e-5)
    scale = torch.tensor([0.2, 0.5, 1, 4]) / 4

    def away(points):
        return ((points - outside) / scale)[..., [0, 1, 3]].square().sum(-1)

    others = torch.stack([model.sample_inner(row, 3000, key=1) for row in x])
    others = torch.cat([others, torch.stack([model.sample_corners(row, 500, key=1) for row in x])], 1)
    nearest = ((others - outside[:, None]) / scale)[..., [0, 1, 3]].square().sum(-1).amin(1)
    assert (away(found) <= nearest + 1e-3).all()


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
    assert json.loads(json.dumps(one.described)) == one.described
    # Budgets of 0 are entries that may not change, and arrays of one value are numbers.
    weighted = ThreatModel(norm="linf", epsilon=2, weights=[0.5, 1, 1], mask=[True, False, True])
    assert ThreatModel(norm="linf", epsilon=[1, 0, 2]) == weighted
    plain = ThreatModel(norm="linf", epsilon=0.1)
    same = ThreatModel(norm="linf", epsilon=np.full((3, 1, 1), 0.1), bounds=(np.zeros(4), 1), mask=np.ones((4, 4)))
    assert same == plain
    assert same.described == {"norm": "linf", "epsilon": 0.1, "bounds": [0.0, 1.0]}


def decoded(dtype, shape, data):
    """An array of JSON, read as its description says."""
    raw = base64.b64decode(data)
    if dtype == "bool":
        return np.unpackbits(np.frombuffer(raw, np.uint8), count=math.prod(shape)).astype(bool).reshape(shape)
    return np.frombuffer(raw, np.dtype(dtype).newbyteorder("<")).reshape(shape)


@given(st.lists(st.just(0.0) | st.floats(0.001, 10), min_size=2, max_size=5), st.integers(0, 9))
def test_stored_arrays_are_exact(budgets, seed):
    mask = np.arange(len(budgets)) != seed % len(budgets)
    assume(len({*budgets}) > 1 and (np.array(budgets) * mask).any())
    model = ThreatModel(norm="linf", epsilon=budgets, mask=mask)
    stored = {name: decoded(**one) for name, one in model.described["entries"].items()}
    assert max(budgets) == model.epsilon
    free = (np.array(budgets) > 0) & mask
    np.testing.assert_array_equal(stored.get("mask", True), free)
    expected = np.where(np.array(budgets) > 0, np.array(budgets) / max(budgets), 1)
    np.testing.assert_array_equal(np.broadcast_to(stored.get("weights", 1.0), expected.shape), expected)


REFUSED = [
    ({"epsilon": [0.1, -1]}, "epsilon: got budgets from -1 to 0.1"),
    ({"epsilon": [0.0, 0.0]}, "one of them above 0"),
    ({"bounds": ([0, 1], [1, 1])}, "lower bounds below the upper ones"),
    ({"bounds": ([0, 1, 2], [1, 1])}, "arrays of shapes (3,) and (2,)"),
    ({"mask": [False, False]}, "at least one entry that may change"),
    ({"mask": ["a", "b"]}, "True where an entry may change"),
    ({"kinds": ["real", "float"]}, "got 'float'"),
    ({"kinds": ["real", "one-hot:a"]}, "at least two entries in each group"),
    ({"levels": 1}, "levels: got 1"),
    ({"weights": [2.0, 1.0]}, "from 0 to 1"),
]
UNFIT = [
    ({"mask": [True, False, True]}, [[0.1, 0.2]], "broadcasts to one input, (2,)"),
    ({"bounds": ([0, 0], [1, 0.1])}, [[0.1, 0.2]], "outside the bounds of 1 entries, the first at (1,)"),
    ({"levels": 3}, [[0.5, 0.2]], "off the grid"),
    ({"kinds": ["one-hot:a", "one-hot:a"]}, [[1, 1]], "without a single 1"),
]


def test_what_is_no_threat_model_and_samples_that_do_not_fit_are_refused():
    for given_values, words in REFUSED:
        with pytest.raises(InvalidArgumentError, match=re.escape(words)):
            ThreatModel(**{"norm": "linf", "epsilon": 0.1, **given_values})
    for given_values, x, words in UNFIT:
        model = ThreatModel(**{"norm": "linf", "epsilon": 0.1, **given_values})
        with pytest.raises(InvalidArgumentError, match=re.escape(words)):
            model.check_samples(torch.tensor(x))
    # Small budgets of large entries.
    model = ThreatModel(norm="linf", epsilon=[0.1, 0.1001], bounds=([0, 0], [1, 1e6]))
    with pytest.raises(InvalidArgumentError, match=r"for entry \(1,\)"):
        model.check_resolution(2)
    replace(model, mask=[True, False]).check_resolution(2)
