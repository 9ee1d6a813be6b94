"""Training sets of clean, noisy and adversarial inputs with references beside them, and the regression on them."""

from functools import partial

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegressionCV

from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.random import seeded_globals
from robust_ext.detectors import observe
from robust_ext.detectors._features.references import three_sets
from robust_ext.detectors._features.regression import Regression
from tests.detectors.cases import data, made, network


@pytest.mark.parametrize("name", ["kd-bu", "lid", "ml-loo"])
def test_score_is_the_regression_of_scikit_learn_on_clean_and_adversarial_features(name):
    classifier, clean, adversarial, references = network(), data(30, 1), 1 - data(40, 2) ** 2, data(60, 9)
    # Its other measures of dispersion are the same for all inputs of this network.
    detector = made(name, classifier, **({"dispersion": "std"} if name == "ml-loo" else {}))
    negatives = [clean]
    settings = {"references": references, "noise": 0.2, "folds": 4, "seed": 3}
    detector.fit(clean, adversarial, **({"folds": 4} if name == "ml-loo" else settings))
    if name != "ml-loo":
        sets = three_sets(clean, adversarial, apart=0, bounds=(0, 1), **settings)
        assert torch.equal(sets.clean, clean)
        negatives.append(sets.noisy)
    with seeded_globals(3), torch.no_grad():
        seen = [observe(classifier, part, detector.layers) for part in (*negatives, adversarial)]
        rows = torch.cat([detector.features_of(one) for one in seen]).double().numpy()
        found = detector.regression(torch.tensor(rows).float())
    low, high = rows.min(0), rows.max(0)
    scaled = (rows - rows.mean(0)) / rows.std(0) if name != "lid" else (rows - low) / (high - low)
    # The last two settings are the defaults, of which scikit-learn 1.8 announces others.
    model = LogisticRegressionCV(
        cv=4, class_weight="balanced", scoring="accuracy", max_iter=2000, use_legacy_attributes=False, l1_ratios=(0.0,)
    )
    model.fit(scaled, np.repeat([0, 1], [len(rows) - 40, 40]))
    np.testing.assert_allclose(found.numpy(), model.decision_function(scaled).ravel(), atol=2e-3)


@pytest.mark.parametrize("scaling", ["standard", "minmax"])
def test_scalings_leave_constant_features_alone(scaling):
    generator = torch.Generator().manual_seed(0)
    clean, adversarial = torch.randn(30, 3, generator=generator), torch.randn(20, 3, generator=generator) + 1
    clean[:, 1] = adversarial[:, 1] = 0.1
    regression = Regression(scaling=scaling)
    regression.fit([clean[:10], clean[10:]], adversarial)
    rows = torch.cat([clean, adversarial]).double().numpy()
    expected = (rows.mean(0), rows.std(0)) if scaling == "standard" else (rows.min(0), rows.max(0) - rows.min(0))
    expected[1][1] = 1
    np.testing.assert_allclose(regression.center.numpy(), expected[0], atol=1e-6)
    np.testing.assert_allclose(regression.scale.numpy(), expected[1], rtol=1e-6)
    with pytest.raises(ModelError, match=r"not finite \(features \[2\]\)"):
        regression.fit([clean * torch.tensor([1, 1, torch.inf])], adversarial)
    with pytest.raises(InvalidArgumentError, match="folds"):
        regression.fit([clean[:4]], adversarial)


def test_noise_is_as_large_as_the_perturbations_after_clipping():
    dark = (data(400) - 0.7).clamp_min(0)
    adversarial = (dark + 0.1).clamp(0, 1)
    sets = partial(three_sets, dark, adversarial, references=None, apart=100, noise=None, folds=2, seed=0)
    given, free = sets(bounds=(0, 1)), sets(bounds=None)
    size = (given.noisy - given.clean).square().mean().sqrt()
    assert float(size) == pytest.approx(float((given.adversarial - given.clean).square().mean().sqrt()), rel=1e-3)
    assert float(given.noisy.min()) == 0
    assert given.noise > 0.12
    assert float(free.noisy.min()) < 0
    assert free.noise == pytest.approx(0.1, abs=1e-3)


def test_noise_cannot_be_larger_than_the_bounds_allow():
    grey, black = torch.full((40, 2, 3), 0.5), torch.zeros(40, 2, 3)
    for clean, adversarial in ((grey, black), (black, 1 - black), (grey, grey)):
        given = three_sets(clean, adversarial, references=None, apart=5, noise=None, bounds=(0, 1), folds=2, seed=0)
        assert np.isfinite(given.noise)
        assert bool(((given.noisy >= 0) & (given.noisy <= 1)).all())
    assert given.noise == 0


def test_references_are_apart_from_what_is_trained_on():
    clean = data(40)
    given = three_sets(clean, clean / 2, references=None, apart=15, noise=0.1, bounds=(0, 1), folds=2, seed=4)
    assert torch.equal(given.references, clean[given.apart])
    assert (len(given.references), len(given.clean)) == (15, 25)
    torch.testing.assert_close(given.adversarial, given.clean / 2)
    union = torch.cat([given.references, given.clean]).flatten(1)
    assert len(union.unique(dim=0)) == 40
