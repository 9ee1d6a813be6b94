"""What holds for HD, the anti-adversary, SOAP, IMF and AID-purifier alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.target import PassCounter, count_calls
from robust_ext.defenses.aid import AIDPurifier
from robust_ext.defenses.anti_adversary import AntiAdversary
from robust_ext.defenses.hd import HedgeDefense
from robust_ext.defenses.imf import IMF
from robust_ext.defenses.soap import SOAP
from robust_ext.defenses.training.discriminator import Discriminator
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.bpda import BPDA, trajectory_gradient

SHAPE = (2, 6, 5)
PURIFIERS = ("hd", "anti_adversary", "imf", "aid")
ALL = (*PURIFIERS, "soap")
# Forward and backward passes of the classifier for k steps.
COUNTS: dict[str, Callable[[int], tuple[int, int]]] = {
    "hd": lambda k: (k + 1, k),
    "anti_adversary": lambda k: (k + 2, k),
    "imf": lambda k: (k + 1, k),
    "aid": lambda k: (k + 1, k),
    "soap": lambda k: (22 * (k + 1) + 1, 22 * k),
}
DEFAULTS = {"hd": (21, 20), "anti_adversary": (4, 2), "imf": (2, 1), "aid": (11, 10), "soap": (133, 110)}


class Unit(nn.Module):
    """From inputs in the bounds to [0, 1]."""

    def __init__(self, bounds: tuple[float, float]) -> None:
        super().__init__()
        self.bounds = bounds

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.bounds[0]) / (self.bounds[1] - self.bounds[0])


def network(dtype: torch.dtype, bounds: tuple[float, float] = (0.0, 1.0)) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 4)
        return nn.Sequential(Unit(bounds), *parts).eval().to(dtype)


def discriminator(dtype: torch.dtype, channels: list[int], layers: tuple[str, ...] = ()) -> Discriminator:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Discriminator(channels, layers=layers, width=8, after=1).to(dtype)


def made(
    name: str, dtype: torch.dtype = torch.float64, bounds: tuple[float, float] = (0.0, 1.0), **settings: Any
) -> AdaptiveDefense:
    net = network(dtype, bounds)
    if name == "hd":
        return HedgeDefense(net, bounds=bounds, **settings)
    if name == "anti_adversary":
        return AntiAdversary(net, bounds=bounds, **settings)
    if name == "soap":
        return SOAP(net, bounds=bounds, **settings)
    if name == "imf":
        return IMF(net, discriminator(dtype, [4]), bounds=bounds, **settings)
    return AIDPurifier(net, discriminator(dtype, [3, 8], ("2", "5")), bounds=bounds, **settings)


def data(rows: int, dtype: torch.dtype = torch.float64, low: float = 0.0, high: float = 1.0) -> Tensor:
    unit = torch.rand(rows, *SHAPE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return (low + (high - low) * unit).to(dtype)


def seeds(rows: int) -> Tensor:
    return torch.arange(rows) + 11


def gradient(module: nn.Module, x: Tensor, weights: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    found: Tensor
    (found,) = torch.autograd.grad((module(leaf) * weights).sum(), leaf)
    return found


@pytest.mark.parametrize("name", ALL)
def test_passes_are_those_that_are_documented(name: str) -> None:
    x = data(3, torch.float32)
    for defense, wanted in ((made(name, torch.float32), DEFAULTS[name]), (made(name, torch.float32, steps=3), None)):
        forward, backward = COUNTS[name](3) if wanted is None else wanted
        counter = PassCounter()
        with count_calls(defense.classifier, counter), torch.no_grad():
            defense(x)
        assert (counter.forward, counter.backward) == (3 * forward, 3 * backward)
        if name in ("imf", "aid"):
            calls: list[int] = []
            judge = defense.get_submodule("discriminator")
            handle = judge.register_forward_hook(lambda *args, calls=calls: calls.append(len(args[2])))
            defense(x)
            handle.remove()
            assert calls == [3] * defense.steps


@pytest.mark.parametrize("name", ALL)
def test_the_callers_mode_changes_nothing_and_nothing_is_left_behind(name: str) -> None:
    defense, x = made(name, steps=2), data(3)
    kept = x.clone()
    expected = defense.trace(x, seeds=seeds(3))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            trace = defense.trace(data(3), seeds=seeds(3))
        assert torch.equal(trace.logits, expected.logits)
        assert not trace.logits.requires_grad
    leaf = x.clone().requires_grad_()
    torch.autograd.grad(BPDA(defense)(leaf).sum(), leaf)
    torch.autograd.backward(BPDA(defense, backward="unrolled")(leaf).sum())
    assert all(parameter.grad is None for parameter in defense.parameters())
    assert torch.equal(x, kept)


@pytest.mark.parametrize("name", ALL)
def test_rows_are_on_their_own(name: str) -> None:
    defense, x = made(name), data(4)
    trace = defense.trace(x, seeds=seeds(4))
    for row in range(4):
        alone = defense.trace(x[row : row + 1], seeds=seeds(4)[row : row + 1])
        torch.testing.assert_close(alone.final[0], trace.final[row])
        torch.testing.assert_close(alone.logits[0], trace.logits[row])
    assert defense(x[:0]).shape == (0, 4)
    assert defense.trace(x[:0]).final.shape == (0, *SHAPE)
    leaf = x[:0].clone().requires_grad_()
    assert torch.autograd.grad(BPDA(defense)(leaf).sum(), leaf)[0].shape == (0, *SHAPE)


@pytest.mark.parametrize("name", ALL)
def test_iterates_stay_where_they_may_be(name: str) -> None:
    defense, x = made(name), data(5)
    trace = defense.trace(x, seeds=seeds(5))
    assert len(trace.iterates) == defense.steps + 1
    assert torch.equal(trace.iterates[-1], trace.final)
    torch.testing.assert_close(trace.logits, defense.classifier(trace.final))
    reach = {"hd": 8 / 255, "anti_adversary": 0.3, "imf": 16 / 255, "aid": 0.031, "soap": 40 / 255}[name]
    moved = max(float((point - x).abs().max()) for point in trace.iterates)
    # IMF goes half as far where its discriminator is in doubt.
    assert reach / 2 - 1e-12 <= moved <= reach + 1e-12
    if name != "anti_adversary":
        assert all(float(point.min()) >= 0 and float(point.max()) <= 1 for point in trace.iterates)
    if name != "hd":
        assert torch.equal(trace.iterates[0], x)


@pytest.mark.parametrize("name", ALL)
def test_steps_can_be_changed(name: str) -> None:
    defense, x = made(name, steps=3), data(3)
    trace = defense.trace(x, seeds=seeds(3))
    none = defense.with_steps(0).trace(x, seeds=seeds(3))
    torch.testing.assert_close(none.logits, defense.classifier(trace.iterates[0]))
    if name in PURIFIERS:
        assert torch.equal(defense.with_steps(2).trace(x, seeds=seeds(3)).final, trace.iterates[2])
    assert defense.steps == 3


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bounds", [(-1.0, 3.0), (0.0, 255.0)])
def test_other_bounds_are_the_same_stretched(name: str, bounds: tuple[float, float]) -> None:
    x, width = data(4), bounds[1] - bounds[0]
    unit = made(name).trace(x, seeds=seeds(4))
    other = made(name, bounds=bounds).trace(bounds[0] + width * x, seeds=seeds(4))
    for one, two in zip(unit.iterates, other.iterates, strict=True):
        torch.testing.assert_close((two - bounds[0]) / width, one, rtol=0, atol=1e-9)
    torch.testing.assert_close(other.logits, unit.logits)


@pytest.mark.parametrize("name", ALL)
def test_gradients_under_bpda(name: str) -> None:
    # Far from the bounds, where signs and boxes have the derivative of the identity.
    defense, x = made(name, steps=2), data(3, low=0.4, high=0.6)
    weights = torch.randn(3, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def given(backward: str) -> Tensor:
        if not defense.random:
            return gradient(BPDA(defense, backward=backward), x, weights)
        with defense.seeded(4):
            return gradient(BPDA(defense, backward=backward), x, weights)

    with defense.seeded(4):
        trace = defense.trace(x)
    at_end = gradient(defense.classifier, trace.final.detach(), weights)
    assert bool((at_end.flatten(1).abs().amax(1) > 0).all())
    for backward in ("identity", "frozen", "unrolled"):
        torch.testing.assert_close(given(backward), at_end)
    along = [gradient(defense.classifier, point.detach(), weights) for point in trace.iterates[1:]]
    torch.testing.assert_close(given("trajectory"), torch.stack(along).mean(0))
    found = trajectory_gradient(
        defense, x, torch.zeros(3, dtype=torch.int64), lambda z, _: (z * weights).sum(1), seeds=trace.seeds
    )
    torch.testing.assert_close(found, torch.stack(along).mean(0))


@pytest.mark.parametrize("name", PURIFIERS)
def test_checkpoints_change_no_gradient(name: str) -> None:
    x, weights = data(3), torch.ones(3, 4, dtype=torch.float64)
    found = []
    for checkpoint in (False, True):
        defense = made(name, steps=2, checkpoint=checkpoint)
        with defense.seeded(5):
            found.append(gradient(defense, x, weights))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", ALL)
def test_foolbox_attacks_them(name: str) -> None:
    foolbox = pytest.importorskip("foolbox")
    defense = made(name, torch.float32, steps=1)
    x = data(3, torch.float32)
    labels = defense(x).argmax(1)
    for backward in ("identity", "trajectory"):
        model = foolbox.PyTorchModel(BPDA(defense, backward=backward), bounds=(0, 1), device="cpu")
        _, points, success = foolbox.attacks.LinfPGD(steps=2, rel_stepsize=0.6, random_start=False)(
            model, x, labels, epsilons=0.1
        )
        assert points.shape == x.shape
        assert 0.09 < float((points - x).abs().max()) <= 0.1001
        assert success.shape == (3,)


@pytest.mark.parametrize("name", ALL)
def test_half_precision_stays(name: str) -> None:
    defense = made(name, torch.bfloat16, steps=1)
    trace = defense.trace(data(2, torch.float32))
    assert {point.dtype for point in trace.iterates} == {torch.bfloat16}
    assert bool(torch.isfinite(trace.logits).all())


@pytest.mark.parametrize("name", ALL)
def test_what_is_wrong_is_said(name: str) -> None:
    wrong: list[tuple[str, Any]] = [("bounds", (1, 0)), ("steps", -1), ("step_size", -0.1), ("radius", -0.1)]
    for setting, value in wrong:
        with pytest.raises(InvalidArgumentError, match=f"{setting}: got"):
            made(name, bounds=value) if setting == "bounds" else made(name, **{setting: value})
