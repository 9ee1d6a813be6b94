from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robust_ext.attacks.linear_region.attack import LinearRegion
from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.registry import as_attack

region = pytest.importorskip("robust_ext.adapters.foolbox.linear_region", reason="Foolbox is not installed")
invariants = pytest.importorskip("robust_ext.testing.foolbox_invariants", reason="Foolbox is not installed")
ep = pytest.importorskip("eagerpy", reason="Foolbox is not installed")
foolbox = invariants.foolbox
Base: Any = invariants.FoolboxAttackInvariants

ATTACKS = {
    "linf": region.LinfLinearRegionAttack,
    "l2": region.L2LinearRegionAttack,
    "l1": region.L1LinearRegionAttack,
}
ORDERS = {"linf": np.inf, "l2": 2, "l1": 1}
TINY: dict[str, Any] = {"starts": 2, "fab_steps": 3, "basin_hops": 1, "hop_steps": 2, "regions": 1}
SHAPE = (1, 2, 3)


def affine_network(bounds: tuple[float, float] = (0.0, 1.0), classes: int = 3) -> nn.Module:
    """A random network whose decision boundaries run through the middle of the box."""
    low, high = bounds
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, last = nn.Linear(6, 8), nn.Linear(8, classes)
    with torch.no_grad():
        first.weight.mul_(4 / (high - low))
        first.bias.sub_(first.weight.sum(1) * (low + high) / 2)
        last.bias.sub_(last(first(torch.full((6,), (low + high) / 2)).relu()))
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), last).eval()


def images(count: int, bounds: tuple[float, float] = (0.0, 1.0), *, seed: int = 1) -> Tensor:
    unit = torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(seed))
    return unit * (bounds[1] - bounds[0]) + bounds[0]


def labels_of(network: nn.Module, x: Tensor) -> Tensor:
    """The predictions, but for the last row, which is wrong as it is."""
    with torch.no_grad():
        labels: Tensor = network(x).argmax(1)
    return torch.cat([labels[:-1], (labels[-1:] + 1) % 3])


def distances(norm: str, points: Tensor, x: Tensor) -> Any:
    return np.linalg.norm((points.double() - x.double()).flatten(1).numpy(), ord=ORDERS[norm], axis=1)


def aligned(points: Any, x: Any, starts: Any) -> Any:
    """The cosine between the way to each point and that to the start most in its direction."""
    way, ways = (points - x).reshape(len(x), 1, -1), (starts - x[:, None]).reshape(*starts.shape[:2], -1)
    return ((way * ways).sum(2) / np.linalg.norm(way, axis=2) / np.linalg.norm(ways, axis=2)).max(1)


class Tiny(Base):
    """Networks and settings with which the invariants take little time."""

    shape = SHAPE
    epsilon = 0.5

    def make_network(self, bounds: tuple[float, float]) -> nn.Module:
        return affine_network(bounds, self.classes)


class TestLinfLinearRegion(Tiny):
    def make_attack(self) -> Any:
        return region.LinfLinearRegionAttack(**TINY)


class TestL2LinearRegion(Tiny):
    def make_attack(self) -> Any:
        return region.L2LinearRegionAttack(**TINY)


class TestL1LinearRegion(Tiny):
    def make_attack(self) -> Any:
        return region.L1LinearRegionAttack(**TINY)


def by_hand(
    network: nn.Module, x: Tensor, y: Tensor, norm: str, bounds: tuple[float, float], *, seed: int = 5, **ways: Any
) -> Tensor:
    target = Target(
        module=network, bounds=bounds, classes=3, input_shape=tuple(x.shape[1:]), device=torch.device("cpu")
    )
    target = replace(target, starting_points=ways.pop("starting_points", None))
    return (
        LinearRegion(**TINY | ways.pop("chosen", {}))
        .run(
            target,
            x,
            y,
            threat_model=ThreatModel(norm=norm, epsilon=0.01, bounds=bounds),
            generator=torch.Generator().manual_seed(seed),
            **ways,
        )
        .candidates
    )


