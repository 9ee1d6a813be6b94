"""Far points, other orders and other bounds: host models of planted examples against each of their problems alone."""

from functools import cache

import numpy as np
import pytest
import torch

from robust_ext.adapters.art.estimators import BinarizedPyTorchClassifier
from robust_ext.adapters.foolbox.attacks import LinfOrthogonalPGDAttack
from robust_ext.adapters.foolbox.models import BinarizedPyTorchModel, DefendedPyTorchModel, Undetected
from robust_ext.core.errors import ModelError
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.detectors.magnet import MagNetDetector
from robust_ext.evaluations.binarization import plant
from tests.adapters.hosts import foolbox, foolbox_model
from tests.adapters.test_defended_models import Pattern

EPSILONS = {"linf": 0.1, "l2": 0.5, "l1": 2.0}
PGD = {"linf": foolbox.attacks.LinfPGD, "l2": foolbox.attacks.L2PGD, "l1": foolbox.attacks.L1PGD}


def digits(count):
    dataset = load_dataset("digits")
    return dataset.take(dataset.choose(count, seed=0))


@cache
def problems(count=10, norm="linf", inner_points=60):
    epsilon = EPSILONS[norm] if count < 100 else 0.01
    ball = ThreatModel(norm=norm, epsilon=epsilon)
    # With small logits cross-entropy does not saturate, and gradients are not lost to rounding.
    ways = {"inner_points": inner_points, "kappa": 0.5, "logit_scale": "unit"}
    return plant(digits_network(), digits(count)[0], ball, **ways)


@pytest.fixture(scope="module")
def ten():
    return problems()


def alone(planted, x):
    with torch.no_grad():
        return torch.cat([planted.single(i).module(x[i : i + 1]) for i in range(len(planted))])


@pytest.mark.parametrize("norm", NORMS)
def test_far_rows_in_order_have_their_own_readout(norm):
    planted = problems(norm=norm)
    model = BinarizedPyTorchModel(planted)
    for far in (1 - model.inputs, torch.zeros_like(model.inputs), torch.rand(model.inputs.shape) * 9 - 4):
        torch.testing.assert_close(model(far), alone(planted, far), rtol=1e-4, atol=1e-3)
    with pytest.raises(ModelError, match=r"row 2 of a batch of 9 lies .* single\(row\)"):
        model(torch.cat([model.inputs[:2], 5 - model.inputs[2:9]]))


@pytest.mark.parametrize(
    "name",
    [
        *("InversionAttack", "BinarySearchContrastReductionAttack"),
        pytest.param("LinearSearchContrastReductionAttack", marks=pytest.mark.exhaustive),
    ],
)
def test_attacks_that_go_far_find_the_same_in_a_batch_and_row_by_row(ten, name):
    model = BinarizedPyTorchModel(ten)
    attack = getattr(foolbox.attacks, name)(distance=foolbox.distances.l2)
    # All that is misclassified counts, wherever it lies.
    _, candidates, success = attack(model, model.inputs, model.labels, epsilons=100.0)
    one_by_one = []
    for i in range(10):
        one = model.single(i)
        one_by_one.append(attack(one, one.inputs, one.labels, epsilons=100.0)[1:])
    assert success.tolist() == [bool(found) for _, found in one_by_one]
    assert 0 < int(success.sum()) < 10
    torch.testing.assert_close(candidates, torch.cat([found for found, _ in one_by_one]))


def test_art_does_not_divide_a_batch_of_all_rows():
    planted = problems(140, inner_points=10)
    estimator = BinarizedPyTorchClassifier(planted)
    assert len(planted) > 128
    far = 1 - planted.inputs
    np.testing.assert_allclose(estimator.predict(far.numpy()), alone(planted, far).numpy(), rtol=1e-4, atol=1e-3)
    with pytest.raises(ModelError, match="row 0 of a batch of 32"):
        estimator.predict(far.numpy()[:100], batch_size=32)
    # What ART predicts to tell probabilities from logits is no query.
    ones = np.ones((1, 1, 8, 8), dtype=np.float32)
    assert estimator.predict(ones).shape == (1, 2)
    with pytest.raises(ModelError):
        estimator.predict(ones * 0.999)


