"""A small case of every published defense: a network of two layers, and trained parts whose weights are drawn."""

import inspect

import numpy as np
import torch
from torch import Tensor, nn

from robust_ext.core.random import seeded_globals
from robust_ext.defenses import Discriminator
from robust_ext.defenses.adp import ScoreNetwork
from robust_ext.defenses.catalogue import NAMED
from robust_ext.defenses.clc import Projections
from robust_ext.defenses.reverse import ContrastiveHead
from robust_ext.defenses.sodef import StableHead
from robust_ext.defenses.training.views import RandomViews
from robust_ext.demo.network import digits_network
from tests.attacks.problems import Lambda

SHAPE = (2, 6, 5)
GROUPED = ("clc", "reverse")
# With which a few rows are defended in no time.
QUICK = {
    "soap": {"radii": 4},
    "sodef": {"solver": "rk4", "steps": 2},
    "clc": {"group_size": 2},
    "reverse": {"group_size": 2, "steps": 2},
    "adp": {"runs": 2, "steps": 2},
    "randomized-smoothing": {"samples": 4},
    "resize-pad": {"smallest": 0.5, "largest": 1.0},
}


def network(dtype=torch.float64, bounds=(0.0, 1.0)):
    with seeded_globals(0):
        parts = nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 4)
        return nn.Sequential(Lambda(lambda x: (x - bounds[0]) / (bounds[1] - bounds[0])), *parts).eval().to(dtype)


def linear(weights, bias=None):
    layer = nn.Linear(weights.shape[1], weights.shape[0]).double()
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weights))
        layer.bias.copy_(torch.from_numpy(np.zeros(len(weights)) if bias is None else bias))
    return nn.Sequential(nn.Flatten(), layer).eval()


def data(rows, dtype=torch.float64, low=0.0, high=1.0):
    unit = torch.rand(rows, *SHAPE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return (low + (high - low) * unit).to(dtype)


def seeds(rows):
    return torch.arange(rows) + 11


def drawn_part(name, *, digits=False):
    """A part of the sizes of :func:`network`, or of the digits' network."""
    features, classes, channels, size = (128, 10, 1, 64) if digits else (8, 4, 2, 60)
    with seeded_globals(1):
        return {
            "imf": lambda: Discriminator([classes], width=8, after=1),
            "aid": lambda: Discriminator([32, 128] if digits else [3, 8], layers=("2", "5"), width=8, after=1),
            "sodef": lambda: StableHead(features, classes, dimension=6, hidden=7),
            "clc": lambda: Projections(
                ["", "5" if digits else "4"],
                [torch.linalg.qr(torch.randn(n, n // 2))[0] for n in (size, 512 if digits else 36)],
                [torch.rand(n) for n in (size, 512 if digits else 36)],
            ),
            "reverse": lambda: ContrastiveHead(features, width=5, dimension=3, views=RandomViews(area=0.5, flip=0.0)),
            "adp": lambda: ScoreNetwork(channels, width=5, depth=2, noise=0.2),
        }[name]()


def make(name, dtype=torch.float64, bounds=(0.0, 1.0), *, net=None, inputs=None, **settings):
    """The defense of :func:`network`, or of the digits' network ``net`` where ``inputs`` are given."""
    net = network(dtype, bounds) if net is None else net
    inputs = data(2, dtype, *bounds) if inputs is None else inputs
    defense = NAMED[name]
    if defense.part_class is not None:
        part = drawn_part(name, digits=inputs.shape[1:] == (1, 8, 8)).to(dtype)
        settings |= defense.part_arguments(part, net, inputs)
    if "bounds" in inspect.signature(defense).parameters:
        settings["bounds"] = bounds
    return defense(net, **settings)


def quick(name, *args, **settings):
    return make(name, *args, **{**QUICK.get(name, {}), **settings})


def of_digits(name, inputs, **settings):
    """The same for the digits' network."""
    return quick(name, torch.float32, net=digits_network(), inputs=inputs, **settings)


def gradient(module, x, weights):
    leaf = x.clone().requires_grad_()
    found: Tensor
    (found,) = torch.autograd.grad((module(leaf) * weights).sum(), leaf)
    return found
