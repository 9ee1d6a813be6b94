"""Max-Mahalanobis centres: parts against closed forms and loops, and both recipes on the digits."""

from __future__ import annotations

import pytest
import torch

from robust_ext import ThreatModel, binarization_test
from robust_ext.casestudies.mmc import CentreDistances, LeaveCentre, MaxMahalanobis, simplex_centres
from robust_ext.core.random import stream
from robust_ext.core.target import Target
from robust_ext.datasets import load_dataset

LINF = ThreatModel(norm="linf", epsilon=0.2)


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


@pytest.fixture(scope="session")
def trained():
    train, test = load_dataset("digits", split="train"), load_dataset("digits")
    study = MaxMahalanobis()
    return study, study.trained(*train.take(range(len(train)))), test.take(test.choose(32, seed=0))


def test_mechanism(trained):
    study, module, (inputs, labels) = trained
    found = study.measure(module, inputs, labels, LINF, seed=0)
    assert found.present, found.values
    assert not module.training


@pytest.mark.exhaustive
def test_recipes(trained):
    study, module, (inputs, _labels) = trained
    for recipe, verdict in ((study.weak(LINF), "failed"), (study.right(LINF), "passed")):
        result = binarization_test(study.parts(module), recipe.attack, inputs, LINF, **study.settings)
        assert result.verdict == verdict, str(result)
