"""The digits network behind a layer that rounds its inputs, and that plain attacks fail on for want of a gradient.

robust-ext diagnose --model examples/rounded.py:make --data digits --eps 0.1 \
    --attack "foolbox:LinfPGD(steps=40, rel_stepsize=0.1)" \
    --try-remedies
"""

from collections import OrderedDict

from torch import Tensor, nn

from robust_ext.demo.network import digits_network


class Quantise(nn.Module):
    """16 levels; the gradient of rounding is zero."""

    def forward(self, x: Tensor) -> Tensor:
        """Inputs (N, ...) in [0, 1], rounded."""
        return (x * 15).round() / 15


def make() -> nn.Module:
    """From inputs (N, 1, 8, 8) in [0, 1] to logits (N, 10)."""
    return nn.Sequential(OrderedDict(quantise=Quantise(), network=digits_network())).eval()
