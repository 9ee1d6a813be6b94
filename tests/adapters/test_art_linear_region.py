from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robust_ext.attacks.linear_region.attack import LinearRegion
from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.registry import as_attack

region = pytest.importorskip("robust_ext.adapters.art.linear_region", reason="ART is not installed")
invariants = pytest.importorskip("robust_ext.testing.art_invariants", reason="ART is not installed")
Base: Any = invariants.ArtAttackInvariants

NORMS = {"linf": np.inf, "l2": 2, "l1": 1}
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


def images(count: int, bounds: tuple[float, float] = (0.0, 1.0), *, seed: int = 1) -> Any:
    unit = torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(seed))
    return (unit * (bounds[1] - bounds[0]) + bounds[0]).numpy()


def classifier(network: nn.Module, bounds: tuple[float, float] = (0.0, 1.0), **chosen: Any) -> Any:
    return invariants.PyTorchClassifier(
        model=network,
        loss=nn.CrossEntropyLoss(),
        input_shape=SHAPE,
        nb_classes=3,
        clip_values=bounds,
        device_type="cpu",
        **chosen,
    )


def predicted(network: nn.Module, x: Any) -> Any:
    with torch.no_grad():
        return network(torch.from_numpy(x)).argmax(1).numpy()


def distances(norm: str, points: Any, x: Any) -> Any:
    return np.linalg.norm((points.astype(float) - x).reshape(len(x), -1), ord=NORMS[norm], axis=1)


def aligned(points: Any, x: Any, starts: Any) -> Any:
    """The cosine between the way to each point and that to the start most in its direction."""
    way, ways = (points - x).reshape(len(x), 1, -1), (starts - x[:, None]).reshape(*starts.shape[:2], -1)
    return ((way * ways).sum(2) / np.linalg.norm(way, axis=2) / np.linalg.norm(ways, axis=2)).max(1)


class Tiny(Base):
    """Networks and settings with which the invariants take little time."""

    shape = SHAPE
    epsilon = 0.9
    wrong_settings = (
        *Base.wrong_settings,
        {"eps": 0.0},
        {"starts": 0},
        {"start": "far"},
        {"q": 0.4},
        {"improvement": (0.1,)},
        {"seconds": 0.0},
        {"seed": -1},
    )

    def make_network(self, bounds: tuple[float, float], classes: int) -> nn.Module:
        return affine_network(bounds, classes)

    def make_attack(self, estimator: Any, **chosen: Any) -> Any:
        return region.LinearRegion(estimator, **{"norm": self.norm, **TINY, **chosen})


class TestLinf(Tiny):
    norm = np.inf
    # Where points of a region are nearly as near, rounding chooses between them, and batches round differently.
    repeatable: ClassVar[dict[str, Any]] = {"regions": 0}


class TestL2(Tiny):
    norm = 2


class TestL1(Tiny):
    norm = 1
    # Where points of a region are nearly as near, rounding chooses between them, and batches round differently.
    repeatable: ClassVar[dict[str, Any]] = {"regions": 0}


def by_hand(
    network: nn.Module, x: Any, y: Any, norm: str, bounds: tuple[float, float], *, seed: int = 5, **ways: Any
) -> Any:
    target = Target(
        module=network, bounds=bounds, classes=3, input_shape=tuple(x.shape[1:]), device=torch.device("cpu")
    )
    target = replace(target, starting_points=ways.pop("starting_points", None))
    return (
        LinearRegion(**TINY | ways.pop("chosen", {}))
        .run(
            target,
            torch.from_numpy(x),
            torch.from_numpy(y),
            threat_model=ThreatModel(norm=norm, epsilon=0.01, bounds=bounds),
            generator=torch.Generator().manual_seed(seed),
            **ways,
        )
        .candidates.numpy()
    )


@pytest.mark.parametrize("norm", list(NORMS))
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 2.0)])
@pytest.mark.parametrize("targeted", [False, True])
def test_points_are_those_of_the_attack_itself(norm: str, bounds: tuple[float, float], targeted: bool) -> None:
    network, x = affine_network(bounds), images(4, bounds)
    y = (predicted(network, x) + np.array([targeted, targeted, targeted, 1])) % 3
    attack = region.LinearRegion(
        classifier(network, bounds), norm=NORMS[norm], targeted=targeted, **TINY, seed=5, verbose=False
    )
    found = attack.generate(x, np.eye(3, dtype=np.float32)[y])
    assert found.dtype == np.float32
    assert np.array_equal(found, by_hand(network, x, y, norm, bounds, targeted=targeted))
    assert not np.array_equal(found, x)


def test_eps_does_not_limit_the_points() -> None:
    network, x = affine_network(), images(4)
    y, estimator = predicted(network, x), classifier(network)
    near, far = (
        region.LinearRegion(estimator, eps=eps, **TINY, seed=5, verbose=False).generate(x, y) for eps in (1e-4, 9.0)
    )
    assert np.array_equal(near, far)
    assert (distances("l2", near, x) > 1e-4).all()
    assert (estimator.predict(near).argmax(1) != y).all()


