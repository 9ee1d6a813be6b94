from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.binarization import plant

pytest.importorskip("eagerpy", reason="Foolbox is not installed")
from eagerpy import astensor

from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.adapters.foolbox.models import BinarizedPyTorchModel

EPSILON = 0.1


@pytest.fixture(scope="module")
def digits() -> Tensor:
    dataset = load_dataset("digits")
    inputs, _ = dataset.take(dataset.choose(12, seed=0))
    return inputs


@pytest.fixture(scope="module")
def binarized(digits: Tensor) -> BinarizedPyTorchModel:
    model = foolbox.PyTorchModel(digits_network(), bounds=(0, 1), device="cpu")
    return BinarizedPyTorchModel.from_model(model, digits, epsilon=EPSILON, inner_points=200)


def test_it_is_the_planted_classifier(binarized: BinarizedPyTorchModel, digits: Tensor) -> None:
    planted = plant(digits_network(), digits, ThreatModel(norm="linf", epsilon=EPSILON), inner_points=200)
    assert isinstance(binarized, foolbox.PyTorchModel)
    assert tuple(binarized.bounds) == (0.0, 1.0)
    torch.testing.assert_close(binarized(digits), planted.module(digits), rtol=1e-4, atol=1e-4)
    assert foolbox.accuracy(binarized, binarized.inputs, binarized.labels) == 1.0
    assert foolbox.accuracy(binarized, planted.planted[:, 0], binarized.labels) == 0.0
    assert binarized.samples == tuple(range(12))


@pytest.mark.parametrize(
    ("call", "settings"),
    [
        ("LinfPGD", {"steps": 30, "rel_stepsize": 0.1}),
        ("LinfAdamPGD", {"steps": 40}),
        ("LinfDeepFoolAttack", {"overshoot": 0.002}),
    ],
)
def test_foolbox_attacks_find_what_is_planted(
    binarized: BinarizedPyTorchModel, call: str, settings: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    attack = getattr(foolbox.attacks, call)(**settings)
    _, clipped, success = attack(binarized, binarized.inputs, binarized.labels, epsilons=EPSILON)
    assert binarized.score(clipped) == float(success.float().mean()) >= 0.8


def test_wrapped_models_and_eagerpy_tensors(digits: Tensor) -> None:
    model = foolbox.PyTorchModel(
        digits_network(), bounds=(0, 1), device="cpu", preprocessing={"mean": [0.2], "std": [0.5], "axis": -3}
    )
    wrapped = foolbox.models.TransformBoundsWrapper(model, (-1, 1))
    x = digits * 2 - 1
    made = BinarizedPyTorchModel.from_model(wrapped, astensor(x), epsilon=0.2, norm="l2", classes=3, inner_points=50)
    assert tuple(made.bounds) == (-1.0, 1.0)
    assert made(x).shape == (12, 3)
    features = made.planted_problems.features(x)
    torch.testing.assert_close(features, digits_network()[:-1]((digits - 0.2) / 0.5), rtol=1e-4, atol=1e-5)
    one = made.single(5)
    assert one(torch.rand(7, 1, 8, 8)).shape == (7, 3)
    assert one.verify(one.inputs).outcomes == ("not_adversarial",)


def test_bad_arguments_are_named(digits: Tensor) -> None:
    with pytest.raises(InvalidArgumentError, match="model: got Sequential, expected a Foolbox PyTorchModel"):
        BinarizedPyTorchModel.from_model(digits_network(), digits, epsilon=0.1)
    model = foolbox.PyTorchModel(digits_network(), bounds=(0, 1), device="cpu")
    with pytest.raises(InvalidArgumentError, match="norm: got 'l7'"):
        BinarizedPyTorchModel.from_model(model, digits, epsilon=0.1, norm="l7")
