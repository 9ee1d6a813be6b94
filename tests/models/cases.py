"""What the tests of the models share: a network, inputs, defenses, and a drawn readout."""

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


def data(rows=4, dtype=torch.float32, seed=1):
    return torch.rand(rows, 2, 3, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Net(nn.Module):
    """A function of itself, which holds the parts, and of its inputs, in eval mode."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)
        self.eval()

    def forward(self, *inputs):
        return self.run(self, *inputs)


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


class Probable(Descent):
    output = "probabilities"

    def readout(self, point, state):
        return super().readout(point, state).softmax(1)


class Controlled(AdaptiveDefense):
    """Does its part in the readout, by a state found from the input."""

    def solve(self, x, rng, *, record):
        return Solution(x, (x,), {"control": -0.5 * x.sin()})

    def readout(self, point, state):
        return super().readout(point + state["control"], {})


def quantise(x):
    return (x * 15).round() / 15


def planted(features, x, rows="any", size=8):
    """A drawn readout of the features for each input."""
    generator = torch.Generator().manual_seed(5)
    weight, anchor = (torch.randn(len(x), size, generator=generator) for _ in range(2))
    threshold, scale, offset = torch.randn(3, len(x), generator=generator)
    values = {"threshold": threshold, "scale": scale.sigmoid() + 0.5, "offset": offset}
    return BinarizedClassifier(features, references=x, weight=weight, anchor=anchor, **values, batching=rows)
