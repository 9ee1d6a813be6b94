"""Inputs with some values blanked, one square at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def squares_of(x: Tensor, *, stride: int) -> Tensor:
    """Where the squares of an input begin, each within one channel.

    Args:
        x: Inputs ``(N, ...)``. The last two dimensions are rows and columns, and what leads them channels; vectors are
            one row.
        stride: Values from one square to the next.

    Returns:
        Channel, row and column, int64 ``(P, 3)``.

    Example:
        >>> squares_of(torch.zeros(1, 1, 3, 4), stride=2).tolist()
        [[0, 0, 0], [0, 0, 2], [0, 2, 0], [0, 2, 2]]
    """
    channels, rows, columns = _image_shape(x)
    starts = (torch.arange(channels), torch.arange(0, rows, stride), torch.arange(0, columns, stride))
    return torch.cartesian_prod(*starts).to(x.device)


def blanked(x: Tensor, squares: Tensor, *, patch: int, fill: float) -> Tensor:
    """Each input with each square blanked.

    Args:
        x: Inputs ``(N, ...)``.
        squares: From :func:`squares_of`, ``(P, 3)``.
        patch: Side of a square; what lies beyond the edges is cut off.
        fill: What its values become.

    Returns:
        ``(N * P, ...)``: all squares of the first input, then all of the second, and so on.
    """
    shape = _image_shape(x)
    inside = torch.ones(len(squares), *shape, dtype=torch.bool, device=x.device)
    for dimension, (length, side) in enumerate(zip(shape, (1, patch, patch), strict=True)):
        index = torch.arange(length, device=x.device)
        first = squares[:, dimension, None]
        view = [-1, 1, 1, 1]
        view[dimension + 1] = length
        inside &= ((index >= first) & (index < first + side)).view(view)
    return torch.where(inside.view(1, -1, *x.shape[1:]), fill, x[:, None]).flatten(0, 1)


def _image_shape(x: Tensor) -> tuple[int, int, int]:
    """Channels, rows and columns of one input."""
    shape = (1, 1, *x.shape[1:])
    return math.prod(shape[:-2]), shape[-2], shape[-1]
