"""What the tests of MEAD's objectives as losses of the hosts' attacks share: cases, derivatives on paper."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

NAMES = ("ace", "kl", "gini", "fisher-rao")
EPSILONS = {"linf": 0.1, "l2": 0.4, "l1": 1.6}
EachName = pytest.mark.parametrize("name", NAMES)
EachNorm = pytest.mark.parametrize("norm", list(EPSILONS))
EachBounds = pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 2.0)])


def slopes(name: str, logits: Tensor, natural: Tensor, labels: Tensor) -> Tensor:
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
