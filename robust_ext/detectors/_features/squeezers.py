"""Squeezers: transforms of images that leave out detail a classifier does not need.

Xu, Evans, Qi, "Feature Squeezing: Detecting Adversarial Examples in Deep Neural Networks" (2018), section 3.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from robust_ext.core.bounds import check_bounds, from_unit, to_unit
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.modules import SettingsModule, module_class
from robust_ext.core.settings import setting


@module_class
class Squeezer(SettingsModule, ABC):
    """A transform of inputs ``(N, ...)`` to squeezed ones of the same shape.

    Attributes:
        kind: Its name in lists of squeezers.
        differentiable: Whether its gradient is of use.
    """

    kind: ClassVar[str]
    differentiable = True

    bounds: tuple[float, float] = setting(default=(0.0, 1.0), help="Of the inputs.", check=check_bounds)

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Squeeze inputs ``(N, ...)``."""

    def extra_repr(self) -> str:
        """The settings."""
        return ", ".join(f"{name}={value}" for name, value in self.settings.items())


@module_class
class BitDepth(Squeezer):
    """Rounding to ``2 ** bits`` levels, evenly spaced from bound to bound; its gradient is 0 (section 3.1).

    Example:
        >>> BitDepth(bits=1)(torch.tensor([[0.2, 0.4, 0.6]]))
        tensor([[0., 0., 1.]])
    """

    kind = "bit_depth"
    differentiable = False

    bits: int = setting(help="From 1 to 16.", minimum=1, maximum=16)

    def forward(self, x: Tensor) -> Tensor:
        """Round to the nearest level, halves to the even one."""
        steps = 2**self.bits - 1
        return from_unit((to_unit(x, self.bounds) * steps).round() / steps, self.bounds)


@module_class
class Median(Squeezer):
    """The median over a square window, within each channel (section 3.2); bounds have no influence.

    As in the authors' code, ``scipy.ndimage.median_filter(image, size, mode="reflect")``: a window of even size has one
    more row above and one more column to the left of the pixel than below and to the right; beyond the edges the image
    is mirrored, the outermost pixels being repeated; of an even number of values the upper of the two middle ones is
    taken. Gradients go to the pixel that was taken.

    Example:
        >>> Median(size=2)(torch.tensor([[[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]]))
        tensor([[[0., 1., 1.],
                 [0., 1., 1.]]])
    """

    kind = "median"

    size: int = setting(default=2, help="Side of the window, at least 2.", minimum=2)

    def forward(self, x: Tensor) -> Tensor:
        """Filter images ``(N, ..., H, W)``."""
        if x.dim() < 3:
            raise InvalidArgumentError(
                "inputs", f"shape {tuple(x.shape)}", "images (N, ..., H, W); for others leave the median filter out"
            )
        before = self.size // 2
        wide = x
        for dimension in (-2, -1):
            wide = wide.index_select(
                dimension, _mirrored(x.shape[dimension], before, self.size - 1 - before).to(x.device)
            )
        windows = wide.unfold(-2, self.size, 1).unfold(-2, self.size, 1).flatten(-2)
        middle = self.size**2 // 2
        # The smallest of the upper part is quicker to find than an order of all.
        return windows.topk(self.size**2 - middle, -1).values[..., -1]


def _mirrored(length: int, before: int, after: int) -> Tensor:
    """Positions in a line that is mirrored at both ends, the outermost pixels being repeated, however far."""
    positions = torch.arange(-before, length + after) % (2 * length)
    return torch.where(positions < length, positions, 2 * length - 1 - positions)
