"""The points that a purifier goes through, as far as they are seen in what its networks get."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.reached import outermost_calls

SEEN = 10
"""Points that are kept, evenly spaced among all: each takes a gradient of its own."""
# Inputs of a network that are farther from the images than this, relative to their length, are something else.
_FAR = 0.5
# Gradients that differ by more than this, relative to their length, went through more than a sum.
_CHANGED = 0.5


class _Seen:
    """Inputs of networks that may be points of a purifier which was given ``x`` ``(N, ...)``."""

    def __init__(self, x: Tensor) -> None:
        self._x = x.detach()
        self._followed: list[Tensor] = []
        self._others: list[Tensor] = []
        self._differentiated = False

    def note(self, _share: float, value: Tensor) -> Tensor:
        """Keep an input where it may be such a point; returns it as it is."""
        if value.shape == self._x.shape and value.dtype == self._x.dtype:
            point = value.detach()
            self._differentiated |= value.requires_grad
            near = bool((point - self._x).norm() <= _FAR * self._x.norm())
            kept = self._followed if value.requires_grad else self._others
            # Not one that was computed from a point, such as another view of it.
            if near and not (kept and torch.equal(kept[-1], point)) and _is_point(value):
                kept.append(point.clone())
        return value

    def points(self) -> list[Tensor]:
        """Those that gradients were taken at, where there are any; else all inputs, evenly thinned out."""
        return evenly(self._followed if self._differentiated else self._others, SEEN, at_most=True)


@contextmanager
def seen_points(networks: Mapping[str, nn.Module], x: Tensor) -> Iterator[_Seen]:
    """Watch what networks get while a purifier runs on ``x`` ``(N, ...)`` inside."""
    seen = _Seen(x)
    with outermost_calls(networks, dict.fromkeys(networks, seen.note)):
        yield seen


def evenly(points: Sequence[Tensor], count: int, *, at_most: bool = False) -> list[Tensor]:
    """``count`` of some points, evenly spaced, the first and the last among them; some repeated where there are fewer.

    With ``at_most`` none is repeated.
    """
    if len(points) <= count and at_most:
        return list(points)
    return [points[round(place * (len(points) - 1) / (count - 1))] for place in range(count)]


def _is_point(value: Tensor) -> bool:
    """Whether gradients go from a value to a leaf of its shape unchanged: the leaf moves it, and does nothing else."""
    if not value.requires_grad or value.is_leaf:
        return True
    leaves = [leaf for leaf in _leaves(value) if leaf.shape == value.shape]
    if not leaves:
        return False
    tried = torch.linspace(-1, 1, value.numel(), dtype=value.dtype, device=value.device).view(value.shape)
    found = torch.autograd.grad(value, leaves, tried, retain_graph=True, allow_unused=True)
    return any(one is not None and bool((one - tried).norm() <= _CHANGED * tried.norm()) for one in found)


def _leaves(value: Tensor) -> list[Tensor]:
    waiting: list[Any] = [value.grad_fn]
    seen, found = set[Any](), list[Tensor]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [inner for inner, _ in node.next_functions]
    return found
