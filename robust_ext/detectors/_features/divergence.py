"""Divergences of predictions."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def jensen_shannon(first: Tensor, second: Tensor) -> Tensor:
    """Jensen-Shannon divergence, in nats, of the softmax of two sets of logits ``(N, K)``, ``(N,)``, in [0, log 2].

    Example:
        >>> far = torch.tensor([[100.0, 0.0], [0.0, 0.0]])
        >>> jensen_shannon(far, far.flip(1))
        tensor([0.6931, 0.0000])
    """
    one, other = first.log_softmax(1), second.log_softmax(1)
    middle = torch.logaddexp(one, other) - math.log(2)
    both = one.exp() * (one - middle) + other.exp() * (other - middle)
    return both.sum(1) / 2
