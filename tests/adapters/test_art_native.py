from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from robust_ext.adapters.native import search_module
from robust_ext.attacks.apgd import APGD
from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.threat import ThreatModel
from robust_ext.estimators import BinarizedPyTorchClassifier
from robust_ext.registry import as_attack
from robust_ext.testing.networks import small_batch, small_network

attacks = pytest.importorskip("robust_ext.adapters.art.attacks", reason="ART is not installed")
invariants = pytest.importorskip("robust_ext.testing.art_invariants", reason="ART is not installed")
art = invariants.art
Base: Any = invariants.ArtAttackInvariants

WRONG: Any = (*Base.wrong_settings, {"seed": -1}, {"eps": np.array([0.1, 0.2])}, {"eps": float("inf")})
NORMS = [("linf", np.inf), ("linf", "inf"), ("l2", 2), ("l1", 1)]


class TestLinfAPGD(Base):
    wrong_settings = (*WRONG, {"steps": 0}, {"loss": "hinge"}, {"restarts": 1.5})

    def make_attack(self, estimator: Any, **settings: Any) -> Any:
        return attacks.APGD(estimator, **{"steps": 8, **settings})


class TestL2APGD(Base):
    norm = 2

    def make_attack(self, estimator: Any, **settings: Any) -> Any:
        return attacks.APGD(estimator, **{"norm": 2, "steps": 8, "loss": "dlr", "restarts": 2, **settings})


class TestL1APGD(Base):
    norm = 1

    def make_attack(self, estimator: Any, **settings: Any) -> Any:
        return attacks.APGD(estimator, **{"norm": 1, "steps": 8, "loss": "margin", **settings})


class TestLinfRandomSearch(Base):
    wrong_settings = (*WRONG, {"points": 0}, {"outer": "middle"}, {"outer_share": 2})

    def make_attack(self, estimator: Any, **settings: Any) -> Any:
        return attacks.RandomSearch(estimator, **{"points": 60, **settings})


class TestL2RandomSearch(Base):
    norm = 2

    def make_attack(self, estimator: Any, **settings: Any) -> Any:
        return attacks.RandomSearch(estimator, **{"norm": 2, "points": 60, "outer": "surface", **settings})


class TestL1RandomSearch(Base):
    norm = 1
    epsilon = 0.4

    def make_attack(self, estimator: Any, **settings: Any) -> Any:
        return attacks.RandomSearch(estimator, **{"norm": 1, "points": 60, **settings})


def problem(bounds: Any = (0.0, 1.0), **settings: Any) -> tuple[nn.Module, Any, Any, Any]:
    network = small_network((1, 4, 4), 4, bounds=bounds or (0.0, 1.0))
    x = small_batch(6, (1, 4, 4), bounds=bounds or (0.0, 1.0))
    estimator = invariants.PyTorchClassifier(
        model=network,
        loss=nn.CrossEntropyLoss(),
        input_shape=(1, 4, 4),
        nb_classes=4,
        clip_values=bounds,
        device_type="cpu",
        **settings,
    )
    return network, estimator, x.numpy(), network(x).argmax(1).numpy()


@pytest.mark.parametrize(
    ("attack_class", "settings"),
    [
        (attacks.APGD, {"steps": 6}),
        (attacks.APGD, {"steps": 4, "start": "input"}),
        (attacks.RandomSearch, {"points": 9}),
    ],
)
@pytest.mark.parametrize(("norm", "value"), NORMS)
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 2.0)])
@pytest.mark.parametrize("targeted", [False, True])
def test_points_are_those_of_the_attack_itself(
    attack_class: Any, settings: dict[str, Any], norm: str, value: Any, bounds: tuple[float, float], targeted: bool
) -> None:
    network, estimator, x, y = problem(bounds)
    labels = (y + 1) % 4 if targeted else y
    epsilon = {"linf": 0.1, "l2": 0.4, "l1": 1.6}[norm] * (bounds[1] - bounds[0])
    attack = attack_class(estimator, norm=value, eps=epsilon, seed=5, targeted=targeted, verbose=False, **settings)
    expected = search_module(
        attack.native(),
        network,
        torch.from_numpy(x),
        torch.from_numpy(labels),
        threat_model=ThreatModel(norm=norm, epsilon=epsilon, bounds=bounds),
        generator=torch.Generator().manual_seed(5),
        targeted=targeted,
    )
    points = attack.generate(x, labels)
    assert np.array_equal(points, expected.numpy())
    assert not np.array_equal(points, x)


def test_foolbox_gives_the_same_points() -> None:
    twins = pytest.importorskip("robust_ext.adapters.foolbox.attacks", reason="Foolbox is not installed")
    network, estimator, x, y = problem()
    model = twins.foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
    here = attacks.APGD(estimator, norm=2, eps=0.4, steps=7, seed=2, batch_size=2, verbose=False).generate(x, y)
    there = twins.L2APGD(steps=7, seed=2)(model, torch.from_numpy(x), torch.from_numpy(y), epsilons=0.4)[0]
    np.testing.assert_allclose(here, there.numpy(), atol=1e-6)


def test_a_seed_overrides_numpys() -> None:
    _, estimator, x, y = problem()
    runs = []
    for seed in (None, 7):
        for numpy_seed in (0, 1):
            np.random.seed(numpy_seed)
            runs.append(attacks.RandomSearch(estimator, eps=0.01, points=3, seed=seed, verbose=False).generate(x, y))
    assert not np.array_equal(runs[0], runs[1])
    assert np.array_equal(runs[2], runs[3])


