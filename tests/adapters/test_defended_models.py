"""Classifiers with a detector as native models of ART and Foolbox."""

import numpy as np
import pytest
import torch

from robust_ext.adapters.art.estimators import DefendedPyTorchClassifier
from robust_ext.adapters.foolbox.models import DefendedPyTorchModel, Undetected
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.detectors import Detector
from tests.adapters.common import art_classifier
from tests.adapters.hosts import art, foolbox, foolbox_model

EPS = 0.2


class Pattern(Detector):
    """How much of a fixed pattern there is in an image."""

    def score_of(self, seen):
        signs = torch.tensor([1.0, -1.0] * 32)
        return seen.inputs.flatten(1) @ signs


@pytest.fixture(scope="module")
def digits():
    dataset = load_dataset("digits")
    inputs, labels = dataset.take(dataset.choose(300, seed=0))
    return inputs, labels


@pytest.fixture(scope="module")
def detector(digits):
    made = Pattern(digits_network())
    made.calibrate(digits[0][100:], false_positive_rate=0.2)
    return made


def expected(detector, x, y):
    """By hand: rejected where the pattern is above the threshold, else by the network's prediction."""
    signs = torch.tensor([1.0, -1.0] * 32)
    rejected = (x.flatten(1) @ signs > detector.threshold).tolist()
    right = (digits_network()(x).argmax(1) == y).tolist()
    return ["rejected" if r else "correct" if ok else "fooled" for r, ok in zip(rejected, right, strict=True)]


def test_art(digits, detector):
    x, y = digits[0][:40], digits[1][:40]
    plain = art_classifier(detector.classifier, (1, 8, 8), 10)
    plain.model.eval()
    defended = DefendedPyTorchClassifier.from_classifier(plain, detector)
    assert defended.nb_classes == 11
    logits = defended.predict(x.numpy())
    np.testing.assert_allclose(logits[:, :10], plain.predict(x.numpy()), rtol=1e-5, atol=1e-5)
    outcomes = expected(detector, x, y)
    assert defended.outcomes(x.numpy(), y.numpy()) == outcomes
    assert defended.outcomes(x.numpy(), np.eye(10)[y.numpy()]) == outcomes
    rejected = np.array([outcome == "rejected" for outcome in outcomes])
    assert 0 < rejected.sum() < 40
    np.testing.assert_array_equal(logits.argmax(1) == 10, rejected)
    np.testing.assert_array_equal(defended.rejects(x.numpy()), rejected)
    # Aimed at a class, an attack has to get past the detector too; APGD makes a classifier of its own on the way.
    evasion = art.attacks.evasion
    aims = ((y + 1) % 10).numpy()
    for attack in (
        evasion.ProjectedGradientDescent(defended, eps=EPS, eps_step=0.03, max_iter=40, targeted=True, verbose=False),
        evasion.AutoProjectedGradientDescent(
            defended, eps=EPS, eps_step=0.1, max_iter=40, targeted=True, loss_type="cross_entropy", verbose=False
        ),
    ):
        candidates = attack.generate(x.numpy(), aims)
        blind = type(attack)(plain, **{k: getattr(attack, k) for k in ("eps", "eps_step", "max_iter", "targeted")})
        blind.verbose = False
        fooled = defended.outcomes(candidates, y.numpy()).count("fooled")
        assert fooled > defended.outcomes(blind.generate(x.numpy(), aims), y.numpy()).count("fooled")
    only = DefendedPyTorchClassifier.from_classifier(plain, detector, exposure="classifier")
    assert only.predict(x.numpy()).shape == (40, 10)
    for wrong in ("net", None):
        with pytest.raises(InvalidArgumentError, match="classifier: got"):
            DefendedPyTorchClassifier.from_classifier(wrong, detector)
    with pytest.raises(InvalidArgumentError, match="defended: got Sequential"):
        DefendedPyTorchClassifier(digits_network(), input_shape=(1, 8, 8), nb_classes=10, clip_values=(0, 1))


@pytest.mark.parametrize(("name", "settings"), [("LinfPGD", {"steps": 30}), ("LInfFMNAttack", {"steps": 40})])
def test_foolbox(digits, detector, name, settings):
    x, y = digits[0][:40], digits[1][:40]
    plain = foolbox_model(detector.classifier)
    defended = DefendedPyTorchModel.from_model(plain, detector, inputs=x)
    outcomes = expected(detector, x, y)
    torch.testing.assert_close(defended(x)[:, :10], plain(x))
    fooled = Undetected(y)(x, defended(x))
    assert fooled.tolist() == [outcome == "fooled" for outcome in outcomes]
    torch.manual_seed(0)
    _, clipped, success = getattr(foolbox.attacks, name)(**settings)(defended, x, Undetected(y), epsilons=EPS)
    assert success.tolist() == [outcome == "fooled" for outcome in expected(detector, clipped, y)]
    assert int(success.sum()) > 0
    assert "Undetected(" in repr(Undetected(y))
    with pytest.raises(InvalidArgumentError, match="model: got Sequential"):
        DefendedPyTorchModel.from_model(digits_network(), detector, inputs=x)
    with pytest.raises(InvalidArgumentError, match="defended: got Sequential"):
        DefendedPyTorchModel(digits_network(), bounds=(0, 1))