@pytest.mark.parametrize("norm", list(ATTACKS))
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 2.0)])
@pytest.mark.parametrize("targeted", [False, True])
def test_points_are_those_of_the_attack_itself(norm: str, bounds: tuple[float, float], targeted: bool) -> None:
    network, x = affine_network(bounds), images(4, bounds)
    y = labels_of(network, x)
    model = foolbox.PyTorchModel(network, bounds=bounds, device="cpu")
    y = (y + 1) % 3 if targeted else y
    criterion = foolbox.criteria.TargetedMisclassification(y) if targeted else y
    raw, _, _ = ATTACKS[norm](**TINY, seed=5)(model, x, criterion, epsilons=None)
    assert torch.equal(raw, by_hand(network, x, y, norm, bounds, targeted=targeted))
    assert not torch.equal(raw, x)


def test_epsilons_decide_what_is_success_but_not_where_points_lie() -> None:
    network, x = affine_network(), images(4)
    y = labels_of(network, x)
    model = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
    attack = region.L2LinearRegionAttack(**TINY, seed=5)
    raw, _, success = attack(model, x, y, epsilons=None)
    reach = distances("l2", raw, x)
    assert bool(success.all())
    assert reach[-1] == 0
    assert (reach[:-1] > 0).all()
    far = float(reach.max()) + 1e-4
    for epsilons in ([0.0, far], [1e-4, far]):
        points, _, over = attack(model, x, y, epsilons=epsilons)
        assert all(torch.equal(entry, raw) for entry in points)
        assert over.tolist() == [[False, False, False, True], [True] * 4]


@pytest.mark.parametrize("norm", list(ATTACKS))
@pytest.mark.parametrize("count", [1, 3])
def test_no_point_is_farther_than_the_starting_points(norm: str, count: int) -> None:
    network, x = affine_network(), images(4)
    model = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
    y = labels_of(network, x)
    pool = images(60, seed=7)
    wrong = [pool[network(pool).argmax(1) != label][:count] for label in y]
    given = torch.stack(wrong)
    still = TINY | {"start": "given", "fab_steps": 0, "basin_hops": 0, "regions": 0}
    points = given[:, 0] if count == 1 else given
    raw, _, success = ATTACKS[norm](**still)(model, x, y, epsilons=None, starting_points=points)
    nearest = np.stack([distances(norm, given[:, k], x) for k in range(count)]).min(0)
    nearest[-1] = 0
    assert bool(success.all())
    assert (distances(norm, raw, x) <= nearest * (1 + 1e-6)).all()
    # With nothing to search, results lie on the way to a starting point.
    assert aligned(raw[:-1].double().numpy(), x[:-1].double().numpy(), given[:-1].double().numpy()).min() > 1 - 1e-6
    raw, _, _ = ATTACKS[norm](**TINY, seed=5)(model, x, y, epsilons=None, starting_points=ep.astensor(points))
    assert (distances(norm, raw, x) <= nearest * (1 + 1e-6)).all()
    assert torch.equal(raw, by_hand(network, x, y, norm, (0.0, 1.0), starting_points=given))


def test_starting_points_that_are_not_adversarial_are_no_results() -> None:
    network, x = affine_network(), images(3)
    model = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
    attack = region.L2LinearRegionAttack(**TINY | {"start": "given", "fab_steps": 0}, seed=5)
    y = network(x).argmax(1)
    raw, _, success = attack(model, x, y, epsilons=None, starting_points=x)
    assert torch.equal(raw, x)
    assert not bool(success.any())


