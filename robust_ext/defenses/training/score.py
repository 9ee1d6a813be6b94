"""A small network for the score of noisy images, and its training by denoising.

Source: Vincent, "A Connection Between Score Matching and Denoising Autoencoders" (2011); in adaptive denoising
purification the score network is that of Song and Ermon, "Improved Techniques for Training Score-Based Generative
Models" (2020), which is far larger and gets the level of the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from robust_ext.core.bounds import check_bounds, to_unit
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.core.validation import check_inputs, check_integer, check_number
from robust_ext.defenses.training.loop import train_module
from robust_ext.defenses.training.part import TrainedPart


class ScoreNetwork(TrainedPart):
    """Convolutions of 3x3 that estimate the noise in an image; the score is minus the noise over its variance.

    Args:
        channels: Of the images.
        width: Channels of the hidden layers.
        depth: Number of hidden layers, at least 1.
        noise: Standard deviation of the noise, above 0, for images in [0, 1].

    Example:
        >>> ScoreNetwork(1, width=4)(torch.rand(2, 1, 5, 7)).shape
        torch.Size([2, 1, 5, 7])
    """

    def __init__(self, channels: int, *, width: int = 32, depth: int = 3, noise: float = 0.25) -> None:
        super().__init__()
        check_integer("channels", channels, minimum=1)
        check_integer("width", width, minimum=1)
        sizes = [channels, *[width] * check_integer("depth", depth, minimum=1)]
        self.noise = check_number("noise", noise, minimum=0, open_minimum=True)
        hidden = [(nn.Conv2d(*pair, 3, padding=1), nn.SiLU()) for pair in pairwise(sizes)]
        self.layers = nn.Sequential(
            *[part for pair in hidden for part in pair], nn.Conv2d(width, channels, 3, padding=1)
        )
        self.settings = {"channels": channels, "width": width, "depth": depth, "noise": self.noise}
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Scores ``(N, C, H, W)`` of images in [0, 1]."""
        out: Tensor = self.layers(x - 0.5)
        return -out / self.noise**2


def fit_score_network(
    inputs: Tensor,
    *,
    noise: float = 0.25,
    width: int = 32,
    depth: int = 3,
    epochs: int = 30,
    batch_size: int = 64,
    learning_rate: float = 2e-3,
    bounds: Sequence[float] = (0.0, 1.0),
    seed: int = 0,
) -> ScoreNetwork:
    """Train a score network to estimate the noise in images, of a standard deviation between 0 and ``noise``.

    Args:
        inputs: Clean training images, floating point ``(N, C, H, W)`` in the bounds, at least 2; it is trained on
            their device.
        noise: Above 0, for images in [0, 1].
        width: See :class:`ScoreNetwork`.
        depth: See :class:`ScoreNetwork`.
        epochs: Passes over the data.
        batch_size: At least 2.
        learning_rate: Of Adam.
        bounds: Of the inputs; the network sees images in [0, 1] whatever they are.
        seed: Of everything that is drawn.

    Returns:
        In eval mode; its parameters require no gradients.

    Raises:
        InvalidArgumentError: These are no such tensors or settings.
    """
    limits = check_bounds(bounds)
    device = inputs.device
    unit = to_unit(check_inputs("inputs", inputs, bounds=limits), limits)
    if unit.dim() != 4:
        raise InvalidArgumentError("inputs", f"shape {tuple(unit.shape)}", "images (N, C, H, W)")
    with seeded_globals(derive_seed(seed, "score")):
        network = ScoreNetwork(unit.shape[1], width=width, depth=depth, noise=noise).to(device)

    def loss(rows: Tensor) -> Tensor:
        clean = unit[rows]
        level = noise * torch.rand(len(rows), 1, 1, 1).to(device)
        added = level * torch.randn(clean.shape).to(device)
        found = -(noise**2) * network(clean + added)
        return nn.functional.mse_loss(found, added) / noise**2

    train_module(network, len(unit), loss, epochs=epochs, batch_size=batch_size, learning_rate=learning_rate, seed=seed)
    return network.requires_grad_(False)
