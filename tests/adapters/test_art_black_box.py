from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from robust_ext.adapters.native import search_module
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.threat import ThreatModel
from robust_ext.registry import as_attack, rays, square
from robust_ext.testing.networks import small_batch, small_network

black_box = pytest.importorskip("robust_ext.adapters.art.black_box", reason="ART is not installed")
invariants = pytest.importorskip("robust_ext.testing.art_invariants", reason="ART is not installed")
art = invariants.art
Base: Any = invariants.ArtAttackInvariants

NORMS = {"linf": np.inf, "l2": 2, "l1": 1}
EPSILONS = {"linf": 0.1, "l2": 0.4, "l1": 1.6}


class TestRayS(Base):
    wrong_settings = (
        *Base.wrong_settings,
        {"norm": 2},
        {"eps": 0.0},
        {"queries": 0},
        {"tolerance": 0.0},
        {"stop": 1},
        {"keep_rows": "no"},
        {"seed": -1},
    )

    def make_attack(self, estimator: Any, **chosen: Any) -> Any:
        return black_box.RayS(estimator, **{"queries": 400, **chosen})

    @pytest.mark.parametrize("bounds", [(0.0, 1.0)])
    def test_targeted_points_go_to_their_targets(self, bounds: Any) -> None:
        """They are refused."""
        estimator, _, _ = self._problem(bounds)
        with pytest.raises(InvalidArgumentError, match=r"targeted: got True.*cannot aim"):
            self._make(estimator, targeted=True)
        with pytest.raises(InvalidArgumentError, match="targeted"):
            self._make(estimator).set_params(targeted=True)


class TestLinfSquare(Base):
    wrong_settings = (
        *Base.wrong_settings,
        {"queries": 0},
        {"p": 0.0},
        {"restarts": 0},
        {"loss": "dlr"},
        {"stop_early": "yes"},
        {"seed": -1},
    )

    def make_attack(self, estimator: Any, **chosen: Any) -> Any:
        return black_box.Square(estimator, **{"queries": 40, **chosen})


class TestL2Square(Base):
    norm = 2
    epsilon = 0.3

    def make_attack(self, estimator: Any, **chosen: Any) -> Any:
        return black_box.Square(estimator, **{"norm": 2, "queries": 40, **chosen})


class TestL1Square(Base):
    norm = 1
    epsilon = 0.4

    def make_attack(self, estimator: Any, **chosen: Any) -> Any:
        return black_box.Square(estimator, **{"norm": 1, "queries": 40, **chosen})


def problem(bounds: Any = (0.0, 1.0)) -> tuple[nn.Module, Any, Any, Any]:
    network = small_network((1, 4, 4), 4, bounds=bounds)
    x = small_batch(6, (1, 4, 4), bounds=bounds)
    estimator = invariants.PyTorchClassifier(
        model=network,
        loss=nn.CrossEntropyLoss(),
        input_shape=(1, 4, 4),
        nb_classes=4,
        clip_values=bounds,
        device_type="cpu",
    )
    return network, estimator, x.numpy(), network(x).argmax(1).numpy()


def by_hand(attack: Any, network: nn.Module, x: Any, y: Any, threat_model: ThreatModel, targeted: bool = False) -> Any:
    return search_module(
        attack,
        network,
        torch.from_numpy(x),
        torch.from_numpy(y),
        threat_model=threat_model,
        generator=torch.Generator().manual_seed(5),
        targeted=targeted,
    ).numpy()


@pytest.mark.parametrize("norm", list(NORMS))
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 2.0)])
@pytest.mark.parametrize("targeted", [False, True])
def test_points_of_square_are_those_of_the_attack_itself(
    norm: str, bounds: tuple[float, float], targeted: bool
) -> None:
    network, estimator, x, y = problem(bounds)
    epsilon = EPSILONS[norm] * (bounds[1] - bounds[0])
    labels = (y + 1) % 4 if targeted else y
    chosen: dict[str, Any] = {"queries": 25, "p": 0.5, "restarts": 2, "loss": "ce", "stop_early": False}
    attack = black_box.Square(
        estimator, norm=NORMS[norm], eps=epsilon, targeted=targeted, seed=5, verbose=False, **chosen
    )
    threat_model = ThreatModel(norm=norm, epsilon=epsilon, bounds=bounds)
    expected = by_hand(square.Square(**chosen), network, x, labels, threat_model, targeted)
    found = attack.generate(x, labels)
    assert np.array_equal(found, expected)
    assert not np.array_equal(found, x)


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 2.0)])
@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("keep_rows", [False, True])
def test_points_of_rays_are_those_of_the_attack_itself(
    bounds: tuple[float, float], stop: bool, keep_rows: bool
) -> None:
    network, estimator, x, y = problem(bounds)
    chosen: dict[str, Any] = {"queries": 150, "tolerance": 0.01, "stop": stop, "keep_rows": keep_rows}
    attack = black_box.RayS(estimator, eps=0.25, verbose=False, batch_size=4, **chosen)
    threat_model = ThreatModel(norm="linf", epsilon=0.25, bounds=bounds)
    found = attack.generate(x, y)
    assert np.array_equal(found, by_hand(rays.RayS(**chosen), network, x, y, threat_model))
    assert (estimator.predict(found).argmax(1) != y).all()


def test_points_of_rays_may_lie_beyond_eps() -> None:
    _, estimator, x, y = problem()
    points = black_box.RayS(estimator, eps=1e-3, queries=60, verbose=False).generate(x, y)
    assert (np.abs(points - x).reshape(6, -1).max(1) > 1e-3).all()
    assert (estimator.predict(points).argmax(1) != y).all()


def test_foolbox_gives_the_same_points() -> None:
    twins = pytest.importorskip("robust_ext.adapters.foolbox.black_box", reason="Foolbox is not installed")
    network, estimator, x, y = problem()
    model = twins.foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
    tensors = torch.from_numpy(x), torch.from_numpy(y)
    here = black_box.Square(estimator, eps=0.1, queries=30, seed=2, batch_size=2, verbose=False).generate(x, y)
    there = twins.LinfSquareAttack(queries=30, seed=2)(model, *tensors, epsilons=0.1)[0]
    np.testing.assert_allclose(here, there.numpy(), atol=1e-6)
    here = black_box.RayS(estimator, eps=0.2, queries=80, verbose=False).generate(x, y)
    there = twins.LinfRaySAttack(queries=80)(model, *tensors, epsilons=0.2)[0]
    np.testing.assert_allclose(here, there.numpy(), atol=1e-6)


def test_no_samples_give_none() -> None:
    _, estimator, x, y = problem()
    for attack_class in (black_box.RayS, black_box.Square):
        attack = attack_class(estimator, eps=0.1, queries=5, verbose=False)
        assert attack.generate(x[:0], y[:0]).shape == (0, 1, 4, 4)


def test_as_attacks_of_this_project_they_are_the_core_attacks() -> None:
    _, estimator, _, _ = problem()
    core = as_attack(black_box.RayS(estimator, queries=9, stop=False), name="mine")
    assert isinstance(core, rays.RayS)
    assert (core.name, core.queries, core.stop) == ("mine", 9, False)
    other = as_attack(black_box.Square(estimator, queries=9))
    assert isinstance(other, square.Square)
    assert other.queries == 9
