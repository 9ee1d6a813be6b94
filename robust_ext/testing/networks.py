"""Small classifiers and inputs for them, made from fixed seeds; and the digits of the conformance matrix."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.binarization.planting import Planted, plant

SAMPLES = 4
"""Digits of the matrix."""

_EPSILONS = {"linf": 0.15, "l2": 1.0, "l1": 2.0}


class Centred(nn.Module):
    """A layer from inputs in the bounds to values in [-2, 2], where a small random network separates classes."""

    def __init__(self, bounds: tuple[float, float]) -> None:
        super().__init__()
        self.bounds = bounds

    def forward(self, x: Tensor) -> Tensor:
        """Stretch and shift ``(N, ...)``."""
        low, high = self.bounds
        return (x - low) / (high - low) * 4 - 2


def small_network(shape: tuple[int, ...], classes: int, *, bounds: tuple[float, float] = (0.0, 1.0)) -> nn.Module:
    """Return a random network with batch normalisation, ``(N, *shape)`` to ``(N, classes)``, in eval mode."""
    values = int(torch.Size(shape).numel())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Flatten(), nn.Linear(values, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, classes)
        return nn.Sequential(Centred(bounds), *layers).eval()


def small_batch(count: int, shape: tuple[int, ...], *, bounds: tuple[float, float] = (0.0, 1.0)) -> Tensor:
    """Return uniform inputs ``(count, *shape)`` in the bounds; a smaller batch is the beginning of a larger one."""
    unit = torch.rand(64, *shape, generator=torch.Generator().manual_seed(1))[:count]
    return unit * (bounds[1] - bounds[0]) + bounds[0]


def margins(logits: Tensor, classes: Tensor) -> Tensor:
    """Return by how much each class ``(N,)`` beats the best other one in the logits ``(N, K)``."""
    column = classes.view(-1, 1)
    others = logits.scatter(1, column, -torch.inf).amax(1)
    return logits.gather(1, column).squeeze(1) - others


class _Grey(nn.Module):
    """A network of one channel for images of several, by their mean."""

    def __init__(self, network: nn.Sequential) -> None:
        super().__init__()
        self.network = network
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of ``(N, C, H, W)``."""
        logits: Tensor = self.network(x.mean(1, keepdim=True))
        return logits


@cache
def network(channels: int) -> nn.Module:
    """Return the embedded network for images of ``channels`` channels."""
    return digits_network() if channels == 1 else _Grey(digits_network())


@cache
def digits(channels: int) -> tuple[Tensor, Tensor]:
    """Return digits that the network just about classifies, ``(4, channels, 8, 8)`` in [0, 1], and their labels."""
    dataset = load_dataset("digits")
    inputs, labels = dataset.take(dataset.choose(16 * SAMPLES, seed=0))
    with torch.no_grad():
        margin = margins(digits_network()(inputs), labels)
    chosen = margin.where(margin > 0, torch.inf).argsort()[:SAMPLES]
    return inputs[chosen].expand(-1, channels, -1, -1).contiguous(), labels[chosen]


def threat_model(norm: str, channels: int) -> ThreatModel:
    """Return a threat model in which ordinary attacks succeed; epsilon in l2 and l1 grows with the channels."""
    growth = {"linf": 1.0, "l2": channels**0.5, "l1": float(channels)}[norm]
    return ThreatModel(norm=norm, epsilon=_EPSILONS[norm] * growth)


@cache
def planted(norm: str, channels: int) -> Planted:
    """Plant easy problems in the digits: an attack that works finds something in a few steps."""
    inputs, _ = digits(channels)
    return plant(network(channels), inputs, threat_model(norm, channels), inner_points=50, kappa=0.0)
