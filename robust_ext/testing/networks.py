"""Small classifiers and inputs for them, made from fixed seeds."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Centred(nn.Module):
    """From inputs in the bounds to values in [-2, 2], where a small random network separates classes."""

    def __init__(self, bounds: tuple[float, float]) -> None:
        super().__init__()
        self.bounds = bounds

    def forward(self, x: Tensor) -> Tensor:
        """Stretch and shift ``(N, ...)``."""
        low, high = self.bounds
        return (x - low) / (high - low) * 4 - 2


def small_network(shape: tuple[int, ...], classes: int, *, bounds: tuple[float, float] = (0.0, 1.0)) -> nn.Module:
    """A random network with batch normalisation, in eval mode, from inputs ``(N, *shape)`` to ``(N, classes)``."""
    values = int(torch.Size(shape).numel())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Flatten(), nn.Linear(values, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, classes)
        return nn.Sequential(Centred(bounds), *layers).eval()


def affine_network(shape: tuple[int, ...], classes: int, *, bounds: tuple[float, float] = (0.0, 1.0)) -> nn.Module:
    """A random piecewise affine network whose decision boundaries run through the middle of the box, in eval mode."""
    low, high = bounds
    values = int(torch.Size(shape).numel())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, last = nn.Linear(values, 8), nn.Linear(8, classes)
    with torch.no_grad():
        first.weight.mul_(4 / (high - low))
        first.bias.sub_(first.weight.sum(1) * (low + high) / 2)
        last.bias.sub_(last(first(torch.full((values,), (low + high) / 2)).relu()))
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), last).eval()


def small_batch(count: int, shape: tuple[int, ...], *, bounds: tuple[float, float] = (0.0, 1.0)) -> Tensor:
    """Uniform inputs ``(count, *shape)`` in the bounds, the first ones the same whatever the count."""
    unit = torch.rand(64, *shape, generator=torch.Generator().manual_seed(1))[:count]
    return unit * (bounds[1] - bounds[0]) + bounds[0]


def margins(logits: Tensor, classes: Tensor) -> Tensor:
    """By how much each class ``(N,)`` beats the best other one in ``(N, K)``."""
    column = classes.view(-1, 1)
    others = logits.scatter(1, column, -torch.inf).amax(1)
    return logits.gather(1, column).squeeze(1) - others
