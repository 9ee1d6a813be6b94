"""Local intrinsic dimensionality: against direct loops and known dimensions, with duplicates; and its detector."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from robust_ext.detectors.lid import LARGEST, LIDDetector, local_dimension
from robust_ext.detectors.observation import observe
from tests.detectors.cases import data, network


def by_hand(point, references, neighbours):
    """The formula among the references that are elsewhere."""
    distances = sorted(math.dist(point, reference) for reference in references)
    near = [distance for distance in distances if distance > 0][:neighbours]
    return -len(near) / sum(math.log(distance / near[-1]) for distance in near)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(3, 40), st.integers(1, 30), st.integers(2, 40), st.integers(0, 9))
@example(1, 4, 2, 2, 7)  # Beyond the largest
def test_estimates_are_those_of_the_definition(points, references, size, neighbours, seed):
    random = np.random.default_rng(seed)
    x, r = random.normal(size=(points, size)), random.normal(size=(references, size))
    neighbours = min(neighbours, references)
    found = local_dimension(torch.tensor(x), torch.tensor(r), neighbours=neighbours)
    expected = [by_hand(point, r, neighbours) for point in x]
    np.testing.assert_allclose(found.numpy(), np.minimum(expected, LARGEST), rtol=1e-9)


@pytest.mark.parametrize("dimension", [1, 2, 5, 10])
def test_estimates_are_near_the_dimension_of_a_subspace(dimension):
    random = np.random.default_rng(dimension)
    # Uniform in a ball of a random subspace of 30 dimensions, seen from its centre: there the estimate is consistent.
    basis = np.linalg.qr(random.normal(size=(30, dimension)))[0].T
    estimates = []
    for _ in range(40):
        directions = random.normal(size=(500, dimension))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        inside = directions * random.uniform(size=(500, 1)) ** (1 / dimension) @ basis + 1
        estimates.append(float(local_dimension(torch.ones(1, 30).double(), torch.tensor(inside), neighbours=100)))
    # The relative standard deviation of one estimate is 1 / sqrt(100).
    assert np.mean(estimates) == pytest.approx(dimension, rel=0.06)


@pytest.mark.parametrize("copies", [1, 3, 8])
def test_duplicates_of_the_point_are_not_its_neighbours(copies):
    random = np.random.default_rng(0)
    point, others = random.normal(size=(1, 4)), random.normal(size=(10, 4))
    r = np.concatenate([others[:3], np.repeat(point, copies, 0), others[3:]])
    for neighbours in (2, 6, 10, 10 + copies):
        x = torch.tensor(point, requires_grad=True)
        found = local_dimension(x, torch.tensor(r), neighbours=neighbours)
        assert found.item() == pytest.approx(by_hand(point[0], others, neighbours), rel=1e-9)
        (gradient,) = torch.autograd.grad(found.sum(), x)
        assert torch.isfinite(gradient).all() & gradient.any()


def test_rounding_does_not_make_a_duplicate_a_neighbour():
    generator = torch.Generator().manual_seed(0)
    r = torch.rand(20, 50, generator=generator) + 10
    point = r[:1] * (1 + 1e-7 * torch.randn(1, 50, generator=generator))
    assert float(torch.dist(point, r[:1])) > 0
    found = local_dimension(point, r, neighbours=10)
    assert float(found) == pytest.approx(by_hand(r[0].numpy(), r.numpy(), 10), rel=1e-3)


def test_estimates_of_single_precision_are_the_same_with_and_without_gradients():
    generator = torch.Generator().manual_seed(0)
    # More values than are compared at once, far from 0, and so near to each other that float32 products cancel.
    points, references = (100 + 0.01 * torch.rand(count, 9000, generator=generator) for count in (3, 12))
    found = local_dimension(points, references, neighbours=10)
    exact = local_dimension(points.double(), references.double(), neighbours=10)
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=0)
    with_gradients = local_dimension(points.requires_grad_(True), references, neighbours=10)
    torch.testing.assert_close(with_gradients.detach().double(), exact, rtol=1e-3, atol=0)


def test_estimates_are_finite_where_the_formula_is_not():
    same = torch.zeros(6, 3)
    corners = torch.eye(3).repeat(2, 1)
    x = torch.zeros(1, 3, requires_grad=True)
    for references, expected in ((same, 0.0), (corners, LARGEST), (torch.cat([same[:5], corners[:1]]), 0.0)):
        found = local_dimension(x, references, neighbours=6)
        assert found.item() == expected
        (gradient,) = torch.autograd.grad(found.sum(), x)
        assert bool(torch.isfinite(gradient).all())
    assert local_dimension(x, torch.cat([same[:4], corners[:2]]), neighbours=3).item() == LARGEST
    assert bool(local_dimension(x * torch.nan, corners, neighbours=3).isnan().all())


def test_features_are_those_of_the_layers_among_fixed_references():
    classifier, references, x = network(), data(20, 9), data(6, 5)
    detector = LIDDetector(classifier, layers=["2", "5"], neighbours=7, size=20)
    detector.fit(data(30, 1), 1 - data(30, 2), references=references, noise=0.1, folds=3)
    with torch.no_grad():
        found = detector.features_of(observe(classifier, x, detector.layers)).numpy()
        seen = [
            [part(values).flatten(1).double().numpy() for values in (x, references)]
            for part in (nn.Flatten(), classifier[:3], classifier[:6])
        ]
    assert found.shape == (6, 3)
    expected = [[by_hand(points[row], among, 7) for points, among in seen] for row in range(6)]
    np.testing.assert_allclose(found, expected, rtol=1e-3)
