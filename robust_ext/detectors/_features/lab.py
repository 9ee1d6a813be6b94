"""The CIE Lab colours of linear RGB images under D65, scaled as OpenCV scales those of 8-bit images."""

from __future__ import annotations

import torch
from torch import Tensor

# Rows: X, Y, Z; columns: red, green, blue (ITU-R BT.709).
_XYZ = (
    (0.412453, 0.357580, 0.180423),
    (0.212671, 0.715160, 0.072169),
    (0.019334, 0.119193, 0.950227),
)
_WHITE = (0.950456, 1.0, 1.088754)
_LOW, _SLOPE, _SHIFT = 0.008856, 7.787, 16 / 116


def to_lab(levels: Tensor) -> Tensor:
    """Lab colours of images in [0, 255], blue first.

    Args:
        levels: ``(N, 3, H, W)``: blue, green, red.

    Returns:
        ``(N, 3, H, W)``: lightness in [0, 255], a + 128 and b + 128.
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
