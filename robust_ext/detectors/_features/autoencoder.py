"""Small convolutional autoencoders, trained to remove noise (Meng & Chen 2017, table 3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.validation import from_unit, to_unit

POOL = "average"


class Autoencoder(nn.Module):
    """Sigmoid convolutions of 3x3, given by their encoder: numbers of filters, and ``"average"`` for a pooling of 2x2.

    The decoder mirrors the encoder, with upsampling where that pools, and ends in a convolution to the channels of the
    image. ``[3, "average", 3]`` is thus convolution, pooling, convolution; convolution, upsampling, convolution; and
    the last convolution. An odd row or column is pooled alone, as the authors' library does.
    """

    def __init__(self, structure: Sequence[int | str], *, channels: int, bounds: tuple[float, float]) -> None:
        super().__init__()
        self.structure = check_structure(structure)
        self.bounds = bounds
        self.convolutions = nn.ModuleList()
        width = channels
        for step in (*self.structure, *reversed(self.structure), channels):
            if isinstance(step, int):
                self.convolutions.append(nn.Conv2d(width, step, 3, padding=1))
                width = step

    def forward(self, x: Tensor) -> Tensor:
        """Reconstructions of images ``(N, C, H, W)``, in the bounds."""
        return from_unit(self.activities(x)[-1], self.bounds)

    def activities(self, x: Tensor) -> list[Tensor]:
        """Outputs of all convolutions, the last of which is the reconstruction in [0, 1]."""
        values = to_unit(x, self.bounds)
        found: list[Tensor] = []
        sizes: list[tuple[int, int]] = []
        convolutions = iter(self.convolutions)
        for step in self.structure:
            if isinstance(step, int):
                found.append(values := next(convolutions)(values).sigmoid())
            else:
                sizes.append((values.shape[2], values.shape[3]))
                values = nn.functional.avg_pool2d(values, 2, ceil_mode=True)
        for step in reversed(self.structure):
            if isinstance(step, int):
                found.append(values := next(convolutions)(values).sigmoid())
            else:
                height, width = sizes.pop()
                values = nn.functional.interpolate(values, scale_factor=2.0, mode="nearest")[..., :height, :width]
        found.append(next(convolutions)(values).sigmoid())
        return found

    def loss(self, inputs: Tensor, *, noise: float, activity: float = 1e-9) -> tuple[Tensor, Tensor]:
        """Return the training loss for images ``(N, C, H, W)``, and its mean squared error, in units of [0, 1].

        The error is that of reconstructions from images with Gaussian noise (of this standard deviation in units of
        [0, 1], clipped), drawn again in each step from torch's global generator, where the authors draw it once.
        ``activity`` weighs the squares of all outputs of convolutions, summed and averaged over images.
        """
        clean = to_unit(inputs, self.bounds)
        noisy = (clean + noise * torch.randn_like(clean)).clamp(0, 1)
        outputs = self.activities(from_unit(noisy, self.bounds))
        error = nn.functional.mse_loss(outputs[-1], clean)
        penalty = torch.stack([output.square().sum() for output in outputs]).sum() / len(inputs)
        return error + activity * penalty, error


def check_structure(structure: object) -> tuple[int | str, ...]:
    """Return an encoder as a tuple of numbers of filters and ``"average"``."""
    steps = tuple(structure) if isinstance(structure, (list, tuple)) else ()
    right = [step == POOL if isinstance(step, str) else type(step) is int and step > 0 for step in steps]
    if not steps or not all(right):
        raise InvalidArgumentError("structures", structure, f"numbers of filters and {POOL!r}, as in [3, {POOL!r}, 3]")
    return steps