def test_arts_gradients_of_far_rows_are_their_own(ten):
    estimator, far = BinarizedPyTorchClassifier(ten), (1 - ten.inputs).numpy()
    together = estimator.loss_gradient(far, estimator.y), estimator.class_gradient(far, label=1)
    for i in (0, 3, 9):
        one = estimator.single(i)
        row = far[i : i + 1]
        # ART's loss is the mean of the batch.
        np.testing.assert_allclose(one.loss_gradient(row, one.y)[0], 10 * together[0][i], rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(one.class_gradient(row, label=1)[0], together[1][i], rtol=1e-3, atol=1e-5)
    assert min(np.abs(gradient).max() for gradient in together) > 0.01
    with pytest.raises(ModelError, match="row 0 of a batch of 3"):
        estimator.loss_gradient(far[4:7], estimator.y[4:7])


@pytest.mark.parametrize(
    ("norm", "bounds", "how"),
    [("linf", (0, 255), {}), ("l2", (-3.0, -1.0), {"wrapper": True}), ("l1", (0, 255), {"inplace": True})],
)
def test_transformed_bounds_move_everything(norm, bounds, how):
    model = BinarizedPyTorchModel(problems(6, norm))
    x, low, width = model.inputs, float(bounds[0]), float(bounds[1] - bounds[0])
    before = [model(x), model(1 - x), model.planted_problems.planted]
    torch.manual_seed(0)
    as_it_was = PGD[norm](steps=40)(model, x, model.labels, epsilons=EPSILONS[norm])[2]
    moved = model.transform_bounds(bounds, **how)
    assert (moved is model) == bool(how.get("inplace"))
    assert tuple(moved.bounds) == bounds
    torch.testing.assert_close(moved.inputs, x * width + low)
    torch.testing.assert_close(moved.planted_problems.planted, before[2] * width + low)
    for points, logits in ((x, before[0]), (1 - x, before[1])):
        torch.testing.assert_close(moved(points * width + low), logits, rtol=1e-3, atol=1e-3)
    epsilon = EPSILONS[norm] * width
    assert moved.planted_problems.settings.threat_model == ThreatModel(
        norm=norm, epsilon=epsilon, bounds=(low, low + width)
    )
    torch.manual_seed(0)
    _, candidates, success = PGD[norm](steps=40)(moved, moved.inputs, moved.labels, epsilons=epsilon)
    assert [outcome == "found" for outcome in moved.verify(candidates).outcomes] == success.tolist()
    assert success.tolist() == as_it_was.tolist()
    assert success.any()
    assert moved.single(2).score(candidates[2:3]) == float(success[2])
    assert moved.score(moved.planted_problems.planted[:, 0]) == 1
    # Where the inputs were, nothing is admissible any more.
    assert set(moved.verify(before[2][:, 0]).outcomes) <= {"out_of_bounds", "beyond_epsilon"}
    back = moved.transform_bounds((0, 1))
    torch.testing.assert_close(back.inputs, x, rtol=0, atol=1e-6)
    assert back.score(back.planted_problems.planted[:, 0]) == 1


@pytest.mark.parametrize(("kind", "how"), [(Pattern, {"inplace": True}), (MagNetDetector, {"wrapper": True})])
def test_a_detector_moves_with_its_classifier(kind, how):
    inputs, labels = digits(200)
    network = digits_network()
    detector = kind(network)
    if kind is MagNetDetector:
        detector.fit(inputs[100:], epochs=1)
    # Pattern also has a threshold for each class.
    detector.calibrate(inputs, false_positive_rate=0.2, per_class=kind is Pattern)
    model = DefendedPyTorchModel.from_model(foolbox_model(network), detector, inputs=inputs)
    x, y = inputs[:30], labels[:30]
    points = torch.cat([x, torch.rand(x.shape, generator=torch.Generator().manual_seed(0))])
    torch.manual_seed(0)
    logits = model(points)
    classes, rejected = model.defended.decide(points)
    assert 0 < int(rejected.sum()) < 60
    moved = model.transform_bounds((0, 255), **how)
    assert (moved is model) == bool(how.get("inplace"))
    assert tuple(moved.bounds) == (0, 255)
    torch.manual_seed(0)
    torch.testing.assert_close(moved(points * 255), logits, rtol=1e-3, atol=1e-3)
    found = moved.defended.decide(points * 255)
    assert torch.equal(found[0], classes)
    assert torch.equal(found[1], rejected)
    torch.manual_seed(0)
    attack = LinfOrthogonalPGDAttack(steps=20)
    _, candidates, success = attack(moved, x * 255, Undetected(y), epsilons=0.3 * 255)
    assert int(success.sum()) > 5
    fooled = network(candidates / 255).argmax(1) != y
    assert torch.equal(success, fooled & ~detector.decide(candidates / 255))
