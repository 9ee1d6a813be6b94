"""Planted adversarial examples, and classifiers with a detector, as native models of ART and Foolbox."""

from functools import cache

import numpy as np
import pytest
import torch

from robust_ext.adapters.art.estimators import BinarizedPyTorchClassifier, DefendedPyTorchClassifier
from robust_ext.adapters.foolbox.attacks import LinfOrthogonalPGDAttack
from robust_ext.adapters.foolbox.models import BinarizedPyTorchModel, DefendedPyTorchModel, Undetected
from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.detectors import Detector
from robust_ext.detectors.magnet import MagNetDetector
from robust_ext.evaluations.binarization import plant
from tests.adapters.common import art_classifier
from tests.adapters.hosts import art, foolbox, foolbox_model

evasion = art.attacks.evasion
EPSILONS = {"linf": 0.1, "l2": 0.5, "l1": 2.0}
PGD = {"linf": foolbox.attacks.LinfPGD, "l2": foolbox.attacks.L2PGD, "l1": foolbox.attacks.L1PGD}


@cache
def digits(count):
    dataset = load_dataset("digits")
    return dataset.take(dataset.choose(count, seed=0))


def classifier(**settings):
    return art_classifier(digits_network().eval(), (1, 8, 8), 10, **settings)


@cache
def in_art():
    return BinarizedPyTorchClassifier.from_classifier(classifier(), digits(12)[0].numpy(), eps=0.1, inner_points=200)


@cache
def problems(count=10, norm="linf", inner_points=60):
    ball = ThreatModel(norm=norm, epsilon=EPSILONS[norm] if count < 100 else 0.01)
    # With small logits cross-entropy does not saturate, and gradients are not lost to rounding.
    ways = {"inner_points": inner_points, "kappa": 0.5, "logit_scale": "unit"}
    return plant(digits_network(), digits(count)[0], ball, **ways)


def alone(planted, x):
    with torch.no_grad():
        return torch.cat([planted.single(i).module(x[i : i + 1]) for i in range(len(planted))])


def test_they_are_the_planted_classifier():
    x, model = digits(12)[0], foolbox_model(digits_network())
    model = BinarizedPyTorchModel.from_model(model, x, epsilon=0.1, inner_points=200)
    planted = plant(digits_network(), x, ThreatModel(norm="linf", epsilon=0.1), inner_points=200)
    inner, logits = planted.planted[:, 0], planted.module(planted.inputs).detach()
    torch.testing.assert_close(model(x), logits, rtol=1e-4, atol=1e-4)
    assert [foolbox.accuracy(model, points, model.labels) for points in (model.inputs, inner)] == [1, 0]
    assert model.samples == tuple(range(12))
    theirs = in_art()
    np.testing.assert_array_equal(theirs.x, x.numpy())
    assert theirs.y.tolist() == [[1.0, 0.0]] * 12
    np.testing.assert_allclose(theirs.predict(theirs.x), logits.numpy(), rtol=1e-4, atol=1e-4)
    assert (theirs.score(inner.numpy()), theirs.score(theirs.x)) == (1, 0)


STEPS = {"eps_step": 0.02, "max_iter": 30}
APGD = {"eps_step": 0.1, "max_iter": 30}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ProjectedGradientDescent", STEPS),
        ("ProjectedGradientDescentNumpy", STEPS),
        # This makes a PyTorchClassifier of its own around estimator.model.
        ("AutoProjectedGradientDescent", {**APGD, "loss_type": "cross_entropy"}),
        ("AutoProjectedGradientDescent", {**APGD, "loss_type": "difference_logits_ratio"}),
        ("SquareAttack", {"max_iter": 200}),
    ],
)
def test_art_attacks_find_what_is_planted(name, settings):
    subject = in_art()
    if settings.get("loss_type") == "difference_logits_ratio":
        subject = BinarizedPyTorchClassifier(subject.planted_problems, classes=3)
        assert subject.predict(subject.x).shape == (12, 3)
    attack = getattr(evasion, name)(subject, eps=0.1, verbose=False, **settings)
    np.random.seed(0)
    candidates = attack.generate(subject.x, subject.y)
    assert subject.score(candidates) >= 0.9
    # The same candidates pushed a little beyond eps do not count.
    pushed = np.clip(subject.x + (candidates - subject.x) * 1.05, 0, 1).astype(np.float32)
    assert subject.score(pushed) < 0.5


