from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.binarization import plant

pytest.importorskip("robust_ext.adapters.art.estimators", reason="ART is not installed")
from robust_ext.adapters.art.estimators import BinarizedPyTorchClassifier
from robust_ext.adapters.art.library import art

evasion = art.attacks.evasion
PyTorchClassifier = art.estimators.classification.PyTorchClassifier
EPS = 0.1


@pytest.fixture(scope="module")
def digits() -> Tensor:
    dataset = load_dataset("digits")
    inputs, _ = dataset.take(dataset.choose(12, seed=0))
    return inputs


def classifier(**settings: Any) -> Any:
    return PyTorchClassifier(
        digits_network(),
        loss=nn.CrossEntropyLoss(),
        input_shape=(1, 8, 8),
        nb_classes=10,
        **{"clip_values": (0, 1), "device_type": "cpu", **settings},
    )


def evaluated(**settings: Any) -> Any:
    made = classifier(**settings)
    made.model.eval()
    return made


@pytest.fixture(scope="module")
def binarized(digits: Tensor) -> BinarizedPyTorchClassifier:
    return BinarizedPyTorchClassifier.from_classifier(evaluated(), digits.numpy(), eps=EPS, inner_points=200)


def test_it_is_the_planted_classifier(binarized: BinarizedPyTorchClassifier, digits: Tensor) -> None:
    planted = plant(digits_network(), digits, ThreatModel(norm="linf", epsilon=EPS), inner_points=200)
    assert isinstance(binarized, PyTorchClassifier)
    assert binarized.nb_classes == 2
    np.testing.assert_array_equal(binarized.x, digits.numpy())
    assert binarized.y.tolist() == [[1.0, 0.0]] * 12
    expected = planted.module(planted.inputs).detach().numpy()
    np.testing.assert_allclose(binarized.predict(binarized.x), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(binarized.predict(planted.planted[:, 0].numpy()).argmax(1), 1)
    assert binarized.score(planted.planted[:, 0].numpy()) == 1
    assert binarized.score(binarized.x) == 0


def test_gradients_reach_each_rows_own_problem(binarized: BinarizedPyTorchClassifier) -> None:
    shuffled = np.random.default_rng(0).permutation(12)
    together = binarized.loss_gradient(binarized.x, binarized.y)
    np.testing.assert_allclose(
        binarized.loss_gradient(binarized.x[shuffled], binarized.y[shuffled]), together[shuffled], rtol=1e-4, atol=1e-6
    )
    one = binarized.single(3)
    np.testing.assert_allclose(one.loss_gradient(one.x, one.y)[0], together[3], rtol=1e-4, atol=1e-6)


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
def test_art_attacks_find_what_is_planted(
    binarized: BinarizedPyTorchClassifier, name: str, settings: dict[str, Any]
) -> None:
    subject = binarized
    if settings.get("loss_type") == "difference_logits_ratio":
        subject = BinarizedPyTorchClassifier(binarized.planted_problems, classes=3)
        assert subject.predict(subject.x).shape == (12, 3)
    attack = getattr(evasion, name)(subject, eps=EPS, verbose=False, **settings)
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
        ("HopSkipJump", {"norm": np.inf, "max_iter": 5, "max_eval": 100, "init_eval": 10, "init_size": 20}),
        ("BoundaryAttack", {"max_iter": 20, "targeted": False}),
    ],
)
def test_attacks_that_ask_about_far_points_go_one_by_one(
    binarized: BinarizedPyTorchClassifier, name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both make generators of their own, which take their seed from the system.
    seeded = np.random.RandomState
    monkeypatch.setattr(np.random, "RandomState", lambda seed=None: seeded(0 if seed is None else seed))
    np.random.seed(0)
    one = binarized.single(0)
    candidate = getattr(evasion, name)(one, verbose=False, **settings).generate(one.x, one.y)
    assert one.verify(candidate).outcomes[0] in ("found", "beyond_epsilon")
    assert one.predict(candidate.astype(np.float32)).argmax() == 1


def test_attacks_on_probabilities_are_given_some(digits: Tensor) -> None:
    threat_model = ThreatModel(norm="l2", epsilon=1.0)
    # With the network's own logits the softmax is 1 to the last bit, and SimBA sees no change.
    planted = plant(digits_network(), digits[:1], threat_model, inner_points=50, logit_scale="unit")

    def simba(subject: BinarizedPyTorchClassifier) -> Any:
        return evasion.SimBA(subject, epsilon=0.1, max_iter=64, verbose=False).generate(subject.x, subject.y)

    with pytest.raises(ValueError, match="predicting probabilities"):
        simba(BinarizedPyTorchClassifier(planted))
    one = BinarizedPyTorchClassifier(planted, probabilities=True)
    candidate = simba(one)
    np.testing.assert_allclose(one.predict(candidate).sum(1), 1, rtol=1e-6)
    assert one.predict(candidate)[0, 0] < one.predict(one.x)[0, 0]


def test_preprocessing_and_bounds_are_kept(digits: Tensor) -> None:
    mean, std = np.array([0.2], dtype=np.float32), np.array([0.5], dtype=np.float32)
    plain = evaluated(clip_values=(-1.0, 1.0), preprocessing=(mean, std))
    x = digits.numpy() * 2 - 1
    binarized = BinarizedPyTorchClassifier.from_classifier(plain, x, eps=0.2, norm=2, inner_points=50)
    assert binarized.clip_values[0] == -1
    assert binarized.planted_problems.settings.threat_model == ThreatModel(norm="l2", epsilon=0.2, bounds=(-1.0, 1.0))
    features = binarized.planted_problems.features(torch.from_numpy(x))
    by_hand = digits_network()[:-1](torch.from_numpy((x - mean) / std))
    torch.testing.assert_close(features, by_hand, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": 3}, "norm: got 3, expected np.inf, 'inf', 2 or 1"),
        ({"eps": -1.0}, "epsilon: got -1.0"),
        ({"classifier": "net"}, "classifier: got str, expected an ART PyTorchClassifier"),
        ({"classifier": {"clip_values": None}}, "classifier: got no clip_values"),
        ({"kapa": 1}, "kapa: .*did you mean kappa"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str, digits: Tensor) -> None:
    arguments: dict[str, Any] = {"classifier": {}, "x": digits.numpy()[:2], "eps": 0.1, **change}
    if isinstance(arguments["classifier"], dict):
        arguments["classifier"] = evaluated(**arguments["classifier"])
    subject, x = arguments.pop("classifier"), arguments.pop("x")
    with pytest.raises(InvalidArgumentError, match=message):
        BinarizedPyTorchClassifier.from_classifier(subject, x, **arguments)


def test_it_cannot_be_trained(binarized: BinarizedPyTorchClassifier) -> None:
    with pytest.raises(ValueError, match="optimizer"):
        binarized.fit(binarized.x, binarized.y)
