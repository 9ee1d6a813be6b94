"""What ART's own attacks take and give, on the ART classes of this project's attacks."""

import numpy as np
import pytest
import torch
from torch import nn

from robust_ext import ThreatModel, robust_accuracy
from robust_ext.testing.networks import small_network
from tests.adapters.hosts import SHAPE, art
from tests.adapters.hosts import art_attacks as attacks
from tests.adapters.hosts import art_problem as problem

invariants = pytest.importorskip("robust_ext.testing.art_invariants", reason="ART is not installed")
Classification = art.estimators.classification
WITHOUT_GRADIENTS = ("RandomSearch", "Square", "RayS", "SpatialTransformation")
QUICK = {
    "APGD": {"max_iter": 6},
    "RandomSearch": {"max_iter": 30},
    "Square": {"max_iter": 30},
    "RayS": {"max_iter": 120},
    "ObjectivePGD": {"max_iter": 6, "eps_step": 0.05},
    "CarliniWagnerLinf": {"max_iter": 10, "learning_rate": 0.1, "initial_const": 0.1},
    "SpatialTransformation": {"translation": 2, "translation_steps": 3, "rotation_steps": 5},
}
# A search of many steps for each constant takes longer than all others together.
SLOW = pytest.param("CarliniWagnerLinf", marks=pytest.mark.exhaustive)
EachName = pytest.mark.parametrize("name", [SLOW if name == "CarliniWagnerLinf" else name for name in QUICK])


def make(name, estimator, **settings):
    kind = getattr(attacks, name)
    own = {"eps": 0.2, "seed": 5, "verbose": False}
    known = {key: value for key, value in own.items() if key in kind.attack_params}
    return kind(estimator, **{**known, **QUICK[name], **settings})


def distances(points, x):
    return np.abs(points.astype(float) - x).reshape(len(x), -1).max(1)


@EachName
def test_masks_keep_values_as_they_are(name):
    _, estimator, x, y = problem()
    mask = (np.random.default_rng(0).random(x.shape) < 0.5).astype(np.float32)
    attack = make(name, estimator)
    found = attack.generate(x, y, mask=mask)
    assert found.dtype == np.float32
    assert np.array_equal(found[mask == 0], x[mask == 0])
    assert not np.array_equal(found, x)
    assert "eps" not in attack.attack_params or name == "RayS" or distances(found, x).max() <= 0.2 + 1e-6
    # One mask for all inputs, in other forms; and a mask that keeps nothing changes nothing.
    shared = attack.generate(x, y, mask=mask[0])
    assert np.array_equal(shared, attack.generate(x, y, mask=mask[0].astype(bool)[None]))
    np.testing.assert_allclose(attack.generate(x, y, mask=2 * np.ones_like(x)), attack.generate(x, y), atol=1e-6)
    assert np.array_equal(attack.generate(x, y, mask=np.zeros(1)), x)


