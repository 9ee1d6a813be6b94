from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from robust_ext.adapters.native import search_module
from robust_ext.attacks.rays import RayS
from robust_ext.attacks.square import Square
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.threat import ThreatModel
from robust_ext.registry import as_attack
from robust_ext.testing.networks import small_batch, small_network

black_box = pytest.importorskip("robust_ext.adapters.foolbox.black_box", reason="Foolbox is not installed")
invariants = pytest.importorskip("robust_ext.testing.foolbox_invariants", reason="Foolbox is not installed")
foolbox = invariants.foolbox
Base: Any = invariants.FoolboxAttackInvariants

SQUARES = {
    "linf": (black_box.LinfSquareAttack, 0.1),
    "l2": (black_box.L2SquareAttack, 0.4),
    "l1": (black_box.L1SquareAttack, 1.6),
}


class TestLinfRayS(Base):
    can_aim = False

    def make_attack(self) -> Any:
        return black_box.LinfRaySAttack(queries=120)


class TestLinfSquare(Base):
    def make_attack(self) -> Any:
        return black_box.LinfSquareAttack(queries=40)


class TestL2Square(Base):
    epsilon = 0.3

    def make_attack(self) -> Any:
        return black_box.L2SquareAttack(queries=40)


class TestL1Square(Base):
    epsilon = 0.4

    def make_attack(self) -> Any:
        return black_box.L1SquareAttack(queries=40)


class Counting(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.rows = inner, 0
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.rows += len(x)
        logits: Tensor = self.inner(x)
        return logits


def problem(bounds: tuple[float, float] = (0.0, 1.0), classes: int = 4) -> tuple[nn.Module, Any, Tensor, Tensor]:
    network = small_network((1, 4, 4), classes, bounds=bounds)
    x = small_batch(6, (1, 4, 4), bounds=bounds)
    return network, foolbox.PyTorchModel(network, bounds=bounds, device="cpu"), x, network(x).argmax(1)


@pytest.mark.parametrize("norm", list(SQUARES))
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 2.0)])
@pytest.mark.parametrize("targeted", [False, True])
def test_points_of_square_are_those_of_the_attack_itself(
    norm: str, bounds: tuple[float, float], targeted: bool
) -> None:
    network, model, x, y = problem(bounds)
    attack_class, budget = SQUARES[norm]
    epsilon = budget * (bounds[1] - bounds[0])
    labels = (y + 1) % 4 if targeted else y
    criterion = foolbox.criteria.TargetedMisclassification(labels) if targeted else labels
    chosen: dict[str, Any] = {"queries": 25, "p": 0.5, "restarts": 2, "loss": "ce", "stop_early": False}
    raw, _, _ = attack_class(**chosen, seed=5)(model, x, criterion, epsilons=epsilon)
    expected = search_module(
        Square(**chosen),
        network,
        x,
        labels,
        threat_model=ThreatModel(norm=norm, epsilon=epsilon, bounds=bounds),
        generator=torch.Generator().manual_seed(5),
        targeted=targeted,
    )
    assert torch.equal(raw, expected)
    assert not torch.equal(raw, x)


def rays_by_hand(network: nn.Module, x: Tensor, y: Tensor, bounds: tuple[float, float], **chosen: Any) -> Tensor:
    epsilon = chosen.pop("epsilon", 1.0)
    return search_module(
        RayS(**chosen),
        network,
        x,
        y,
        threat_model=ThreatModel(norm="linf", epsilon=epsilon, bounds=bounds),
        generator=torch.Generator(),
    )


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 2.0)])
def test_rays_stops_at_the_smallest_epsilon_alone(bounds: tuple[float, float]) -> None:
    network, model, x, y = problem(bounds)
    attack = black_box.LinfRaySAttack(queries=150, tolerance=0.01)
    chosen: dict[str, Any] = {"queries": 150, "tolerance": 0.01}
    stopped = rays_by_hand(network, x, y, bounds, epsilon=0.25, **chosen)
    whole = rays_by_hand(network, x, y, bounds, stop=False, **chosen)
    assert not torch.equal(stopped, whole)
    for epsilons, expected in ((0.25, stopped), ([0.5, 0.25], stopped), (None, whole), ([0.0, 0.25], whole)):
        raw = attack(model, x, y, epsilons=epsilons)[0]
        assert torch.equal(raw[0] if isinstance(raw, list) else raw, expected)
    assert bool((network(whole).argmax(1) != y).all())