@pytest.mark.parametrize("norm", list(NORMS))
@pytest.mark.parametrize("count", [1, 3])
def test_no_point_is_farther_than_the_starting_points(norm: str, count: int) -> None:
    network, x, pool = affine_network(), images(4), images(60, seed=7)
    y, classes = predicted(network, x), predicted(network, pool)
    given = np.stack([pool[classes != label][:count] for label in y])
    points = given[:, 0] if count == 1 else given
    nearest = np.stack([distances(norm, given[:, k], x) for k in range(count)]).min(0)
    chosen: dict[str, Any] = {"norm": NORMS[norm], "seed": 5, "verbose": False, "batch_size": 3}
    still = TINY | {"start": "given", "fab_steps": 0, "basin_hops": 0, "regions": 0}
    found = region.LinearRegion(classifier(network), **chosen, **still).generate(x, y, x_adv_init=points)
    assert (distances(norm, found, x) <= nearest * (1 + 1e-6)).all()
    # With nothing to search, results lie on the way to a starting point.
    assert aligned(found.astype(float), x.astype(float), given.astype(float)).min() > 1 - 1e-6
    found = region.LinearRegion(classifier(network), **chosen, **TINY).generate(x, y, x_adv_init=points)
    assert (distances(norm, found, x) <= nearest * (1 + 1e-6)).all()
    assert (predicted(network, found) != y).all()


@pytest.mark.parametrize(
    "points", [np.zeros((2, *SHAPE)), np.zeros((3, 1, 3, 2)), np.full((3, *SHAPE), 1.5), np.zeros((3, 2, 1, 3, 2))]
)
def test_wrong_starting_points_raise(points: Any) -> None:
    network, x = affine_network(), images(3)
    with pytest.raises(InvalidArgumentError, match="x_adv_init"):
        region.LinearRegion(classifier(network), **TINY, verbose=False).generate(x, x_adv_init=points)


def test_other_keywords_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="mask"):
        region.LinearRegion(classifier(affine_network()), **TINY, verbose=False).generate(images(1), mask=1)


def test_preprocessing_acts_as_a_layer() -> None:
    network, x = affine_network(), images(3)
    mean, deviation = 0.25, 1.5

    class Standardised(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            return (values - mean) / deviation

    whole = nn.Sequential(Standardised(), network).eval()
    y = predicted(whole, x)
    estimator = classifier(network, preprocessing=(mean, deviation))
    found = region.LinearRegion(estimator, **TINY, seed=5, verbose=False).generate(x, y)
    np.testing.assert_allclose(found, by_hand(whole, x, y, "l2", (0.0, 1.0)), atol=1e-5)


def test_images_of_a_pool_are_started_at() -> None:
    network, x, pool = affine_network(), images(3), images(30, seed=7)
    y = predicted(network, x)
    attack = region.LinearRegion(classifier(network), **TINY, start="nearest", pool=pool, seed=5, verbose=False)
    expected = by_hand(network, x, y, "l2", (0.0, 1.0), chosen={"start": "nearest", "pool": torch.from_numpy(pool)})
    assert np.array_equal(attack.generate(x, y), expected)


def test_networks_that_are_not_piecewise_affine_are_refused() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.Sigmoid(), nn.Linear(8, 3)).eval()
    with pytest.raises(ModelError, match="piecewise affine"):
        region.LinearRegion(classifier(network), **TINY, verbose=False).generate(images(2))


def test_no_samples_give_none() -> None:
    attack, x = region.LinearRegion(classifier(affine_network()), **TINY, verbose=False), images(1)[:0]
    y = np.zeros(0, dtype=np.int64)
    assert attack.generate(x, y).shape == (0, *SHAPE)
    assert attack.generate(x, y, x_adv_init=x).shape == (0, *SHAPE)


def test_foolbox_gives_the_same_points() -> None:
    twins = pytest.importorskip("robust_ext.adapters.foolbox.linear_region", reason="Foolbox is not installed")
    network, x = affine_network(), images(3)
    y = predicted(network, x)
    model = twins.foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
    here = region.LinearRegion(classifier(network), norm=1, **TINY, seed=2, verbose=False).generate(x, y)
    tensors = torch.from_numpy(x), torch.from_numpy(y)
    there = twins.L1LinearRegionAttack(**TINY, seed=2)(model, *tensors, epsilons=None)[0]
    assert np.array_equal(here, there.numpy())


def test_settings_and_defaults_are_those_of_the_attack() -> None:
    core = inspect.signature(LinearRegion).parameters
    mine = inspect.signature(region.LinearRegion).parameters
    assert {name: mine[name].default for name in core} == {name: entry.default for name, entry in core.items()}
    estimator = classifier(affine_network())
    made = as_attack(region.LinearRegion(estimator, **TINY, q=0.9), name="mine")
    assert isinstance(made, LinearRegion)
    assert (made.name, made.description) == ("mine", LinearRegion(**TINY, q=0.9).description)
