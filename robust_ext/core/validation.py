"""Checks on entry: each names the argument, its value and the expected one; bounds of inputs among them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.tasks import TOKENS, name_labels

# What evaluations take as inputs and labels.
Array: TypeAlias = Tensor | NDArray[Any]


def check_integer(argument: str, value: object, *, minimum: int, maximum: int | None = None) -> int:
    """Return ``value`` when it is an int in ``[minimum, maximum]`` (bools are refused)."""
    expected = f"an integer of at least {minimum}" + ("" if maximum is None else f" and at most {maximum}")
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise InvalidArgumentError(argument, value, expected)
    try:
        number = int(value.__index__())
    except (TypeError, ValueError, RuntimeError) as error:  # Arrays and tensors of any type have the method.
        raise InvalidArgumentError(argument, value, expected) from error
    if number < minimum or (maximum is not None and number > maximum):
        raise InvalidArgumentError(argument, value, expected)
    return number


def check_number(
    argument: str,
    value: object,
    *,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    open_minimum: bool = False,
    open_maximum: bool = False,
) -> float:
    """Return ``value`` as a float when it is finite and in the interval (open ends as given)."""
    left, right = "(" if open_minimum else "[", ")" if open_maximum else "]"
    expected = f"a finite number in {left}{minimum:g}, {maximum:g}{right}"
    if isinstance(value, (bool, str, complex)) or not hasattr(value, "__float__"):
        raise InvalidArgumentError(argument, value, expected)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidArgumentError(argument, value, expected) from error
    low = number > minimum if open_minimum else number >= minimum
    high = number < maximum if open_maximum else number <= maximum
    if not (math.isfinite(number) and low and high):
        raise InvalidArgumentError(argument, value, expected)
    return number


def check_choice(argument: str, value: object, choices: Collection[str]) -> str:
    """Return ``value`` when it is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgumentError(argument, repr(value), "one of " + ", ".join(map(repr, choices)))
    return value


def check_name(argument: str, value: object) -> str:
    """Return ``value`` when it is a text that is not empty and that files can hold (no lone surrogates)."""
    if not isinstance(value, str) or not value or any("\ud800" <= char <= "\udfff" for char in value):
        raise InvalidArgumentError(argument, ascii(value), "a text of Unicode characters that is not empty")
    return value


def as_tensor(argument: str, values: object, *, expected: str) -> Tensor:
    """Values as a tensor: a tensor itself, a copy of a numpy array or of what numpy makes one of."""
    if isinstance(values, Tensor):
        return values
    if not hasattr(values, "__array__"):
        raise InvalidArgumentError(argument, type(values).__name__, f"a torch.Tensor or numpy array {expected}")
    array = np.array(values, order="C")
    try:
        # Torch supports the machine's own byte order alone.
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    except TypeError as error:
        got = f"a numpy array of dtype {array.dtype}"
        raise InvalidArgumentError(argument, got, f"numbers that torch has a type for, {expected}") from error


def check_inputs(argument: str, inputs: object, *, bounds: tuple[float, float]) -> Tensor:
    """Return a copy of ``inputs`` as a contiguous float32 tensor ``(N, ...)``, finite and in ``bounds``.

    Accept tensors and numpy arrays, and convert floats of other widths. Refuse integers, because a cast would pass
    pixels of 0..255 for inputs in [0, 1]. Clip values that only rounding put outside, as standardising does: those
    beyond a bound by at most 1e-6 of the larger bound, the slack that candidates have.
    """
    inputs = as_tensor(argument, inputs, expected="of shape (N, ...)")
    if not inputs.is_floating_point():
        raise InvalidArgumentError(
            argument, f"dtype {inputs.dtype}", f"a floating point tensor (float32); {_as_floats(inputs)}"
        )
    if inputs.is_meta or inputs.layout != torch.strided:
        shown = "no values (device meta)" if inputs.is_meta else f"layout {inputs.layout}"
        raise InvalidArgumentError(argument, shown, "a dense tensor with values")
    if inputs.dim() < 2:
        raise InvalidArgumentError(argument, f"shape {tuple(inputs.shape)}", "a batch of shape (N, ...)")
    if inputs[:1].numel() == 0 and inputs.shape[0] > 0:
        raise InvalidArgumentError(argument, f"shape {tuple(inputs.shape)}", "samples with at least one value")
    inputs = inputs.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if inputs.numel() == 0:
        return inputs
    low, high = float(inputs.min()), float(inputs.max())  # NaN where any value is
    if not (math.isfinite(low) and math.isfinite(high)):
        raise InvalidArgumentError(argument, "NaN or infinite values", "finite values")
    lowest, highest = bounds
    slack = 1e-6 * max(abs(lowest), abs(highest))
    if low < lowest - slack or high > highest + slack:
        expected = f"values in the threat model's bounds [{lowest:.7g}, {highest:.7g}]"
        raise InvalidArgumentError(argument, f"values in [{low:.7g}, {high:.7g}]", expected)
    if low < lowest or high > highest:
        inputs.clamp_(*bounds)
    return inputs


def check_labels(argument: str, labels: object, *, samples: int, classes: int | None = None) -> Tensor:
    """Return ``labels`` as int64 ``(N,)`` with values in ``[0, classes)``.

    Tensors and numpy arrays are taken alike; of one-hot labels ``(N, K)``, of any type, the place of the 1 counts.
    """
    labels = as_tensor(argument, labels, expected="of shape (N,)")
    dense = labels.layout == torch.strided and not labels.is_meta
    if dense and labels.dim() == 2 and labels.shape[1] > 1 and not labels.is_complex():
        one_hot = ((labels != 0).sum(1) == 1).all() & ((labels == 1).sum(1) == 1).all()
        labels = (labels == 1).int().argmax(1) if one_hot else labels
    task = name_labels(labels) if dense else None
    if task is not None:
        expected = f"class indices of shape ({samples},), or one-hot rows, each with a single 1 beside zeros"
        raise InvalidArgumentError(argument, f"shape {tuple(labels.shape)}", f"{expected}; these are {task}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InvalidArgumentError(argument, f"dtype {labels.dtype}", "integer class labels (int64), labels.long()")
    if labels.is_meta or labels.layout != torch.strided:
        shown = "no values (device meta)" if labels.is_meta else f"layout {labels.layout}"
        raise InvalidArgumentError(argument, shown, "a dense tensor with values")
    if labels.shape != (samples,):
        column = "; give labels.flatten()" if labels.shape == (samples, 1) else ""
        expected = f"shape ({samples},), one label an input{column}"
        raise InvalidArgumentError(argument, f"shape {tuple(labels.shape)}", expected)
    labels = labels.detach().to(torch.int64)
    if samples:
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or (classes is not None and high >= classes):
            top = "" if classes is None else f" and below the number of classes, {classes}"
            if low >= 1 and high == classes:
                top += "; if they are counted from 1, give labels - 1"
            raise InvalidArgumentError(argument, f"labels in {low}..{high}", f"labels of at least 0{top}")
    return labels


def _as_floats(inputs: Tensor) -> str:
    """Return the advice for inputs of another type."""
    if inputs.is_complex():
        return "give real and imaginary parts as values of their own, torch.view_as_real(inputs)"
    if inputs.dtype == torch.uint8 or inputs.dim() > 2:
        return "divide pixels of 0..255 by 255"
    known = inputs.numel() > 0 and not inputs.is_meta and inputs.layout == torch.strided
    pixels = known and int(inputs.min()) >= 0 and int(inputs.max()) <= 255
    return TOKENS + ("; pixels of 0..255 are divided by 255" if pixels else "")


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