def test_rays_returns_the_distances_it_found_for_every_epsilon() -> None:
    _, model, x, y = problem()
    attack = black_box.LinfRaySAttack(queries=200)
    raw, _, success = attack(model, x, y, epsilons=None)
    assert bool(success.all())
    reach = (raw - x).flatten(1).abs().amax(1)
    _, _, over = attack(model, x, y, epsilons=[0.0, float(reach.max()) + 1e-4])
    assert over.tolist() == [[False] * 6, [True] * 6]


@pytest.mark.parametrize("keep_rows", [True, False])
def test_rays_spends_no_more_than_its_queries(keep_rows: bool) -> None:
    network, _, x, y = problem()
    counting = Counting(network)
    model = foolbox.PyTorchModel(counting, bounds=(0, 1), device="cpu")
    black_box.LinfRaySAttack(queries=30, keep_rows=keep_rows)(model, x, y, epsilons=[0.3])
    # Once more each to learn the number of classes, and to judge the points.
    assert counting.rows <= 6 * 32
    assert (counting.rows == 6 * 32) == keep_rows


def test_rays_refuses_to_aim() -> None:
    _, model, x, y = problem()
    with pytest.raises(InvalidArgumentError, match=r"criterion: .*LinfRaySAttack cannot aim"):
        black_box.LinfRaySAttack(queries=5)(model, x, foolbox.criteria.TargetedMisclassification(y), epsilons=0.1)


def test_rays_draws_no_random_numbers() -> None:
    _, model, x, y = problem()
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    black_box.LinfRaySAttack(queries=20)(model, x, y, epsilons=0.1)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("classes", [2, 3])
def test_few_classes_are_enough(classes: int) -> None:
    network, model, x, y = problem(classes=classes)
    for attack in (black_box.LinfRaySAttack(queries=200), black_box.LinfSquareAttack(queries=60)):
        _, clipped, success = attack(model, x, y, epsilons=0.4)
        assert bool(success.any())
        assert torch.equal(success, network(clipped).argmax(1) != y)


def test_names_and_distances_are_foolbox_like() -> None:
    for norm, (attack_class, _) in SQUARES.items():
        assert attack_class.distance is getattr(foolbox.distances, norm)
        assert issubclass(attack_class, foolbox.attacks.base.FixedEpsilonAttack)
    assert black_box.LinfRaySAttack.distance is foolbox.distances.linf
    assert issubclass(black_box.LinfRaySAttack, foolbox.attacks.base.MinimizationAttack)
    assert repr(black_box.LinfRaySAttack(queries=9)) == "LinfRaySAttack(queries=9, tolerance=0.001, keep_rows=True)"


def test_as_attacks_of_this_project_they_are_the_core_attacks() -> None:
    rays = as_attack(black_box.LinfRaySAttack(queries=9, keep_rows=False), name="mine")
    assert isinstance(rays, RayS)
    assert (rays.name, rays.queries, rays.keep_rows, rays.stop) == ("mine", 9, False, True)
    square = as_attack(black_box.L2SquareAttack(queries=9))
    assert isinstance(square, Square)
    assert square.queries == 9


@pytest.mark.parametrize(
    ("attack_class", "chosen"),
    [
        (black_box.LinfRaySAttack, {"queries": 0}),
        (black_box.LinfRaySAttack, {"tolerance": 0.0}),
        (black_box.LinfRaySAttack, {"keep_rows": 1}),
        (black_box.LinfSquareAttack, {"queries": 0}),
        (black_box.LinfSquareAttack, {"p": 1.5}),
        (black_box.LinfSquareAttack, {"loss": "dlr"}),
        (black_box.LinfSquareAttack, {"seed": -1}),
    ],
)
def test_wrong_settings_raise(attack_class: Any, chosen: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(chosen))):
        attack_class(**chosen)
