from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from robust_ext.adapters.native import search_module
from robust_ext.attacks.apgd import APGD
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.threat import ThreatModel
from robust_ext.estimators import BinarizedPyTorchModel
from robust_ext.registry import as_attack
from robust_ext.testing.networks import small_batch, small_network

ep = pytest.importorskip("eagerpy", reason="Foolbox is not installed")
attacks = pytest.importorskip("robust_ext.adapters.foolbox.attacks", reason="Foolbox is not installed")
invariants = pytest.importorskip("robust_ext.testing.foolbox_invariants", reason="Foolbox is not installed")
foolbox = invariants.foolbox
Base: Any = invariants.FoolboxAttackInvariants

NATIVE = [
    ("linf", attacks.LinfAPGD(steps=8)),
    ("l2", attacks.L2APGD(steps=8, loss="margin", restarts=2, stop_early=True)),
    ("l1", attacks.L1APGD(steps=8, start="input")),
    ("linf", attacks.LinfAPGD(steps=5, loss="targeted-dlr", target_classes=2)),
    ("linf", attacks.LinfRandomSearchAttack(points=20)),
    ("l2", attacks.L2RandomSearchAttack(points=20, outer="surface")),
    ("l1", attacks.L1RandomSearchAttack(points=20, outer_share=1.0)),
]


class TestLinfAPGD(Base):
    def make_attack(self) -> Any:
        return attacks.LinfAPGD(steps=10)


class TestL2APGD(Base):
    def make_attack(self) -> Any:
        return attacks.L2APGD(steps=10, loss="dlr")


class TestL1APGD(Base):
    def make_attack(self) -> Any:
        return attacks.L1APGD(steps=10)


class TestLinfRandomSearch(Base):
    def make_attack(self) -> Any:
        return attacks.LinfRandomSearchAttack(points=60)


class TestL2RandomSearch(Base):
    def make_attack(self) -> Any:
        return attacks.L2RandomSearchAttack(points=60)


class TestL1RandomSearch(Base):
    epsilon = 0.4

    def make_attack(self) -> Any:
        return attacks.L1RandomSearchAttack(points=60)


def problem(bounds: tuple[float, float] = (0.0, 1.0), classes: int = 4) -> tuple[nn.Module, Tensor, Tensor]:
    network = small_network((1, 4, 4), classes, bounds=bounds)
    x = small_batch(6, (1, 4, 4), bounds=bounds)
    return network, x, network(x).argmax(1)


@pytest.mark.parametrize(("norm", "attack"), NATIVE, ids=[repr(attack) for _, attack in NATIVE])
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 2.0)])
@pytest.mark.parametrize("targeted", [False, True])
def test_points_are_those_of_the_attack_itself(
    norm: str, attack: Any, bounds: tuple[float, float], targeted: bool
) -> None:
    network, x, y = problem(bounds)
    labels = (y + 1) % 4 if targeted else y
    criterion = foolbox.criteria.TargetedMisclassification(labels) if targeted else labels
    epsilon = {"linf": 0.1, "l2": 0.4, "l1": 1.6}[norm] * (bounds[1] - bounds[0])
    seeded = type(attack)(**{**vars(attack), "seed": 5})
    model = foolbox.PyTorchModel(network, bounds=bounds, device="cpu")
    raw, _, _ = seeded(model, x, criterion, epsilons=epsilon)
    expected = search_module(
        attack.native(),
        network,
        x,
        labels,
        threat_model=ThreatModel(norm=norm, epsilon=epsilon, bounds=bounds),
        generator=torch.Generator().manual_seed(5),
        targeted=targeted,
    )
    assert torch.equal(raw, expected)
    assert not torch.equal(raw, x)


@pytest.mark.parametrize(("norm", "attack"), NATIVE, ids=[repr(attack) for _, attack in NATIVE])
def test_names_and_settings_are_foolbox_like(norm: str, attack: Any) -> None:
    assert isinstance(attack, foolbox.attacks.base.FixedEpsilonAttack)
    assert attack.distance is getattr(foolbox.distances, norm)
    assert type(attack).__name__.startswith({"linf": "Linf", "l2": "L2", "l1": "L1"}[norm])
    assert type(attack).__name__.endswith("Attack")
    with pytest.raises(TypeError, match="positional"):
        type(attack)(1)


def test_a_seed_overrides_torchs() -> None:
    network, x, y = problem()
    model = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
    runs = []
    for seed in (None, 7):
        for torch_seed in (0, 1):
            torch.manual_seed(torch_seed)
            runs.append(attacks.LinfRandomSearchAttack(points=3, seed=seed)(model, x, y, epsilons=0.01)[0])
    assert not torch.equal(runs[0], runs[1])
    assert torch.equal(runs[2], runs[3])


