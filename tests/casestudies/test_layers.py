"""Parts of studies against closed forms, loops and linear programming: k-winners, PCL, MMC, feature scattering."""

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import nn

from robust_ext import ThreatModel
from robust_ext.casestudies.feature_scattering import cosine_costs, mixed_labels, scattered, sinkhorn_cost
from robust_ext.casestudies.k_winners import Winners
from robust_ext.casestudies.mmc import CentreDistances, LeaveCentre, simplex_centres
from robust_ext.casestudies.pcl import conformity
from robust_ext.core.random import stream
from robust_ext.core.target import Target


def test_winners():
    torch.manual_seed(0)
    x = torch.randn(3, 4, 5, 2)
    loop = torch.zeros_like(x)
    for row, out in zip(x.flatten(1), loop.flatten(1), strict=True):
        for place in row.argsort(descending=True)[:4]:
            out[place] = row[place]
    assert torch.equal(Winners()(x), loop)


@pytest.mark.parametrize(("values", "stay"), [((2.0, 2.0, 1.0), (2.0, 2.0, 0.0)), ((-3.0, -1.0), (0.0, -1.0))])
def test_ties_and_small_layers(values, stay):
    assert torch.equal(Winners()(torch.tensor([values])), torch.tensor([stay]))


def test_conformity():
    torch.manual_seed(0)
    features, centres, labels = torch.randn(5, 3), torch.randn(4, 3), torch.tensor([0, 3, 1, 1, 2])
    total = 0.0
    for row, label in zip(features, labels.tolist(), strict=True):
        total += float(((row - centres[label]) ** 2).sum())
        others = [float(((centres[label] - centre) ** 2).sum()) for k, centre in enumerate(centres) if k != label]
        total -= 0.3 * sum(others) / len(others)
    torch.testing.assert_close(float(conformity(features, centres, labels, push=0.3)), total / 5)


@pytest.mark.parametrize(("classes", "coordinates"), [(2, 2), (3, 8), (10, 64)])
def test_centres_are_a_simplex(classes, coordinates):
    centres = simplex_centres(classes, coordinates, 10.0).double()
    cosines = centres @ centres.mT / 100
    wanted = torch.full((classes, classes), -1 / (classes - 1), dtype=torch.float64).fill_diagonal_(1)
    assert centres.shape == (classes, coordinates)
    torch.testing.assert_close(cosines, wanted, atol=1e-6, rtol=0)


def test_logits_are_squared_distances():
    torch.manual_seed(0)
    features, centres = torch.randn(5, 7), torch.randn(3, 7)
    loop = torch.tensor(
        [[-sum((z - c) ** 2 for z, c in zip(row, one, strict=True)) for one in centres] for row in features]
    )
    torch.testing.assert_close(CentreDistances(centres)(features), loop)


def test_leaving_a_centre_ends_in_the_corner_away_from_it():
    # On the plane itself, with centres (1, 0) and (-1, 0): from (-.4, .3) away from the second centre is up and right.
    module = CentreDistances(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])).eval()
    x, model = torch.tensor([[-0.4, 0.3]]), ThreatModel(norm="linf", epsilon=0.1, bounds=(-1, 1))
    target = Target(module=module, bounds=(-1, 1), classes=2, input_shape=(2,), device=x.device)
    for predicted, label, corner in ((True, 0, [-0.3, 0.4]), (False, 0, [-0.5, 0.4]), (False, 1, [-0.3, 0.4])):
        found = LeaveCentre(steps=5, predicted=predicted).search(
            target, x, torch.tensor([label]), threat_model=model, generator=stream(0)
        )
        torch.testing.assert_close(found, torch.tensor([corner]))


def transport_cost(costs):
    """Least cost over all plans with equal weights, by linear programming."""
    rows, columns = costs.shape
    of_rows = np.kron(np.eye(rows), np.ones(columns))
    of_columns = np.kron(np.ones(rows), np.eye(columns))
    weights = np.concatenate([np.full(rows, 1 / rows), np.full(columns, 1 / columns)])
    return linprog(costs.ravel(), A_eq=np.concatenate([of_rows, of_columns]), b_eq=weights).fun


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (4, 4), (3, 5)])
def test_sinkhorn_cost(rows, columns):
    torch.manual_seed(rows)
    costs = cosine_costs(torch.randn(rows, 6).double(), torch.randn(columns, 6).double())
    found = sinkhorn_cost(costs, entropy=1e-3, iterations=5000)
    torch.testing.assert_close(float(found), transport_cost(costs.numpy()), atol=2e-3, rtol=0)


def test_cosine_costs():
    first, second = torch.randn(3, 4), torch.randn(2, 4)
    loop = [[1 - float(a @ b / (a.norm() * b.norm())) for b in second] for a in first]
    torch.testing.assert_close(cosine_costs(first, second), torch.tensor(loop))


def test_labels():
    assert mixed_labels(torch.tensor([1]), 3).tolist() == [[0.25, 0.5, 0.25]]


def test_points_lie_in_the_ball_and_cost_more():
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Flatten(), nn.Linear(9, 4)), torch.rand(8, 1, 3, 3)
    points = scattered(module, x, 0.2)
    start = (x + 0.2 * (2 * torch.rand_like(x) - 1)).clamp(0, 1)
    with torch.no_grad():
        found, there = (float(sinkhorn_cost(cosine_costs(module(x), module(one)))) for one in (points, start))
    assert found > 2 * there
    assert float((points - x).abs().max()) <= 0.2 + 1e-6
    assert 0 <= float(points.min()) <= float(points.max()) <= 1
