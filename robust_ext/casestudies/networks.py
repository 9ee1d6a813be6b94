"""The small networks of the case studies, and their training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from robust_ext.defenses.training.loop import train_network

F = TypeVar("F", bound=nn.Module)
R = TypeVar("R", bound=nn.Module)


class Parts(nn.Module, Generic[F, R]):
    """Features followed by a readout, from inputs ``(N, *shape)`` to logits ``(N, K)``."""

    def __init__(self, features: F, readout: R) -> None:
        super().__init__()
        self.features, self.readout = features, readout

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.readout(self.features(x))
        return logits


def small_features(shape: Sequence[int], features: int = 64, *, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return two convolutions (three for images of 16 pixels or more) and a linear layer.

    They map inputs ``(N, *shape)`` to ``(N, features)``; an activation follows each of them.
    """
    channels, height, width = shape
    layers: list[nn.Module] = [nn.Conv2d(channels, 16, 3, padding=1), activation()]
    for channels in (16, 32) if height >= 15 else (16,):
        layers += [nn.Conv2d(channels, 32, 3, stride=2, padding=1), activation()]
        height, width = -(-height // 2), -(-width // 2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * height * width, features), activation())


def normalised_features(shape: Sequence[int], features: int = 64) -> nn.Sequential:
    """Return six convolutions with batch normalisation and a linear layer, for mechanisms that need some depth.

    They map inputs ``(N, *shape)`` to ``(N, features)``; images of 16 pixels or more are halved at first.
    """
    channels, first = shape[0], 2 if shape[1] >= 16 else 1
    layers: list[nn.Module] = []
    for number, stride in ((16, first), (16, 1), (32, 2), (32, 1), (64, 2), (64, 1)):
        layers += [nn.Conv2d(channels, number, 3, stride, 1), nn.BatchNorm2d(number), nn.ReLU()]
        channels = number
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, features), nn.ReLU())


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of Adam; the first value of each pair is for images of less than 16 pixels, the second for others."""

    epochs: tuple[int, int]  # Passes over the images, at least
    images: int = 0  # To see in all the passes; small training sets get more passes
    batch_size: int = 128
    learning_rate: tuple[float, float] = (1e-3, 1e-3)

    def passes(self, inputs: Tensor) -> int:
        """Return the number of passes over these training inputs."""
        return max(self.epochs[inputs.shape[-1] >= 16], self.images // len(inputs))

    def run(
        self,
        module: nn.Module,
        inputs: Tensor,
        labels: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor],
        *,
        seed: int | None = None,
    ) -> None:
        """Train a module by a mean loss of a batch of inputs and labels; leave it in eval mode.

        Without a seed the training draws from the caller's global generators.
        """
        train_network(
            module,
            len(inputs),
            lambda rows: loss(inputs[rows], labels[rows]),
            epochs=self.passes(inputs),
            batch_size=self.batch_size,
            learning_rate=self.learning_rate[inputs.shape[-1] >= 16],
            seed=seed,
        )


Box = tuple[Tensor, Tensor]


def box(inputs: Tensor, epsilon: float | Tensor) -> Box:
    """Return the lowest and the highest points in [0, 1] within epsilon of inputs."""
    return (inputs - epsilon).clamp_min(0), (inputs + epsilon).clamp_max(1)


def uniform(ends: Box) -> Tensor:
    """Draw one uniform point of each box from the global generator."""
    low, high = ends
    return low + (high - low) * torch.rand_like(low)


def sign_step(points: Tensor, objective: Callable[[Tensor], Tensor], size: float | Tensor, ends: Box) -> Tensor:
    """Return points after a step along the sign of an objective's gradient, clipped to their boxes.

    ``objective`` maps points to a value ``()`` that the step raises.
    """
    points = points.detach().requires_grad_(True)
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(objective(points), points)
    return (points.detach() + size * gradient.sign()).clamp(*ends)
