"""Squeezers: transforms of images that leave out detail a classifier does not need.

Xu, Evans, Qi, "Feature Squeezing: Detecting Adversarial Examples in Deep Neural Networks" (2018), section 3.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError, MissingDependencyError
from robust_ext.core.modules import SettingsModule, module_class
from robust_ext.core.settings import setting
from robust_ext.core.validation import check_bounds, check_integer, from_unit, to_unit
from robust_ext.detectors.observation import repeatable


@module_class
class Squeezer(SettingsModule, ABC):
    """A transform of inputs ``(N, ...)`` to squeezed ones of the same shape.

    Attributes:
        kind: Its name in lists of squeezers.
        differentiable: Whether its gradient is of use.
    """

    kind: ClassVar[str]
    differentiable = True

    bounds: tuple[float, float] = setting(default=(0.0, 1.0), help="Bounds of the inputs.", check=check_bounds)

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

    bits: int = setting(help="Bits that are kept of each value.", minimum=1, maximum=16)

    def forward(self, x: Tensor) -> Tensor:
        """Round to the nearest level, halves to the even one."""
        steps = 2**self.bits - 1
        return from_unit((to_unit(x, self.bounds) * steps).round() / steps, self.bounds)


@module_class
class Median(Squeezer):
    """The median over a square window, within each channel (section 3.2); bounds have no influence.

    As in the authors' code, ``scipy.ndimage.median_filter(image, size, mode="reflect")``: a window of even size has one
    more row above and one more column to the left of the pixel, and takes the upper of the two middle values; beyond
    the edges the image is mirrored, the outermost pixels being repeated. Gradients go to the pixel that was taken.

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
            expected = "images (N, ..., H, W); for others leave the median filter out"
            raise InvalidArgumentError("inputs", f"shape {tuple(x.shape)}", expected)
        before, wide = self.size // 2, x
        for dimension, length in ((-2, x.shape[-2]), (-1, x.shape[-1])):
            # Positions in a line that is mirrored at both ends, the outermost pixels being repeated, however far.
            positions = torch.arange(-before, length + self.size - 1 - before, device=x.device) % (2 * length)
            wide = wide.index_select(dimension, positions.minimum(2 * length - 1 - positions))
        windows = wide.unfold(-2, self.size, 1).unfold(-2, self.size, 1).flatten(-2)
        middle = self.size**2 // 2
        # The smallest of the upper part is quicker to find than an order of all.
        return windows.topk(self.size**2 - middle, -1).values[..., -1]


# Of Lab colours. Rows: X, Y, Z; columns: red, green, blue (ITU-R BT.709).
_XYZ = ((0.412453, 0.357580, 0.180423), (0.212671, 0.715160, 0.072169), (0.019334, 0.119193, 0.950227))
_WHITE = (0.950456, 1.0, 1.088754)
_LOW, _SLOPE, _SHIFT = 0.008856, 7.787, 16 / 116


def _check_odd(argument: str, value: object) -> int:
    number = check_integer(argument, value, minimum=1)
    if number % 2 == 0:
        raise InvalidArgumentError(argument, number, "an odd integer")
    return number


@module_class
class _Windows(Squeezer):
    """The settings of both kinds."""

    search: int = setting(default=13, help="Side of the search window, odd.", check=partial(_check_odd, "search"))
    patch: int = setting(default=3, help="Side of a patch, odd.", check=partial(_check_odd, "patch"))
    strength: float = setting(default=2.0, help="h: how far patches may differ, in grey levels.", above=0)


