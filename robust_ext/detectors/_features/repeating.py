"""Passes that are repeated on the way back, so that memory stays that of one of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.checkpoint import checkpoint

T = TypeVar("T")


def repeatable(several: bool, function: Callable[..., T], *arguments: Any) -> T:
    """Return a function's output; several such calls are repeated for gradients, with the same draws."""
    found: T = checkpoint(function, *arguments, use_reentrant=False) if several else function(*arguments)
    return found
