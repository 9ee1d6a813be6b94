"""Squeezers: transforms of images that leave out detail a classifier does not need.

Xu, Evans, Qi, "Feature Squeezing: Detecting Adversarial Examples in Deep Neural Networks" (2018), section 3.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.bounds import check_bounds, from_unit, to_unit
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.validation import check_integer


class Squeezer(nn.Module, ABC):
    """A transform of inputs ``(N, ...)`` to squeezed ones of the same shape.

    Args:
        bounds: Of the inputs.

    Attributes:
        kind: Its name in lists of squeezers.
        differentiable: Whether its gradient says anything.
    """

    kind: str
    differentiable: bool = True

    def __init__(self, *, bounds: Sequence[float] = (0.0, 1.0)) -> None:
        super().__init__()
        self.bounds = check_bounds(bounds)

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments with which the constructor makes this squeezer; JSON values."""
        return {"bounds": list(self.bounds)}

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Squeeze inputs ``(N, ...)``."""

    def extra_repr(self) -> str:
        """The settings."""
        return ", ".join(f"{name}={value}" for name, value in self.settings.items())


class BitDepth(Squeezer):
    """Rounding to ``2 ** bits`` levels, evenly spaced from bound to bound; its gradient is 0 (section 3.1).

    Args:
        bits: From 1 to 16.
        bounds: Of the inputs.

    Example:
        >>> BitDepth(bits=1)(torch.tensor([[0.2, 0.4, 0.6]]))
        tensor([[0., 0., 1.]])
    """

    kind = "bit_depth"
    differentiable = False

    def __init__(self, *, bits: int, bounds: Sequence[float] = (0.0, 1.0)) -> None:
        super().__init__(bounds=bounds)
        self.bits = check_integer("bits", bits, minimum=1, maximum=16)

    @property
    def settings(self) -> dict[str, Any]:
        """What the constructor was given."""
        return {"bits": self.bits, **super().settings}

    def forward(self, x: Tensor) -> Tensor:
        """Round to the nearest level, halves to the even one."""
        steps = 2**self.bits - 1
        return from_unit((to_unit(x, self.bounds) * steps).round() / steps, self.bounds)


class Median(Squeezer):
    """The median over a square window, within each channel (section 3.2).

    As in the authors' code, ``scipy.ndimage.median_filter(image, size, mode="reflect")``: a window of even size has one
    more row above and one more column to the left of the pixel than below and to the right; beyond the edges the image
    is mirrored, the outermost pixels being repeated; of an even number of values the upper of the two middle ones is
    taken. Gradients go to the pixel that was taken.

    Args:
        size: Side of the window, at least 2.
        bounds: Of the inputs; of no influence.

    Example:
        >>> Median(size=2)(torch.tensor([[[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]]))
        tensor([[[0., 1., 1.],
                 [0., 1., 1.]]])
    """

    kind = "median"

    def __init__(self, *, size: int = 2, bounds: Sequence[float] = (0.0, 1.0)) -> None:
        super().__init__(bounds=bounds)
        self.size = check_integer("size", size, minimum=2)

    @property
    def settings(self) -> dict[str, Any]:
        """What the constructor was given."""
        return {"size": self.size, **super().settings}

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
