"""Classifiers with planted adversarial examples as native models of ART and Foolbox."""

import numpy as np
import pytest
import torch

from robust_ext.adapters.art.estimators import BinarizedPyTorchClassifier
from robust_ext.adapters.foolbox.models import BinarizedPyTorchModel
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.binarization import plant
from tests.adapters.common import art_classifier
from tests.adapters.hosts import art, foolbox, foolbox_model

evasion = art.attacks.evasion
EPSILON = 0.1


@pytest.fixture(scope="module")
def digits():
    dataset = load_dataset("digits")
    inputs, _ = dataset.take(dataset.choose(12, seed=0))
    return inputs


def classifier(**settings):
    return art_classifier(digits_network().eval(), (1, 8, 8), 10, **settings)


@pytest.fixture(scope="module")
def in_art(digits):
    return BinarizedPyTorchClassifier.from_classifier(classifier(), digits.numpy(), eps=EPSILON, inner_points=200)


@pytest.fixture(scope="module")
def in_foolbox(digits):
    model = foolbox_model(digits_network())
    return BinarizedPyTorchModel.from_model(model, digits, epsilon=EPSILON, inner_points=200)


def test_they_are_the_planted_classifier(in_art, in_foolbox, digits):
    planted = plant(digits_network(), digits, ThreatModel(norm="linf", epsilon=EPSILON), inner_points=200)
    inner, expected = planted.planted[:, 0], planted.module(planted.inputs).detach()
    assert isinstance(in_foolbox, foolbox.PyTorchModel)
    assert tuple(in_foolbox.bounds) == (0.0, 1.0)
    torch.testing.assert_close(in_foolbox(digits), expected, rtol=1e-4, atol=1e-4)
    assert foolbox.accuracy(in_foolbox, in_foolbox.inputs, in_foolbox.labels) == 1.0
    assert foolbox.accuracy(in_foolbox, inner, in_foolbox.labels) == 0.0
    assert in_foolbox.samples == tuple(range(12))
    assert isinstance(in_art, art.estimators.classification.PyTorchClassifier)
    assert in_art.nb_classes == 2
    np.testing.assert_array_equal(in_art.x, digits.numpy())
    assert in_art.y.tolist() == [[1.0, 0.0]] * 12
    np.testing.assert_allclose(in_art.predict(in_art.x), expected.numpy(), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(in_art.predict(inner.numpy()).argmax(1), 1)
    assert in_art.score(inner.numpy()) == 1
    assert in_art.score(in_art.x) == 0


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ProjectedGradientDescent", {"eps_step": 0.02, "max_iter": 30}),
        ("ProjectedGradientDescentNumpy", {"eps_step": 0.02, "max_iter": 30}),
        ("BasicIterativeMethod", {"eps_step": 0.02, "max_iter": 30}),
        # These two make a PyTorchClassifier of their own around estimator.model.
        ("AutoProjectedGradientDescent", {"eps_step": 0.1, "max_iter": 30, "loss_type": "cross_entropy"}),
        ("AutoProjectedGradientDescent", {"eps_step": 0.1, "max_iter": 30, "loss_type": "difference_logits_ratio"}),
        ("SquareAttack", {"max_iter": 200}),
    ],
)
def test_art_attacks_find_what_is_planted(in_art, name, settings):
    subject = in_art
    if settings.get("loss_type") == "difference_logits_ratio":
        subject = BinarizedPyTorchClassifier(in_art.planted_problems, classes=3)
        assert subject.predict(subject.x).shape == (12, 3)
    attack = getattr(evasion, name)(subject, eps=EPSILON, verbose=False, **settings)
    before = subject.x
    np.random.seed(0)
    candidates = attack.generate(before, subject.y)
    assert subject.score(candidates) >= 0.9
    # Nothing an attack says is believed: the same candidates pushed a little beyond eps do not count.
    pushed = np.clip(before + (candidates - before) * 1.05, 0, 1).astype(np.float32)
    assert subject.score(pushed) < 0.5


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        # On numpy 2, ART sends float64 in these two: a float32 network alone would raise.
        ("HopSkipJump", {"norm": np.inf, "max_iter": 5, "max_eval": 100, "init_eval": 10, "init_size": 500}),
        ("BoundaryAttack", {"max_iter": 20, "targeted": False}),
    ],
)
def test_attacks_that_ask_about_far_points_go_one_by_one(in_art, name, settings, monkeypatch):
    # Both make generators of their own, which take their seed from the system.
    seeded = np.random.RandomState
    monkeypatch.setattr(np.random, "RandomState", lambda seed=None: seeded(0 if seed is None else seed))
    np.random.seed(0)
    one = in_art.single(0)
    candidate = getattr(evasion, name)(one, verbose=False, **settings).generate(one.x, one.y)
    assert one.verify(candidate).outcomes[0] in ("found", "beyond_epsilon")
    assert one.predict(candidate.astype(np.float32)).argmax() == 1


def test_attacks_on_probabilities_are_given_some(digits):
    threat_model = ThreatModel(norm="l2", epsilon=1.0)
    # With the network's own logits the softmax is 1 to the last bit, and SimBA sees no change.
    planted = plant(digits_network(), digits[:1], threat_model, inner_points=50, logit_scale="unit")

    def simba(subject):
        return evasion.SimBA(subject, epsilon=0.1, max_iter=64, verbose=False).generate(subject.x, subject.y)

    with pytest.raises(ValueError, match="predicting probabilities"):
        simba(BinarizedPyTorchClassifier(planted))
    one = BinarizedPyTorchClassifier(planted, probabilities=True)
    candidate = simba(one)
    np.testing.assert_allclose(one.predict(candidate).sum(1), 1, rtol=1e-6)
    assert one.predict(candidate)[0, 0] < one.predict(one.x)[0, 0]


def test_preprocessing_and_bounds_are_kept(digits):
    mean, std = np.array([0.2], dtype=np.float32), np.array([0.5], dtype=np.float32)
    plain = classifier(clip_values=(-1.0, 1.0), preprocessing=(mean, std))
    x = digits.numpy() * 2 - 1
    binarized = BinarizedPyTorchClassifier.from_classifier(plain, x, eps=0.2, norm=2, inner_points=50)
    assert binarized.clip_values[0] == -1
    assert binarized.planted_problems.settings.threat_model == ThreatModel(norm="l2", epsilon=0.2, bounds=(-1.0, 1.0))
    features = binarized.planted_problems.features(torch.from_numpy(x))
    by_hand = digits_network()[:-1](torch.from_numpy((x - mean) / std))
    torch.testing.assert_close(features, by_hand, rtol=1e-4, atol=1e-5)
