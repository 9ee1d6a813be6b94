"""What counts as a unit of a layer."""

from __future__ import annotations

from torch import Tensor


def units_of(output: Tensor, *, pool: bool) -> Tensor:
    """The units of a layer's output.

    Args:
        output: ``(N, C, ...)``.
        pool: Whether a channel is one unit, its mean over all positions. Without, each value is one.

    Returns:
        ``(N, C)`` when pooled, ``(N, values)`` otherwise.

    Example:
        >>> import torch
        >>> units_of(torch.ones(2, 3, 4, 4), pool=True).shape, units_of(torch.ones(2, 3, 4, 4), pool=False).shape
        (torch.Size([2, 3]), torch.Size([2, 48]))
    """
    if pool and output.dim() > 2:
        return output.mean(tuple(range(2, output.dim())))
    return output.flatten(1)
