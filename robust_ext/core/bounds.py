"""The bounds of inputs: checked, and inputs in them as numbers in [0, 1] and back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.validation import check_number

LARGEST = 1e9
"""Largest size of a bound, and its inverse the smallest distance between two."""


def check_bounds(bounds: Sequence[float]) -> tuple[float, float]:
    """Return ``bounds`` as two finite numbers, the lower first, that float32 can tell apart and square."""
    if not isinstance(bounds, (list, tuple)) or len(bounds) != 2:
        raise InvalidArgumentError("bounds", bounds, "a pair (lowest, highest)")
    low, high = (check_number("bounds", value, minimum=-LARGEST, maximum=LARGEST) for value in bounds)
    if low >= high:
        raise InvalidArgumentError("bounds", bounds, "a pair whose first number is below its second")
    if high - low < max(1e-6 * max(abs(low), abs(high)), 1 / LARGEST):
        expected = (
            f"a pair that lies {1 / LARGEST:g} apart, and a millionth of the larger, for float32 to tell them apart"
        )
        raise InvalidArgumentError("bounds", bounds, expected)
    return low, high


def to_unit(x: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Inputs in ``bounds`` as numbers in [0, 1]."""
    low, high = bounds
    return x if bounds == (0.0, 1.0) else (x - low) / (high - low)


def from_unit(x: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Numbers in [0, 1] as inputs in ``bounds``."""
    low, high = bounds
    return x if bounds == (0.0, 1.0) else x * (high - low) + low