def test_preprocessing_and_bounds_are_kept():
    mean, std = np.array([0.2], dtype=np.float32), np.array([0.5], dtype=np.float32)
    plain = classifier(clip_values=(-1.0, 1.0), preprocessing=(mean, std))
    x = digits(12)[0].numpy() * 2 - 1
    planted = BinarizedPyTorchClassifier.from_classifier(plain, x, eps=0.2, norm=2, inner_points=50).planted_problems
    assert planted.settings.threat_model == ThreatModel(norm="l2", epsilon=0.2, bounds=(-1.0, 1.0))
    by_hand = digits_network()[:-1](torch.from_numpy((x - mean) / std))
    torch.testing.assert_close(planted.features(torch.from_numpy(x)), by_hand, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", NORMS)
def test_far_rows_in_order_have_their_own_readout(norm):
    planted = problems(norm=norm)
    model = BinarizedPyTorchModel(planted)
    for far in (1 - model.inputs, torch.zeros_like(model.inputs), torch.rand(model.inputs.shape) * 9 - 4):
        torch.testing.assert_close(model(far), alone(planted, far), rtol=1e-4, atol=1e-3)
    with pytest.raises(ModelError, match=r"row 2 of a batch of 9 lies .* single\(row\)"):
        model(torch.cat([model.inputs[:2], 5 - model.inputs[2:9]]))


def test_art_does_not_divide_a_batch_of_all_rows():
    planted = problems(140, inner_points=10)
    estimator, far = BinarizedPyTorchClassifier(planted), 1 - planted.inputs
    np.testing.assert_allclose(estimator.predict(far.numpy()), alone(planted, far).numpy(), rtol=1e-4, atol=1e-3)
    with pytest.raises(ModelError, match="row 0 of a batch of 32"):
        estimator.predict(far.numpy()[:100], batch_size=32)
    # What ART predicts to tell probabilities from logits is no query.
    ones = np.ones((1, 1, 8, 8), dtype=np.float32)
    assert estimator.predict(ones).shape == (1, 2)
    with pytest.raises(ModelError):
        estimator.predict(ones * 0.999)


def test_arts_gradients_of_far_rows_are_their_own():
    estimator, far = BinarizedPyTorchClassifier(problems()), (1 - problems().inputs).numpy()
    together = estimator.loss_gradient(far, estimator.y), estimator.class_gradient(far, label=1)
    for i in (0, 3, 9):
        one, row = estimator.single(i), far[i : i + 1]
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
    near, far, planted = model(x), model(1 - x), model.planted_problems.planted
    moved, epsilon = model.transform_bounds(bounds, **how), EPSILONS[norm] * width
    assert (moved is model) == bool(how.get("inplace"))
    assert tuple(moved.bounds) == bounds
    torch.testing.assert_close(moved.inputs, x * width + low)
    torch.testing.assert_close(moved.planted_problems.planted, planted * width + low)
    for points, logits in ((x, near), (1 - x, far)):
        torch.testing.assert_close(moved(points * width + low), logits, rtol=1e-3, atol=1e-3)
    there = ThreatModel(norm=norm, epsilon=epsilon, bounds=(low, low + width))
    assert moved.planted_problems.settings.threat_model == there
    torch.manual_seed(0)
    _, candidates, success = PGD[norm](steps=40)(moved, moved.inputs, moved.labels, epsilons=epsilon)
    assert [outcome == "found" for outcome in moved.verify(candidates).outcomes] == success.tolist()
    assert success.any()
    assert moved.single(2).score(candidates[2:3]) == float(success[2])
    # Where the inputs were, nothing is admissible any more.
    assert set(moved.verify(planted[:, 0]).outcomes) <= {"out_of_bounds", "beyond_epsilon"}


class Pattern(Detector):
    """How much of a fixed pattern there is in an image."""

    def score_of(self, seen):
        return seen.inputs.flatten(1) @ torch.tensor([1.0, -1.0] * 32)


@cache
def detector():
    made = Pattern(digits_network())
    made.calibrate(digits(300)[0][100:], false_positive_rate=0.2)
    return made


def expected(x, y):
    """By hand: rejected where the pattern is above the threshold, else by the network's prediction."""
    rejected = (x.flatten(1) @ torch.tensor([1.0, -1.0] * 32) > detector().threshold).tolist()
    right = (digits_network()(x).argmax(1) == y).tolist()
    return ["rejected" if r else "correct" if ok else "fooled" for r, ok in zip(rejected, right, strict=True)]


def test_what_art_is_told_of_a_detector():
    x, y = (part[:40] for part in digits(300))
    plain = art_classifier(detector().classifier.eval(), (1, 8, 8), 10)
    defended = DefendedPyTorchClassifier.from_classifier(plain, detector())
    logits, outcomes = defended.predict(x.numpy()), expected(x, y)
    np.testing.assert_allclose(logits[:, :10], plain.predict(x.numpy()), rtol=1e-5, atol=1e-5)
    assert defended.outcomes(x.numpy(), y.numpy()) == defended.outcomes(x.numpy(), np.eye(10)[y.numpy()]) == outcomes
    rejected = np.array([outcome == "rejected" for outcome in outcomes])
    np.testing.assert_array_equal(logits.argmax(1) == 10, rejected)
    np.testing.assert_array_equal(defended.rejects(x.numpy()), rejected)
    # Aimed at a class, an attack has to get past the detector too; APGD makes a classifier of its own on the way.
    aims, ways = ((y + 1) % 10).numpy(), {"eps": 0.2, "max_iter": 20, "targeted": True, "verbose": False}
    for kind, more in (
        (evasion.ProjectedGradientDescent, {"eps_step": 0.03}),
        (evasion.AutoProjectedGradientDescent, {"eps_step": 0.1, "loss_type": "cross_entropy", "nb_random_init": 1}),
    ):
        seeing, blind = (kind(one, **ways, **more).generate(x.numpy(), aims) for one in (defended, plain))
        fooled = [defended.outcomes(found, y.numpy()).count("fooled") for found in (seeing, blind)]
        assert fooled[0] > fooled[1]
    only = DefendedPyTorchClassifier.from_classifier(plain, detector(), exposure="classifier")
    assert only.predict(x.numpy()).shape == (40, 10)
    with pytest.raises(InvalidArgumentError, match="classifier: got"):
        DefendedPyTorchClassifier.from_classifier("net", detector())
    with pytest.raises(InvalidArgumentError, match="defended: got Sequential"):
        DefendedPyTorchClassifier(digits_network(), input_shape=(1, 8, 8), nb_classes=10, clip_values=(0, 1))


@pytest.mark.parametrize(("name", "settings"), [("LinfPGD", {"steps": 30}), ("LInfFMNAttack", {"steps": 40})])
def test_what_foolbox_is_told_of_a_detector(name, settings):
    x, y = (part[:40] for part in digits(300))
    plain = foolbox_model(detector().classifier)
    defended = DefendedPyTorchModel.from_model(plain, detector(), inputs=x)
    torch.testing.assert_close(defended(x)[:, :10], plain(x))
    torch.manual_seed(0)
    _, clipped, success = getattr(foolbox.attacks, name)(**settings)(defended, x, Undetected(y), epsilons=0.2)
    for points, judged in ((x, Undetected(y)(x, defended(x))), (clipped, success)):
        assert judged.tolist() == [outcome == "fooled" for outcome in expected(points, y)]
    assert int(success.sum()) > 0
    with pytest.raises(InvalidArgumentError, match="model: got Sequential"):
        DefendedPyTorchModel.from_model(digits_network(), detector(), inputs=x)


@pytest.mark.parametrize(("kind", "how"), [(Pattern, {"inplace": True}), (MagNetDetector, {"wrapper": True})])
def test_a_detector_moves_with_its_classifier(kind, how):
    (inputs, labels), network = digits(200), digits_network()
    made = kind(network)
    if kind is MagNetDetector:
        made.fit(inputs[100:], epochs=1)
    # Pattern also has a threshold for each class.
    made.calibrate(inputs, false_positive_rate=0.2, per_class=kind is Pattern)
    model = DefendedPyTorchModel.from_model(foolbox_model(network), made, inputs=inputs)
    x, y = inputs[:30], labels[:30]
    points = torch.cat([x, torch.rand(x.shape, generator=torch.Generator().manual_seed(0))])
    logits, (classes, rejected) = model(points), model.defended.decide(points)
    assert 0 < int(rejected.sum()) < 60
    moved = model.transform_bounds((0, 255), **how)
    assert (moved is model) == bool(how.get("inplace"))
    assert tuple(moved.bounds) == (0, 255)
    torch.testing.assert_close(moved(points * 255), logits, rtol=1e-3, atol=1e-3)
    for found, before in zip(moved.defended.decide(points * 255), (classes, rejected), strict=True):
        assert torch.equal(found, before)
    torch.manual_seed(0)
    attack = LinfOrthogonalPGDAttack(steps=20)
    _, candidates, success = attack(moved, x * 255, Undetected(y), epsilons=0.3 * 255)
    assert int(success.sum()) > 5
    fooled = network(candidates / 255).argmax(1) != y
    assert torch.equal(success, fooled & ~made.decide(candidates / 255))
