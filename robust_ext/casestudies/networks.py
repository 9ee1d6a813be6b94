"""The small networks that the case studies build their defenses on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def small_features(shape: Sequence[int], features: int = 64, *, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Two convolutions (three for images of 16 pixels or more) and a linear layer.

    Args:
        shape: Of an input, (channels, height, width).
        features: Number F of features that it ends in.
        activation: What follows every layer, made without arguments.

    Returns:
        From inputs ``(N, *shape)`` to features ``(N, F)``, as initialised by torch's global generator.

    Example:
        >>> import torch
        >>> small_features((1, 28, 28), 32)(torch.rand(2, 1, 28, 28)).shape
        torch.Size([2, 32])
    """
    channels, height, width = shape
    layers: list[nn.Module] = [nn.Conv2d(channels, 16, 3, padding=1), activation()]
    layers += [nn.Conv2d(16, 32, 3, stride=2, padding=1), activation()]
    height, width = -(-height // 2), -(-width // 2)
    if height >= 8:
        layers += [nn.Conv2d(32, 32, 3, stride=2, padding=1), activation()]
        height, width = -(-height // 2), -(-width // 2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * height * width, features), activation())
