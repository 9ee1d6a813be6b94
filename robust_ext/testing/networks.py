"""Small classifiers and inputs for them, made from fixed seeds."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
