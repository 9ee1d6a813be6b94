"""What the tests of the models share: a network, inputs, random defenses, and the memory that graphs hold."""

import weakref

import pytest
import torch
from torch import nn

from robust_ext import AdaptiveDefense, Purifier
from robust_ext.core.random import seeded_globals
from robust_ext.models.binarized import BinarizedClassifier
from robust_ext.models.rows import Solution
from robust_ext.models.vjp import row_gradient


def network(dtype=torch.float32, width=8):
    """From inputs ``(N, 2, 3)`` to three logits."""
    with seeded_globals(0):
        layers = nn.Flatten(), nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)
        return nn.Sequential(*layers).eval().to(dtype)


def data(rows, dtype=torch.float32, seed=1):
    return torch.rand(rows, 2, 3, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Descent(Purifier):
    """Steps down the squared logits, from a random start; every step can be differentiated."""

    random = True
    needs_gradients = True
    noise = 0.3

    def start(self, x, rng):
        return x + self.noise * rng.uniform(x, "start", low=-1, high=1), {"scale": 0.2 * x.flatten(1).mean(1)}

    def step(self, point, *, x, number, state, rng):
        gradient = row_gradient(lambda p: self.classifier(p).square().sum(1), point, differentiable=True)
        return point - state["scale"][:, None, None] * gradient + 0.01 * rng.normal(x, "step", number)


class Controlled(AdaptiveDefense):
    """Does its part in the readout, by a state found from the input."""

    def solve(self, x, rng, *, record):
        return Solution(x, (x,), {"control": -0.5 * x.sin()})

    def readout(self, point, state):
        return super().readout(point + state["control"], {})


def quantise(x):
    return (x * 15).round() / 15


class Rounding(Purifier):
    """Steps towards the middle that end in a quantiser: plain gradients are zero."""

    def step(self, point, *, x, number, state, rng):
        return quantise(point + 0.05 * (0.5 - point))


class NoisyRounding(Rounding):
    random = True

    def start(self, x, rng):
        return x + 0.01 * rng.normal(x, "noise"), {}


def art_classifier(module, **settings):
    """ART's classifier of digits."""
    classification = pytest.importorskip("art.estimators.classification")
    shape = {"input_shape": (1, 8, 8), "nb_classes": 10, "clip_values": (0, 1)}
    return classification.PyTorchClassifier(module, loss=nn.CrossEntropyLoss(), device_type="cpu", **shape, **settings)


def planted(features, x, rows="any", size=8):
    """A drawn readout of the features for each input."""
    generator = torch.Generator().manual_seed(5)
    weight, anchor = (torch.randn(len(x), size, generator=generator) for _ in range(2))
    threshold, scale, offset = torch.randn(3, len(x), generator=generator)
    values = {"threshold": threshold, "scale": scale.sigmoid() + 0.5, "offset": offset}
    return BinarizedClassifier(features, references=x, weight=weight, anchor=anchor, **values, batching=rows)


class Held:
    """A tensor saved for a backward pass."""

    def __init__(self, tensor):
        # Without its graph, which would keep itself alive through an output that it saves.
        self.tensor = tensor.detach()


def most_held(work):
    """The most numbers that graphs held at any one time; ``work`` gets what counts how many are held at the moment."""
    alive = weakref.WeakSet()
    most = 0

    def now():
        return sum(held.tensor.numel() for held in alive)

    def pack(tensor):
        nonlocal most
        held = Held(tensor)
        alive.add(held)
        most = max(most, now())
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        work(now)
    return most


def held_by(module, rows=5):
    """The same for one forward and backward pass of a module, which gives every row a gradient."""

    def both(_):
        x = data(rows).requires_grad_()
        (gradient,) = torch.autograd.grad(module(x), x, torch.ones(rows, 3))
        assert bool((gradient != 0).any())

    return most_held(both)
