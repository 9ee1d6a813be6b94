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


def normalised_features(shape: Sequence[int], features: int = 64) -> nn.Sequential:
    """Six convolutions with batch normalisation and a linear layer, for mechanisms that need some depth.

    Args:
        shape: Of an input, (channels, height, width); of images of 16 pixels or more the first convolution halves the
            resolution.
        features: Number F of features that it ends in.

    Returns:
        From inputs ``(N, *shape)`` to features ``(N, F)``, as initialised by torch's global generator.

    Example:
        >>> import torch
        >>> normalised_features((1, 8, 8), 32)(torch.rand(2, 1, 8, 8)).shape
        torch.Size([2, 32])
    """
    channels, first = shape[0], 2 if shape[1] >= 16 else 1
    layers: list[nn.Module] = []
    for number, stride in ((16, first), (16, 1), (32, 2), (32, 1), (64, 2), (64, 1)):
        layers += [nn.Conv2d(channels, number, 3, stride, 1), nn.BatchNorm2d(number), nn.ReLU()]
        channels = number
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, features), nn.ReLU())
