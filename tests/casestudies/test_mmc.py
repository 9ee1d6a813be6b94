"""Max-Mahalanobis centres: parts against closed forms and loops, and both recipes on the digits."""

from __future__ import annotations

import pytest
import torch

from robust_ext import ThreatModel
from robust_ext.casestudies.mmc import CentreDistances, LeaveCentre, simplex_centres
from robust_ext.core.random import stream
from robust_ext.core.target import Target
from tests.casestudies.on_digits import judged, measured


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


def test_mechanism():
    found = measured("mmc", 32)
    assert found.present, found.values


@pytest.mark.exhaustive
def test_recipes():
    assert judged("mmc", "weak")["verdict"] == "failed"
    assert judged("mmc", "right")["verdict"] == "passed"
