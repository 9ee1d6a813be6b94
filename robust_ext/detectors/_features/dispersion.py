"""How far numbers are spread: the measures of ML-LOO (Yang et al. 2020), with gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def quantile(values: Tensor, share: float) -> Tensor:
    """The quantile of a share in [0, 1] along the last dimension, ``(..., n)`` to ``(...)``, linearly interpolated."""
    return _between(values.sort(-1).values, share)


def interquartile_range(values: Tensor) -> Tensor:
    """The quantile of 0.75 minus that of 0.25 along the last dimension, ``(..., n)`` to ``(...)``."""
    ordered = values.sort(-1).values
    return _between(ordered, 0.75) - _between(ordered, 0.25)


def median_absolute_deviation(values: Tensor) -> Tensor:
    """The median distance from the median along the last dimension, ``(..., n)`` to ``(...)``."""
    return quantile((values - quantile(values, 0.5)[..., None]).abs(), 0.5)


def standard_deviation(values: Tensor) -> Tensor:
    """The root mean square distance from the mean along the last dimension, ``(..., n)`` to ``(...)``."""
    return root(values.var(-1, correction=0))


def root(values: Tensor, *, above: float = 0.0) -> Tensor:
    """The square root of values above a limit, and 0 of others, where its gradient is 0 instead of infinity."""
    return torch.where(values > above, torch.where(values > above, values, 1).sqrt(), 0)


MEASURES: dict[str, Callable[[Tensor], Tensor]] = {
    "iqr": interquartile_range,
    "std": standard_deviation,
    "mad": median_absolute_deviation,
}


def _between(ordered: Tensor, share: float) -> Tensor:
    position = share * (ordered.shape[-1] - 1)
    below = int(position)
    above = min(below + 1, ordered.shape[-1] - 1)
    return ordered[..., below].lerp(ordered[..., above], position - below)