def test_a_mask_of_the_threat_model_is_that_of_arts_own_attack():
    """FGSM on a linear model: through the interface, by ART's keyword, and the point that has the highest loss."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).eval()
    x = np.random.default_rng(1).uniform(0.3, 0.7, (8, 1, 3, 4)).astype(np.float32)
    mask, weight = np.arange(12).reshape(1, 3, 4) % 3 > 0, np.random.default_rng(2).normal(size=(2, 12))
    with torch.no_grad():
        model[1].weight.copy_(torch.from_numpy(weight))
        model[1].bias.copy_(-model[1].weight @ torch.from_numpy(x).flatten(1).mean(0))
    y = model(torch.from_numpy(x)).argmax(1).numpy()
    direction = np.sign(weight[1 - y] - weight[y]).reshape(x.shape) * mask
    worst = np.clip(x + 0.2 * direction, 0, 1).astype(np.float32)
    estimator = Classification.PyTorchClassifier(
        model, loss=nn.CrossEntropyLoss(), input_shape=(1, 3, 4), nb_classes=2, clip_values=(0, 1), device_type="cpu"
    )
    own = art.attacks.evasion.FastGradientMethod(estimator, eps=0.2).generate(x, y, mask=mask.astype(np.float32))
    threat_model = ThreatModel(norm="linf", epsilon=0.2, mask=mask)
    found = robust_accuracy(model, "art:FastGradientMethod", x, y, threat_model, keep_candidates=True)
    np.testing.assert_allclose(own, worst, atol=1e-6)
    # Those that do not break the model come back as they were.
    wrong = estimator.predict(worst).argmax(1) != y
    assert wrong.any()
    assert found.robust_accuracy(0.2) == 1 - wrong.mean()
    np.testing.assert_allclose(found.candidates, np.where(wrong[:, None, None, None], worst, x), atol=1e-6)


def test_masks_limit_what_gradients_may_change():
    _, estimator, x, y = problem()
    mask = np.zeros(SHAPE, dtype=bool)
    mask[0, :2] = True
    for norm, eps in ((np.inf, 0.3), (2, 1.2), (1, 4.0)):
        attack = make("APGD", estimator, norm=norm, eps=eps, max_iter=20, batch_size=4)
        found = attack.generate(x, y, mask=mask)
        assert np.linalg.norm((found - x).reshape(6, -1), ord=norm, axis=1).max() <= eps * (1 + 1e-5)
        assert (estimator.predict(found).argmax(1) != y).any()
        # The batch size decides nothing, and rows attacked one by one end where those attacked together do.
        attack.set_params(batch_size=1)
        np.testing.assert_allclose(attack.generate(x, y, mask=mask), found, atol=1e-5)
        attack.set_params(stop_early=True)
        solved = estimator.predict(attack.generate(x, y, mask=mask)).argmax(1) != y
        assert (solved == (estimator.predict(found).argmax(1) != y)).all()


@pytest.mark.parametrize("name", ["APGD", "RandomSearch", "Square", "ObjectivePGD"])
def test_each_input_may_have_a_budget(name):
    _, estimator, x, y = problem()
    budgets = np.array([0.1, 0.3, 0.1, 0.0, 0.2, 0.3]).reshape(6, 1, 1, 1)
    found = make(name, estimator, eps=budgets).generate(x, y)
    assert (distances(found, x) <= budgets.ravel() + 1e-6).all()
    assert np.array_equal(found[3], x[3])
    # Rows of one budget are attacked as they would be alone.
    rows = [0, 2]
    np.testing.assert_allclose(make(name, estimator, eps=0.1).generate(x[rows], y[rows]), found[rows], atol=1e-6)
    whole = make(name, estimator, eps=np.full((1,), 0.2)).generate(x, y)
    assert np.array_equal(whole, make(name, estimator, eps=0.2).generate(x, y))


@pytest.mark.parametrize("name", ["APGD", "RandomSearch", "Square", "ObjectivePGD"])
@pytest.mark.parametrize("shape", [(6, *SHAPE), SHAPE, (4, 4), (4,)])
def test_each_value_may_have_a_budget(name, shape):
    _, estimator, x, y = problem((-1.0, 2.0))
    budgets = np.random.default_rng(0).random(shape) * 0.6
    budgets.flat[0] = 0
    steps = {"eps_step": budgets * 0.25 + (budgets == 0)} if name == "ObjectivePGD" else {}
    found = make(name, estimator, eps=budgets, **steps).generate(x, y)
    assert (np.abs(found - x) <= budgets + 1e-6).all()
    assert np.abs(found - x).max() > 0.15
    assert found.min() >= -1
    assert found.max() <= 2
    margin = invariants.margin_of(estimator, found, y) - invariants.margin_of(estimator, x, y)
    assert margin.mean() < 0
    masked = make(name, estimator, eps=budgets, **steps).generate(x, y, mask=np.arange(4) % 2 == 0)
    assert np.array_equal(masked[..., 1::2], x[..., 1::2])


@EachName
def test_what_rounding_left_outside_the_clip_values_is_clipped(name):
    _, estimator, x, y = problem()
    x.flat[:2] = (-9e-6, 1 + 9e-6)
    found = make(name, estimator).generate(x, y)
    assert np.array_equal(found, make(name, estimator).generate(x.clip(0, 1), y))


def by_predictions(estimator, form):
    """The classifier as one of which predictions alone are known."""

    def predict(x):
        logits = estimator.predict(x.astype(np.float32))
        return np.eye(4)[logits.argmax(1)] if form == "labels" else logits

    return Classification.BlackBoxClassifier(predict, input_shape=SHAPE, nb_classes=4, clip_values=(0, 1))


class AsFloat(nn.Module):
    """For preprocessing of ART that gives float64."""

    def forward(self, x):
        return x.float()


@pytest.mark.parametrize("name", WITHOUT_GRADIENTS)
def test_attacks_without_gradients_take_black_boxes(name):
    _, estimator, x, y = problem()
    box = by_predictions(estimator, "logits")
    attack = make(name, box, batch_size=4)
    expected = make(name, estimator, batch_size=4).generate(x, y)
    assert np.array_equal(attack.generate(x, y), expected)
    assert np.array_equal(attack.generate(x, np.eye(4)[y]), expected)
    assert np.array_equal(attack.generate(x), expected)
    labels = make(name, by_predictions(estimator, "labels"), batch_size=4).generate(x, y)
    assert name != "RayS" or np.array_equal(labels, expected)
    # Preprocessing in numpy is no obstacle either, as no gradients flow through it.
    squeezing = art.defences.preprocessor.FeatureSqueezing(clip_values=(0, 1), bit_depth=3)
    network = nn.Sequential(AsFloat(), small_network(SHAPE, 4)).eval()
    _, squeezed, x, y = problem(network=network, preprocessing_defences=squeezing)
    found = make(name, squeezed).generate(x, y)
    assert found.shape == x.shape
    assert name == "SpatialTransformation" or (squeezed.predict(found).argmax(1) != y).any()
