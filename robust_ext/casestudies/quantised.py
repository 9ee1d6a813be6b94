"""The networks of EMPIR: members whose weights and activations have few bits, and their vote.

Sources: Sen, Ravindran and Raghunathan, "EMPIR: Ensembles of Mixed Precision Deep Networks for Increased Robustness
against Adversarial Attacks" (2020); Zhou et al., "DoReFa-Net: Training Low Bitwidth Convolutional Neural Networks with
Low Bitwidth Gradients" (2016), section 2, for the quantisation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

# Bits of weights and activations of the members; None is full precision.
BITS: tuple[tuple[int, int] | None, ...] = ((4, 2), (2, 2), None)


def quantise(values: Tensor, bits: int) -> Tensor:
    """Values in [0, 1] rounded to the nearest of ``2^bits - 1`` equal steps, with the gradient of the identity."""
    steps = 2**bits - 1
    rounded = torch.round(values * steps) / steps
    out: Tensor = values + (rounded - values).detach()
    return out


class QuantisedConv(nn.Conv2d):
    """A convolution with weights of few bits, and a ReLU cut off at 1 with outputs of few bits.

    Weights are ``2 q(tanh(w) / (2 max |tanh(w)|) + 1/2) - 1``, divided by the root of the values that each output
    sums, which keeps outputs in the range that is not cut off. Without bits, weights and outputs are as they are.
    """

    def __init__(self, inputs: int, outputs: int, bits: tuple[int, int] | None, *, stride: int = 1) -> None:
        super().__init__(inputs, outputs, 3, stride=stride, padding=1)
        self.bits = bits

    def forward(self, x: Tensor) -> Tensor:
        """Outputs ``(N, C, H, W)``."""
        if self.bits is None:
            return super().forward(x).relu()
        bounded = self.weight.tanh()
        weight = 2 * quantise(bounded / (2 * bounded.abs().amax()) + 0.5, self.bits[0]) - 1
        weight = weight / self.weight[0].numel() ** 0.5
        out: Tensor = self._conv_forward(x, weight, self.bias).clamp(0, 1)
        return quantise(out, self.bits[1])


class Members(nn.Module):
    """The features of the three members, ``(N, 3, F)``."""

    def __init__(self, shape: Sequence[int], features: int) -> None:
        super().__init__()
        channels, height, width = shape
        size = 32 * -(-height // 2) * -(-width // 2)
        self.networks = nn.ModuleList(
            nn.Sequential(
                QuantisedConv(channels, 32, bits),
                QuantisedConv(32, 32, bits, stride=2),
                nn.Flatten(),
                nn.Linear(size, features),
                nn.ReLU(),
            )
            for bits in BITS
        )

    def forward(self, x: Tensor) -> Tensor:
        """Features ``(N, 3, F)`` of ``(N, C, H, W)``."""
        return torch.stack([network(x) for network in self.networks], 1)


class Vote(nn.Module):
    """From features ``(N, 3, F)`` to logits: the mean of the members that agree with the majority.

    Where all three differ, the last member decides, that of full precision.
    """

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(features, classes) for _ in BITS)

    def forward(self, features: Tensor) -> Tensor:
        """Logits ``(N, K)``, whose largest is the vote's."""
        logits = self.outputs(features)
        choices = logits.argmax(2)
        last = choices[:, -1]
        # A majority without the last member is that of the first two.
        chosen = torch.where(choices[:, 0] == choices[:, 1], choices[:, 0], last)
        agree = (choices == chosen[:, None]).to(logits.dtype)
        return (logits * agree[:, :, None]).sum(1) / agree.sum(1, keepdim=True)

    def outputs(self, features: Tensor) -> Tensor:
        """Logits of each member, ``(N, 3, K)``."""
        return torch.stack([head(part) for head, part in zip(self.heads, features.unbind(1), strict=True)], 1)