def test_no_budget_leaves_the_inputs() -> None:
    _, estimator, x, y = problem()
    points = attacks.APGD(estimator, eps=0, verbose=False).generate(x, y)
    assert np.array_equal(points, x)
    assert not np.shares_memory(points, x)


def test_the_summary_writer_gets_gradients_of_what_is_attacked() -> None:
    network, estimator, x, y = problem()
    points = torch.from_numpy(x.copy()).requires_grad_()
    loss = nn.functional.cross_entropy(network(points), torch.from_numpy(y), reduction="sum")
    gradient = torch.autograd.grad(loss, points)[0].numpy()
    writer = invariants.RecordingWriter()
    attack = attacks.APGD(estimator, eps=0.1, steps=3, start="input", verbose=False)
    attack.set_params(summary_writer=writer)
    attack.generate(x, y)
    first = writer.updates[0]
    assert np.array_equal(first["x"], x)
    np.testing.assert_allclose(first["grad"], gradient, atol=1e-5)
    assert len(writer.updates) == 4
    assert writer.updates[3]["grad"] is None
    attack.set_params(summary_writer=False)
    attack.generate(x, y)
    assert len(writer.updates) == 4
    with pytest.raises(ValueError, match="summary_writer"):
        attack.set_params(summary_writer=3)


def test_float64_inputs_are_taken() -> None:
    _, estimator, x, y = problem()
    attack = attacks.APGD(estimator, eps=0.1, steps=3, seed=0, verbose=False)
    assert np.array_equal(attack.generate(x.astype(np.float64), y), attack.generate(x, y))


@pytest.mark.parametrize(
    ("labels", "shown"),
    [
        (np.array([0, 1, 2]), r"y: got shape \(3,\)"),
        (np.array([0, 1, 2, 3, 4, 0]), "y: got labels in 0..4"),
        (np.array([0, 1, 2, 3, -1, 0]), "y: got labels in -1..3"),
        (np.eye(5)[:5], r"y: got shape \(5, 5\)"),
        (np.eye(6), r"y: got shape \(6, 6\)"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels: Any, shown: str) -> None:
    _, estimator, x, _ = problem()
    with pytest.raises(InvalidArgumentError, match=shown):
        attacks.APGD(estimator, verbose=False).generate(x, labels)


def test_inputs_beyond_the_clip_values_are_refused() -> None:
    _, estimator, x, y = problem()
    with pytest.raises(InvalidArgumentError, match="bounds"):
        attacks.RandomSearch(estimator, verbose=False).generate(x + 1, y)


def test_unknown_keywords_are_refused() -> None:
    _, estimator, x, y = problem()
    with pytest.raises(InvalidArgumentError, match="mask"):
        attacks.RandomSearch(estimator, verbose=False).generate(x, y, mask=np.ones_like(x))


def test_clip_values_are_needed() -> None:
    _, estimator, x, y = problem(None)
    with pytest.raises(InvalidArgumentError, match="clip_values=None"):
        attacks.APGD(estimator, verbose=False).generate(x, y)


def test_preprocessing_in_numpy_is_refused() -> None:
    squeezing = art.defences.preprocessor.FeatureSqueezing(clip_values=(0, 1))
    _, estimator, x, y = problem(preprocessing_defences=squeezing)
    with pytest.raises(ModelError, match="FeatureSqueezing"):
        attacks.APGD(estimator, verbose=False).generate(x, y)


def test_classifiers_of_other_frameworks_are_refused() -> None:
    class Elsewhere(  # type: ignore[misc]
        art.estimators.classification.ClassGradientsMixin,
        art.estimators.classification.ClassifierMixin,
        art.estimators.BaseEstimator,
        art.estimators.LossGradientsMixin,
    ):
        def __init__(self) -> None:
            super().__init__(model=None, clip_values=(0, 1))

        input_shape = (1, 4, 4)
        nb_classes = 4

        def predict(self, x: Any, **kwargs: Any) -> Any:
            return np.zeros((len(x), 4))

        def fit(self, x: Any, y: Any, **kwargs: Any) -> None: ...

        def loss_gradient(self, x: Any, y: Any, **kwargs: Any) -> Any: ...

        def class_gradient(self, x: Any, label: Any = None, **kwargs: Any) -> Any: ...

    for attack_class in (attacks.APGD, attacks.RandomSearch):
        with pytest.raises(InvalidArgumentError, match="a Elsewhere, expected a PyTorchClassifier"):
            attack_class(Elsewhere())


def test_planted_points_are_found() -> None:
    network, x = small_network((1, 8, 8), 4), small_batch(6, (1, 8, 8)).numpy()
    estimator = invariants.PyTorchClassifier(
        model=network,
        loss=nn.CrossEntropyLoss(),
        input_shape=(1, 8, 8),
        nb_classes=4,
        clip_values=(0, 1),
        device_type="cpu",
    )
    planted = BinarizedPyTorchClassifier.from_classifier(estimator, x, eps=0.1)
    found = attacks.APGD(planted, eps=0.1, steps=30, loss="dlr", verbose=False).generate(planted.x, planted.y)
    assert planted.score(found) == 1.0
    missed = attacks.RandomSearch(planted, eps=0.1, points=40, verbose=False).generate(planted.x, planted.y)
    assert planted.score(missed) < 1.0


def test_as_an_attack_of_this_project_it_is_the_core_attack() -> None:
    estimator = art.estimators.classification.PyTorchClassifier(
        small_network((5,), 3), loss=nn.CrossEntropyLoss(), input_shape=(5,), nb_classes=3
    )
    attack = as_attack(attacks.APGD(estimator, steps=7, loss="margin"), name="mine")
    assert isinstance(attack, APGD)
    assert (attack.name, attack.traits.batching) == ("mine", "full")
    assert attack.steps == 7