@module_class
class NonLocalMeans(_Windows):
    """Non-local means, with gradients (Xu et al. 2018, section 3.2).

    A pixel becomes the mean of those in the search window around it, weighted by ``exp(-d / strength^2)``, where d is
    the mean squared difference of the patches around both, in grey levels (256 from bound to bound). Three channels are
    turned into Lab first, and lightness and colour are averaged apart. It is what :class:`OpenCVNonLocalMeans` does,
    but for OpenCV's rounding to 8 bits.
    """

    kind = "non_local_means"

    def forward(self, x: Tensor) -> Tensor:
        """Filter images ``(N, C, H, W)`` of one or three channels, larger than half a search window and a patch."""
        _check_images(x, self.search // 2 + self.patch // 2)
        levels = 255 * to_unit(x, self.bounds)
        if x.shape[1] == 1:
            return from_unit(self._averaged(levels) / 255, self.bounds)
        lab = to_lab(levels)
        averaged = torch.cat([self._averaged(lab[:, :1]), self._averaged(lab[:, 1:])], 1)
        return from_unit(from_lab(averaged) / 255, self.bounds)

    def _averaged(self, levels: Tensor) -> Tensor:
        """Images ``(N, C, H, W)`` in grey levels; all channels make up a patch."""
        margin = self.search // 2 + self.patch // 2
        wide = nn.functional.pad(levels, (margin,) * 4, mode="reflect")
        total, weights = torch.zeros_like(levels), torch.zeros_like(levels[:, :1])
        for row in range(self.search):
            # One row of the search window at a time is kept for the way back.
            added = repeatable(wide.requires_grad, self._row, wide, row)
            total, weights = total + added[0], weights + added[1]
        return total / weights

    def _row(self, wide: Tensor, row: int) -> tuple[Tensor, Tensor]:
        """Weighted sum of the pixels in one row of the search window, and the weights."""
        half, edge = self.search // 2, self.patch // 2
        height, width = (length - 2 * half for length in wide.shape[-2:])
        here = wide[..., half : half + height, half : half + width]
        total, weights = torch.zeros((), device=wide.device), torch.zeros((), device=wide.device)
        for column in range(self.search):
            there = wide[..., row : row + height, column : column + width]
            apart = nn.functional.avg_pool2d((here - there).square().mean(1, keepdim=True), self.patch, 1)
            weight = (-apart / self.strength**2).exp()
            total = total + weight * there[..., edge : height - edge, edge : width - edge]
            weights = weights + weight
        return total, weights


@module_class
class OpenCVNonLocalMeans(_Windows):
    """Non-local means by OpenCV, as the authors of feature squeezing have it; without gradients.

    Images are rounded to 8 bits. Three channels go through ``cv2.fastNlMeansDenoisingColored``, in the order they are
    in, though it takes them for blue, green, red; one channel goes through ``cv2.fastNlMeansDenoising``.
    """

    kind = "opencv_non_local_means"
    differentiable = False

    def forward(self, x: Tensor) -> Tensor:
        """Filter images ``(N, C, H, W)`` of one or three channels, on the CPU."""
        try:
            import cv2
        except ImportError as error:
            raise MissingDependencyError(
                "the squeezer opencv_non_local_means needs OpenCV: pip install opencv-python-headless; "
                "non_local_means does without"
            ) from error
        _check_images(x, 0)
        pixels = (255 * to_unit(x.detach(), self.bounds)).round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu()
        made = torch.empty_like(pixels)
        for row, image in enumerate(pixels.contiguous().numpy()):
            sizes = (self.strength, self.patch, self.search)
            if image.shape[2] == 1:
                done = cv2.fastNlMeansDenoising(image[..., 0], None, *sizes)
            else:
                done = cv2.fastNlMeansDenoisingColored(image, None, self.strength, *sizes)
            made[row] = torch.from_numpy(done).view(image.shape)
        return from_unit(made.permute(0, 3, 1, 2).to(x) / 255, self.bounds)


def _check_images(x: Tensor, margin: int) -> None:
    if x.dim() != 4 or x.shape[1] not in (1, 3) or min(x.shape[2:]) <= margin:
        expected = f"images (N, C, H, W) of one or three channels, with H and W above {margin}"
        more = "for others leave non-local means out, or take a smaller search window"
        raise InvalidArgumentError("inputs", f"shape {tuple(x.shape)}", f"{expected}; {more}")


def to_lab(levels: Tensor) -> Tensor:
    """CIE Lab colours under D65 of linear RGB images ``(N, 3, H, W)`` in [0, 255], blue first.

    They are scaled as OpenCV scales those of 8 bits: lightness is in [0, 255], like a + 128 and b + 128.
    """
    matrix = levels.new_tensor(_XYZ) / levels.new_tensor(_WHITE)[:, None]
    ratio = torch.einsum("ij,njhw->nihw", matrix, levels.flip(1) / 255)
    f = torch.where(ratio > _LOW, ratio.clamp_min(_LOW) ** (1 / 3), _SLOPE * ratio + _SHIFT)
    x, y, z = f.unbind(1)
    return torch.stack([(116 * y - 16) * 2.55, 500 * (x - y) + 128, 200 * (y - z) + 128], 1)


def from_lab(lab: Tensor) -> Tensor:
    """The images of Lab colours, clipped to [0, 255]: the inverse of :func:`to_lab`."""
    lightness, a, b = lab.unbind(1)
    y = (lightness / 2.55 + 16) / 116
    f = torch.stack([y + (a - 128) / 500, y, y - (b - 128) / 200], 1)
    ratio = torch.where(f > _SLOPE * _LOW + _SHIFT, f**3, (f - _SHIFT) / _SLOPE)
    matrix = torch.linalg.inv(lab.new_tensor(_XYZ) / lab.new_tensor(_WHITE)[:, None])
    return (255 * torch.einsum("ij,njhw->nihw", matrix, ratio).flip(1)).clamp(0, 255)
