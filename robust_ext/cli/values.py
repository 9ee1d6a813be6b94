"""Values on the command line: numbers, pairs, devices."""

from __future__ import annotations

import torch

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.validation import check_integer


def number(argument: str, text: str) -> float:
    """A number, or a fraction such as ``8/255``."""
    parts = text.split("/")
    try:
        values = [float(part) for part in parts]
    except ValueError as error:
        raise InvalidArgumentError(argument, repr(text), "a number or a fraction such as 8/255") from error
    if len(values) > 2 or (len(values) == 2 and values[1] == 0):
        raise InvalidArgumentError(argument, repr(text), "a number or a fraction such as 8/255")
    return values[0] if len(values) == 1 else values[0] / values[1]


def pair(argument: str, text: str) -> tuple[float, float]:
    """Two numbers separated by a comma."""
    parts = text.split(",")
    if len(parts) != 2:
        raise InvalidArgumentError(argument, repr(text), "two numbers, as in 0,1")
    return number(argument, parts[0]), number(argument, parts[1])


def size(argument: str, text: str) -> int | str:
    """``auto`` or an integer."""
    if text == "auto":
        return text
    try:
        return check_integer(argument, int(text), minimum=1)
    except ValueError as error:
        raise InvalidArgumentError(argument, repr(text), "auto or an integer of at least 1") from error


def share(argument: str, text: str) -> tuple[int, int]:
    """``K/N``, process K of N."""
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts) or not 0 <= int(parts[0]) < int(parts[1]):
        raise InvalidArgumentError(argument, repr(text), "K/N with K from 0 to N - 1")
    return int(parts[0]), int(parts[1])


def torch_device(text: str) -> torch.device:
    """A device that this torch can use."""
    try:
        device = torch.device(text)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InvalidArgumentError("--device", repr(text), f"a device this torch can use ({error})") from error
    return device


def without_jobs(arguments: list[str]) -> list[str]:
    """The same command without ``--jobs N`` or ``--jobs=N``."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip or argument == "--jobs":
            skip = not skip
        elif not argument.startswith("--jobs="):
            kept.append(argument)
    return kept
