"""What graphs hold while gradients go through many inner steps and many draws; and gradients that hosts switch off."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from robust_ext.attacks._common.objectives import cross_entropy
from robust_ext.models.bpda import BPDA, trajectory_gradient
from robust_ext.models.eot import EoT
from robust_ext.models.purifier import Purifier
from robust_ext.models.row_rng import RowRNG
from robust_ext.models.vjp import row_gradient

LABELS = torch.tensor([0, 2, 1, 0, 1])


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Flatten(), nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)]
        return nn.Sequential(*layers).eval()


def data(rows: int = 5) -> Tensor:
    return torch.rand(rows, 2, 3, generator=torch.Generator().manual_seed(1))


class Descent(Purifier):
    """Random, and every step is differentiable a second time."""

    random = True
    needs_gradients = True

    def start(self, x: Tensor, rng: RowRNG) -> tuple[Tensor, Mapping[str, Tensor]]:
        return x + 0.1 * rng.normal(x, "start"), {}

    def step(self, point: Tensor, *, x: Tensor, number: int, state: Mapping[str, Tensor], rng: RowRNG) -> Tensor:
        gradient = row_gradient(lambda p: self.classifier(p).square().sum(1), point, differentiable=True)
        return point - 0.05 * gradient


class Held:
    """A tensor saved for a backward pass."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


def most_held(module: nn.Module) -> int:
    """The most numbers that graphs held at any one time, from the forward pass to the end of the backward pass."""
    alive: weakref.WeakSet[Held] = weakref.WeakSet()
    most = 0

    def pack(tensor: Tensor) -> Held:
        nonlocal most
        held = Held(tensor)
        alive.add(held)
        most = max(most, sum(other.tensor.numel() for other in alive))
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        x = data().requires_grad_()
        (gradient,) = torch.autograd.grad(module(x), x, torch.ones(5, 3))
    assert bool((gradient != 0).any())
    return most


def test_gradients_of_forty_steps_hold_one_step() -> None:
    defense = Descent(network(), steps=40, seed=0)
    single = defense.with_steps(1)
    one = most_held(BPDA(single, backward="unrolled"))
    readout = most_held(network())
    assert most_held(BPDA(defense, backward="unrolled")) > 20 * one
    assert most_held(BPDA(defense, backward="unrolled", checkpoint=True)) <= 1.1 * one
    # One point's readout after the other, and one inner gradient before that.
    for backward in ("identity", "frozen", "trajectory"):
        assert most_held(BPDA(defense, backward=backward)) <= 1.1 * readout


def test_a_hundred_draws_of_several_steps_hold_what_two_do() -> None:
    def held(draws: int, *, checkpoint: bool = False) -> int:
        view = BPDA(Descent(network(), steps=3), backward="unrolled", checkpoint=checkpoint)
        return most_held(EoT(view, draws=draws, seed=0))

    two = held(2)
    assert held(100) == two
    assert held(2, checkpoint=True) < two / 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("view", ["defense", "identity", "trajectory", "unrolled"])
def test_gradients_come_where_the_caller_has_switched_them_off(mode: Any, view: str) -> None:
    defense, x = Descent(network(), steps=2, seed=0), data()
    module = defense if view == "defense" else BPDA(defense, backward=view)

    def found() -> list[Tensor]:
        averaged = EoT(module, draws=2, seed=3).value_and_gradient(x, LABELS, cross_entropy)
        along = trajectory_gradient(defense, x, LABELS, cross_entropy, seeds=torch.arange(5))
        return [averaged.losses, averaged.gradient, along]

    wanted = found()
    with mode():
        got = found()
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)
        assert bool((one != 0).any())
    assert x.grad is None
    assert all(parameter.grad is None for parameter in defense.parameters())


@pytest.mark.parametrize("wrap", [lambda d: d, BPDA, lambda d: EoT(BPDA(d), draws=2)])
def test_a_leaf_made_anew_under_a_host_that_switches_gradients_off(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """As hosts do it: all is under no_grad, the step that needs a gradient alone is not."""
    module = wrap(Descent(network(), steps=2))
    with torch.no_grad():
        assert not module(data()).requires_grad
        with torch.enable_grad():
            leaf = data().requires_grad_()
            (gradient,) = torch.autograd.grad(module(leaf).sum(), leaf)
        assert bool((gradient != 0).flatten(1).any(1).all())
