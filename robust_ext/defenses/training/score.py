"""A small network for the score of noisy images, and its training by denoising.

Source: Vincent, "A Connection Between Score Matching and Denoising Autoencoders" (2011); in adaptive denoising
purification the score network is that of Song and Ermon, "Improved Techniques for Training Score-Based Generative
Models" (2020), which is far larger and gets the level of the noise.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from robust_ext.core.bounds import to_unit
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.validation import check_integer, check_number
from robust_ext.defenses._common import check_images
from robust_ext.defenses.training.loop import NetworkTraining
from robust_ext.defenses.training.part import TrainedPart


class ScoreNetwork(TrainedPart):
    """Convolutions of 3x3 that estimate the noise in images; the score is minus the noise over its variance.

    It has ``depth`` hidden layers of ``width`` channels; ``noise`` is the standard deviation for images in [0, 1].
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


@settings_class
class ScoreTraining(NetworkTraining):
    """Training of a :class:`ScoreNetwork` to estimate the noise in images, of a deviation between 0 and ``noise``."""

    noise: float = setting(default=0.25, help="Above 0, for images in [0, 1].", above=0)
    width: int = setting(default=32, help="See :class:`ScoreNetwork`.", minimum=1)
    depth: int = setting(default=3, help="Likewise.", minimum=1)
    epochs: int = setting(default=30)
    batch_size: int = setting(default=64)
    learning_rate: float = setting(default=2e-3)

    def fit(self, classifier: nn.Module, inputs: Tensor, labels: Tensor | None = None) -> ScoreNetwork:
        """Train; of the classifier nothing matters but its device. See :meth:`Training.fit`."""
        unit = to_unit(self.checked(classifier, inputs), self.bounds)
        check_images(unit)
        with seeded_globals(derive_seed(self.seed, "score")):
            network = ScoreNetwork(unit.shape[1], width=self.width, depth=self.depth, noise=self.noise).to(unit.device)

        def loss(rows: Tensor) -> Tensor:
            clean = unit[rows]
            level = self.noise * torch.rand(len(rows), 1, 1, 1).to(unit.device)
            added = level * torch.randn(clean.shape).to(unit.device)
            found = -(self.noise**2) * network(clean + added)
            return nn.functional.mse_loss(found, added) / self.noise**2

        self.run(network, len(unit), loss)
        return network.requires_grad_(False)
