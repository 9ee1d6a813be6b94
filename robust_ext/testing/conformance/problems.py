"""What the attacks of the matrix are run on: four digits, the embedded network, and problems planted in it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.binarization.planting import Planted, plant

SAMPLES = 4
EPSILONS = {"linf": 0.15, "l2": 1.0, "l1": 2.0}


class Grey(nn.Module):
    """A network of one channel, as one of several, by their mean."""

    def __init__(self, network: nn.Sequential) -> None:
        super().__init__()
        self.network = network
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Logits of ``(N, C, H, W)``."""
        logits: Tensor = self.network(x.mean(1, keepdim=True))
        return logits


@cache
def network(channels: int) -> nn.Module:
    """The embedded network for images of so many channels."""
    return digits_network() if channels == 1 else Grey(digits_network())


@cache
def digits(channels: int) -> tuple[Tensor, Tensor]:
    """Digits that the network just about classifies correctly, ``(4, channels, 8, 8)`` in [0, 1], and their labels."""
    dataset = load_dataset("digits")
    inputs, labels = dataset.take(dataset.choose(16 * SAMPLES, seed=0))
    with torch.no_grad():
        logits = digits_network()(inputs)
    others = logits.scatter(1, labels[:, None], -torch.inf).amax(1)
    margins = logits.gather(1, labels[:, None]).squeeze(1) - others
    chosen = margins.where(margins > 0, torch.inf).argsort()[:SAMPLES]
    return inputs[chosen].expand(-1, channels, -1, -1).contiguous(), labels[chosen]


def threat_model(norm: str, channels: int) -> ThreatModel:
    """Of a size at which an ordinary attack succeeds; in l2 and l1 it grows with the number of channels."""
    growth = {"linf": 1.0, "l2": channels**0.5, "l1": float(channels)}[norm]
    return ThreatModel(norm=norm, epsilon=EPSILONS[norm] * growth)


@cache
def planted(norm: str, channels: int) -> Planted:
    """Binarized problems of the digits: easy ones, so that an attack that works finds something in a few steps."""
    inputs, _ = digits(channels)
    return plant(network(channels), inputs, threat_model(norm, channels), inner_points=50, kappa=0.0)
