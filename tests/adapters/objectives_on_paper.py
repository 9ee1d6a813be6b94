"""What the tests of MEAD's objectives as losses of the hosts' attacks share: cases, derivatives on paper."""

import pytest
import torch
from torch import nn

from tests.adapters.hosts import OBJECTIVES

EachName = pytest.mark.parametrize("name", OBJECTIVES)
EachBounds = pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 2.0)])


class Smooth(nn.Module):
    """A smooth network of 16 values that records its queries, and may saturate."""

    def __init__(self, *, scale=1.0):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(16, 12, generator=generator) / 4)
        self.last = nn.Parameter(torch.randn(12, 4, generator=generator))
        self.scale = scale
        self.queries = []

    def forward(self, x):
        self.queries.append(x.detach().clone())
        return (x.flatten(1) @ self.first).tanh() @ self.last * self.scale


def slopes(name, logits, natural, labels):
    """Derivatives of the objectives by the logits, worked out on paper."""
    p, q = natural.softmax(1), logits.softmax(1)
    if name == "ace":
        return q - nn.functional.one_hot(labels, q.shape[1])
    if name == "kl":
        return q - p
    if name == "gini":
        length = q.norm(dim=1, keepdim=True)
        return q * length - q.square() / length
    roots = (p * q).sqrt()
    cosine = roots.sum(1, keepdim=True)
    # 1 - cosine^2 as a sum of squares, which does not cancel.
    half = (p.sqrt() - q.sqrt()).square().sum(1, keepdim=True) / 2
    return (q * cosine - roots) / (half * (2 - half)).sqrt()


def slopes_by_inputs(name, network, points, x, labels):
    """The same by the points ``(N, ...)``, with the inputs ``x`` as the natural ones."""
    points = points.detach().requires_grad_()
    logits = network(points)
    weights = slopes(name, logits.detach(), network(x).detach(), labels)
    (gradient,) = torch.autograd.grad((weights * logits).sum(), points)
    return gradient
