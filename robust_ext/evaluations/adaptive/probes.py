"""What is measured of a defense before it is attacked: its cost, and whether its gradients say anything."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.random import seeded_globals
from robust_ext.core.target import PassCounter, count_calls
from robust_ext.models.adaptive import AdaptiveDefense


def measure_cost(defense: AdaptiveDefense, inputs: Tensor, *, rounds: int = 3) -> dict[str, Any]:
    """Cost of a prediction of the defense, measured on some inputs.

    Args:
        defense: The defense.
        inputs: A batch ``(n, ...)`` it takes.
        rounds: The fastest of so many is taken, of either.

    Returns:
        ``seconds_ratio``, of the defense over the static model; rows that go ``forward`` and ``backward`` through the
        classifier for each input.
    """
    counter = PassCounter()
    with torch.no_grad(), seeded_globals(0):
        with count_calls(defense.classifier, counter):
            defense(inputs)
        defended = _fastest(lambda: defense(inputs), rounds)
        static = _fastest(lambda: defense.classifier(inputs), rounds)
    return {
        "seconds_ratio": defended / static,
        "forward": counter.forward / len(inputs),
        "backward": counter.backward / len(inputs),
    }


def zero_gradients(module: nn.Module, inputs: Tensor, labels: Tensor) -> float | None:
    """Share of inputs at which the cross-entropy has no gradient, or one that is not finite; None without a graph.

    Args:
        module: From inputs to logits.
        inputs: ``(n, ...)``.
        labels: int64 ``(n,)``.
    """
    points = inputs.clone().requires_grad_(True)
    with torch.enable_grad(), seeded_globals(0):
        logits = module(points)
        if not logits.requires_grad:
            return None
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        gradient: Tensor | None = torch.autograd.grad(loss, points, allow_unused=True)[0]
    if gradient is None:
        return None
    size = gradient.flatten(1).abs().amax(1)
    return float(((size == 0) | ~torch.isfinite(size)).double().mean())


def looks_like_probabilities(logits: Tensor) -> bool:
    """Whether all rows lie in [0, 1] and sum to one."""
    inside = bool(((logits >= 0) & (logits <= 1)).all())
    return inside and bool(((logits.double().sum(1) - 1).abs() < 1e-4).all())


def _fastest(call: Callable[[], object], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        begun = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begun)
    return best
