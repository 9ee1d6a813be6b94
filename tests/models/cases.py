"""What the tests of the models share: a network, inputs, random defenses, and the memory that graphs hold."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from robust_ext import AdaptiveDefense, Purifier
from robust_ext.core.random import seeded_globals
from robust_ext.models.adaptive_solution import Solution
from robust_ext.models.binarized import BinarizedClassifier
from robust_ext.models.row_rng import RowRNG
from robust_ext.models.vjp import row_gradient


def network(dtype: torch.dtype = torch.float32, width: int = 8) -> nn.Sequential:
    """From inputs ``(N, 2, 3)`` to three logits."""
    with seeded_globals(0):
        layers = nn.Flatten(), nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)
        return nn.Sequential(*layers).eval().to(dtype)


def data(rows: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.rand(rows, 2, 3, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Descent(Purifier):
    """Steps down the squared logits, from a random start; every step can be differentiated."""

    random = True
    needs_gradients = True
    noise = 0.3

    def start(self, x: Tensor, rng: RowRNG) -> tuple[Tensor, Mapping[str, Tensor]]:
        return x + self.noise * rng.uniform(x, "start", low=-1, high=1), {"scale": 0.2 * x.flatten(1).mean(1)}

    def step(self, point: Tensor, *, x: Tensor, number: int, state: Mapping[str, Tensor], rng: RowRNG) -> Tensor:
        gradient = row_gradient(lambda p: self.classifier(p).square().sum(1), point, differentiable=True)
        return point - state["scale"][:, None, None] * gradient + 0.01 * rng.normal(x, "step", number)


class Controlled(AdaptiveDefense):
    """Does its part in the readout, by a state found from the input."""

    def solve(self, x: Tensor, rng: RowRNG, *, record: bool) -> Solution:
        return Solution(x, (x,), {"control": -0.5 * x.sin()})

    def readout(self, point: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        return super().readout(point + state["control"], {})


def quantise(x: Tensor) -> Tensor:
    return (x * 15).round() / 15


class Rounding(Purifier):
    """Steps towards the middle that end in a quantiser: plain gradients are zero."""

    def step(self, point: Tensor, *, x: Tensor, number: int, state: Mapping[str, Tensor], rng: RowRNG) -> Tensor:
        return quantise(point + 0.05 * (0.5 - point))


class NoisyRounding(Rounding):
    random = True

    def start(self, x: Tensor, rng: RowRNG) -> tuple[Tensor, Mapping[str, Tensor]]:
        return x + 0.01 * rng.normal(x, "noise"), {}


def art_classifier(module: nn.Module, **settings: Any) -> Any:
    """ART's classifier of digits."""
    classification = pytest.importorskip("art.estimators.classification")
    shape = {"input_shape": (1, 8, 8), "nb_classes": 10, "clip_values": (0, 1)}
    return classification.PyTorchClassifier(module, loss=nn.CrossEntropyLoss(), device_type="cpu", **shape, **settings)


def planted(features: nn.Module, x: Tensor, rows: str = "any", size: int = 8) -> BinarizedClassifier:
    """A drawn readout of the features for each input."""
    generator = torch.Generator().manual_seed(5)
    weight, anchor = (torch.randn(len(x), size, generator=generator) for _ in range(2))
    threshold, scale, offset = torch.randn(3, len(x), generator=generator)
    values = {"threshold": threshold, "scale": scale.sigmoid() + 0.5, "offset": offset}
    return BinarizedClassifier(features, references=x, weight=weight, anchor=anchor, **values, batching=rows)


class Held:
    """A tensor saved for a backward pass."""

    def __init__(self, tensor: Tensor) -> None:
        # Without its graph, which would keep itself alive through an output that it saves.
        self.tensor = tensor.detach()


def most_held(work: Callable[[Callable[[], int]], object]) -> int:
    """The most numbers that graphs held at any one time; ``work`` gets what counts how many are held at the moment."""
    alive: weakref.WeakSet[Held] = weakref.WeakSet()
    most = 0

    def now() -> int:
        return sum(held.tensor.numel() for held in alive)

    def pack(tensor: Tensor) -> Held:
        nonlocal most
        held = Held(tensor)
        alive.add(held)
        most = max(most, now())
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        work(now)
    return most


def held_by(module: nn.Module, rows: int = 5) -> int:
    """The same for one forward and backward pass of a module, which gives every row a gradient."""

    def both(_: Callable[[], int]) -> None:
        x = data(rows).requires_grad_()
        (gradient,) = torch.autograd.grad(module(x), x, torch.ones(rows, 3))
        assert bool((gradient != 0).any())

    return most_held(both)
