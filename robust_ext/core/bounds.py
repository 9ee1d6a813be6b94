"""The bounds of inputs: checked, and inputs in them as numbers in [0, 1] and back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.validation import check_number


def check_bounds(bounds: Sequence[float]) -> tuple[float, float]:
    """Return ``bounds`` as two finite numbers, the lower first."""
    if not isinstance(bounds, (list, tuple)) or len(bounds) != 2:
        raise InvalidArgumentError("bounds", bounds, "a pair (lowest, highest)")
    low, high = (check_number("bounds", value) for value in bounds)
    if low >= high:
        raise InvalidArgumentError("bounds", bounds, "a pair whose first number is below its second")
    return low, high


def to_unit(x: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Inputs in ``bounds`` as numbers in [0, 1]."""
    low, high = bounds
    return x if bounds == (0.0, 1.0) else (x - low) / (high - low)


def from_unit(x: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Numbers in [0, 1] as inputs in ``bounds``."""
    low, high = bounds
    return x if bounds == (0.0, 1.0) else x * (high - low) + low