@pytest.mark.parametrize(
    ("points", "match"),
    [
        (torch.zeros(2, *SHAPE), "starting_points"),
        (torch.zeros(3, 1, 3, 2), "starting_points"),
        (torch.full((3, *SHAPE), 1.5), "starting_points"),
    ],
)
def test_wrong_starting_points_raise(points: Tensor, match: str) -> None:
    network, x = affine_network(), images(3)
    model = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
    with pytest.raises(InvalidArgumentError, match=match):
        region.L2LinearRegionAttack(**TINY)(model, x, network(x).argmax(1), epsilons=None, starting_points=points)


def test_start_given_needs_starting_points() -> None:
    network, x = affine_network(), images(2)
    model = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
    with pytest.raises(InvalidArgumentError, match="starting_points"):
        region.L2LinearRegionAttack(start="given")(model, x, network(x).argmax(1), epsilons=None)


def test_preprocessing_acts_as_a_layer() -> None:
    network, x = affine_network(), images(3)
    mean, deviation = torch.tensor([0.25, 0.5, 0.125]), torch.tensor([0.5, 2.0, 1.0])
    model = foolbox.PyTorchModel(
        network, bounds=(0, 1), device="cpu", preprocessing={"mean": mean, "std": deviation, "axis": -1}
    )

    class Standardised(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            return (values - mean) / deviation

    whole = nn.Sequential(Standardised(), network).eval()
    y = whole(x).argmax(1)
    raw, _, success = region.L2LinearRegionAttack(**TINY, seed=5)(model, x, y, epsilons=None)
    assert bool(success.all())
    assert torch.equal(raw, by_hand(whole, x, y, "l2", (0.0, 1.0)))


def test_images_of_a_pool_are_started_at() -> None:
    network, x, pool = affine_network(), images(3), images(30, seed=7)
    model = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
    y = network(x).argmax(1)
    attack = region.L2LinearRegionAttack(**TINY, start="nearest", pool=pool, seed=5)
    raw, _, _ = attack(model, x, y, epsilons=None)
    assert torch.equal(raw, by_hand(network, x, y, "l2", (0.0, 1.0), chosen={"start": "nearest", "pool": pool}))
    assert "pool=30 images" in repr(attack)


def test_seeds_decide_the_points() -> None:
    network, x = affine_network(), images(4)
    model = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
    y = network(x).argmax(1)

    def points(seed: int | None, outer: int) -> Tensor:
        torch.manual_seed(outer)
        raw: Tensor = region.L2LinearRegionAttack(**TINY, seed=seed)(model, x, y, epsilons=None)[0]
        return raw

    assert torch.equal(points(1, 0), points(1, 9))
    assert not torch.equal(points(1, 0), points(2, 0))
    assert not torch.equal(points(None, 0), points(None, 9))


def test_networks_that_are_not_piecewise_affine_are_refused() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.Sigmoid(), nn.Linear(8, 3)).eval()
    model, x = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu"), images(2)
    with pytest.raises(ModelError, match="piecewise affine"):
        region.L2LinearRegionAttack(**TINY)(model, x, network(x).argmax(1), epsilons=None)


def test_settings_and_defaults_are_those_of_the_attack() -> None:
    core = inspect.signature(LinearRegion).parameters
    for norm, attack_class in ATTACKS.items():
        mine = dict(inspect.signature(attack_class).parameters)
        assert mine.pop("seed").default is None
        assert {name: entry.default for name, entry in mine.items()} == {
            name: entry.default for name, entry in core.items()
        }
        assert attack_class.distance is getattr(foolbox.distances, norm)
        assert issubclass(attack_class, foolbox.attacks.base.MinimizationAttack)
    made = as_attack(region.L1LinearRegionAttack(**TINY, q=0.9), name="mine")
    assert isinstance(made, LinearRegion)
    assert (made.name, made.description) == ("mine", LinearRegion(**TINY, q=0.9).description)


@pytest.mark.parametrize(
    "wrong", [{"starts": 0}, {"start": "far"}, {"q": 0.4}, {"improvement": (0.1,)}, {"seconds": 0.0}, {"seed": -1}]
)
def test_wrong_settings_raise(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        region.L2LinearRegionAttack(**wrong)
