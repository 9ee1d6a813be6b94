"""What the measurements of several mechanisms share: an attack on the classifier, accuracy under it, gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robust_ext.attacks._common.objectives import cross_entropy
from robust_ext.attacks.base import Attack
from robust_ext.attacks.running import run_attack
from robust_ext.core.random import stream
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel


def attacked(
    module: nn.Module, attack: Attack, inputs: Tensor, labels: Tensor, threat_model: ThreatModel, *, seed: int
) -> Tensor:
    """Candidates ``(N, ...)`` of an attack on a classifier, not verified."""
    with torch.no_grad():
        classes = module(inputs[:1]).shape[1]
    target = Target(
        module=module,
        bounds=threat_model.bounds,
        classes=classes,
        input_shape=tuple(inputs.shape[1:]),
        device=inputs.device,
    )
    generator = stream(seed, 0, "attacked")
    return run_attack(attack, target, inputs, labels, threat_model=threat_model, generator=generator)


def accuracy(module: nn.Module, points: Tensor, labels: Tensor) -> float:
    """The share of points ``(N, ...)`` that are classified as their labels ``(N,)``."""
    with torch.no_grad():
        return float((module(points).argmax(1) == labels).double().mean())


def loss_gradients(module: nn.Module, points: Tensor, labels: Tensor) -> Tensor:
    """Gradients of the cross-entropy at points ``(N, ...)``, ``(N, D)``."""
    x = points.clone().requires_grad_(True)
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(cross_entropy(module(x), labels).sum(), x)
    return gradient.flatten(1)