@pytest.mark.parametrize(("norm", "attack"), NATIVE, ids=[repr(attack) for _, attack in NATIVE])
def test_two_classes_are_enough(norm: str, attack: Any) -> None:
    network, x, y = problem(classes=2)
    model = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
    epsilon = {"linf": 0.3, "l2": 1.2, "l1": 6.0}[norm]
    _, clipped, success = attack(model, x, y, epsilons=epsilon)
    assert bool(success.any())
    assert torch.equal(success, network(clipped).argmax(1) != y)


def test_the_model_keeps_its_preprocessing() -> None:
    network, x, y = problem()
    plain = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
    shifted = foolbox.PyTorchModel(network, bounds=(1, 2), device="cpu", preprocessing={"mean": 1.0})
    attack = attacks.LinfAPGD(steps=6, seed=1)
    expected = attack(plain, x, y, epsilons=0.1)[1]
    torch.testing.assert_close(attack(shifted, x + 1, y, epsilons=0.1)[1], expected + 1, atol=1e-4, rtol=0)


def test_tensors_of_other_libraries_are_refused() -> None:
    network, x, y = problem()
    model = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
    with pytest.raises(ValueError, match=r"numpy.ndarray, expected a torch.Tensor"):
        attacks.LinfAPGD()(model, x.numpy(), y.numpy(), epsilons=0.1)


@pytest.mark.parametrize("epsilons", [-0.1, float("nan")])
def test_epsilons_below_zero_are_refused(epsilons: float) -> None:
    network, x, y = problem()
    model = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
    with pytest.raises(InvalidArgumentError, match="epsilon"):
        attacks.L2RandomSearchAttack()(model, x, y, epsilons=epsilons)


@pytest.mark.parametrize(
    ("attack_class", "wrong"),
    [
        (attacks.LinfAPGD, {"steps": 0}),
        (attacks.L1APGD, {"loss": "hinge"}),
        (attacks.L2APGD, {"seed": -1}),
        (attacks.LinfRandomSearchAttack, {"points": 0}),
        (attacks.L2RandomSearchAttack, {"seed": 1.5}),
    ],
)
def test_wrong_settings_raise_at_once(attack_class: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        attack_class(**wrong)


def test_double_precision_points_stay_in_the_ball() -> None:
    network, x, _ = problem()
    x = x.double()
    y = network(x.float()).argmax(1)
    model = foolbox.PyTorchModel(network.double(), bounds=(0, 1), device="cpu")
    raw, clipped, _ = attacks.LinfAPGD(steps=5)(model, x, y, epsilons=0.1)
    assert raw.dtype == torch.float64
    assert float((raw - x).abs().max()) <= 0.1 + 1e-6
    assert float((clipped - x).abs().max()) <= 0.1 + 1e-12


@pytest.mark.parametrize("loss", ["ce", "targeted-dlr"])
def test_planted_points_are_found(loss: str) -> None:
    network, x = small_network((1, 8, 8), 4), small_batch(6, (1, 8, 8))
    model = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
    planted = BinarizedPyTorchModel.from_model(model, x, epsilon=0.1)
    _, found, _ = attacks.LinfAPGD(steps=30, loss=loss)(planted, planted.inputs, planted.labels, epsilons=0.1)
    assert planted.score(found) == 1.0
    _, missed, _ = attacks.LinfRandomSearchAttack(points=40)(planted, planted.inputs, planted.labels, epsilons=0.1)
    assert planted.score(missed) < 1.0


def test_networks_in_train_mode_keep_their_statistics() -> None:
    network, x, y = problem()
    model = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
    network.train()
    before = {name: value.clone() for name, value in network.named_buffers()}
    attacks.LinfAPGD(steps=5).run(model, x, y, epsilon=0.1)
    assert all(torch.equal(value, before[name]) for name, value in network.named_buffers())
    foolbox.attacks.LinfPGD(steps=5).run(model, x, y, epsilon=0.1)
    assert not all(torch.equal(value, before[name]) for name, value in network.named_buffers())


def test_as_an_attack_of_this_project_it_is_the_core_attack() -> None:
    attack = as_attack(attacks.LinfAPGD(steps=7, loss="margin"), name="mine")
    assert isinstance(attack, APGD)
    assert (attack.name, attack.traits.batching) == ("mine", "full")
    assert attack.steps == 7
