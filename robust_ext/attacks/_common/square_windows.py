"""Proposals of the Square attack: a first point, and points that differ from another in a square window.

Source: Andriushchenko et al., "Square Attack: a query-efficient black-box adversarial attack via random search" (2020),
section 3: algorithm 2 (linf), equation 2 and algorithm 3 (l2). The l1 form is that of Croce and Hein, "Mind the box:
l1-APGD for sparse adversarial attacks on image classifiers" (2021), as in their published code. Every choice is made
by a number that is uniform in [0, 1), so that what draws them decides what they depend on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cache

import torch
from torch import Tensor

from robust_ext.attacks._common.rows import project
from robust_ext.core.threat import ThreatModel

# Tiles along the shorter side of the first point in l2 and l1.
_TILES = 5


class Windows(ABC):
    """Points to try around images, float32 ``(N, C, H, W)``; of series ``(N, C, 1, W)``, windows are intervals."""

    first_numbers: int  # How many numbers a row needs for its first point,
    numbers: int  # and for each other point.

    def __init__(self, inputs: Tensor, threat_model: ThreatModel) -> None:
        self.inputs, self.epsilon, self.bounds = inputs, threat_model.epsilon, threat_model.bounds
        self._threat_model = threat_model
        self.channels, self.height, self.width = inputs.shape[1:]

    def side(self, share: float) -> int:
        """Side of a window of this share of the pixels, at least 1 and no larger than the image."""
        if self.height == 1:
            return min(max(self._rounded(share * self.width), 1), self.width)
        return min(max(self._rounded(math.sqrt(share * self.height * self.width)), 1), self.height, self.width)

    def _tall(self, side: int) -> int:
        """Height of a window: its side, in images."""
        return min(side, self.height)

    def _rounded(self, side: float) -> int:
        return round(side)

    @abstractmethod
    def first(self, uniform: Tensor) -> Tensor:
        """First points ``(N, C, H, W)`` from numbers ``(N, first_numbers)``."""

    @abstractmethod
    def change(self, points: Tensor, side: int, uniform: Tensor) -> Tensor:
        """Points ``(N, C, H, W)`` that differ from ``points`` in windows of this side; numbers ``(N, numbers)``."""

    def _corner(self, uniform: Tensor, side: int) -> tuple[Tensor, Tensor]:
        """First row and first column of a window ``(N,)`` each, from numbers ``(N, 2)``."""
        room = torch.tensor([self.height - self._tall(side) + 1, self.width - side + 1])
        top, left = (uniform * room).long().to(self.inputs.device).unbind(1)
        return top, left

    def _inside(self, top: Tensor, left: Tensor, side: int) -> Tensor:
        """Return a mask of the pixels inside the windows, bool ``(N, 1, H, W)``."""
        rows = torch.arange(self.height, device=top.device) - top[:, None]
        columns = torch.arange(self.width, device=top.device) - left[:, None]
        rows_in, columns_in = (rows >= 0) & (rows < self._tall(side)), (columns >= 0) & (columns < side)
        return (rows_in[:, :, None] & columns_in[:, None, :])[:, None]

    def _signs(self, uniform: Tensor) -> Tensor:
        """-1 or 1 for each number."""
        signs = torch.where(uniform < 0.5, -1.0, 1.0)
        return signs.to(self.inputs)


class LinfWindows(Windows):
    """Every value is moved by epsilon up or down: first by columns, then by windows of one sign a channel."""

    def __init__(self, inputs: Tensor, threat_model: ThreatModel) -> None:
        super().__init__(inputs, threat_model)
        # One sign for each column of each channel; then a place, and one sign a channel.
        self.first_numbers, self.numbers = self.channels * self.width, 2 + self.channels

    def first(self, uniform: Tensor) -> Tensor:
        """Vertical stripes."""
        signs = self._signs(uniform).view(-1, self.channels, 1, self.width)
        return (self.inputs + self.epsilon * signs).clamp(*self.bounds)

    def change(self, points: Tensor, side: int, uniform: Tensor) -> Tensor:
        """One window of the same sign, a channel; all signs are turned where nothing would change."""
        inside = self._inside(*self._corner(uniform[:, :2], side), side)
        offsets = self.epsilon * self._signs(uniform[:, 2:])[:, :, None, None]
        changed = torch.where(inside, (self.inputs + offsets).clamp(*self.bounds), points)
        turned = torch.where(inside, (self.inputs - offsets).clamp(*self.bounds), points)
        idle = (changed == points).flatten(1).all(1)
        return torch.where(idle[:, None, None, None], turned, changed)


class L2Windows(Windows):
    """A perturbation of norm epsilon, first tiles, then moved from one window to another, where it gains a pattern."""

    _order = 2

    def __init__(self, inputs: Tensor, threat_model: ThreatModel) -> None:
        super().__init__(inputs, threat_model)
        shorter = self.width if self.height == 1 else min(self.height, self.width)
        tile = max(shorter // _TILES, 1)
        self._tiling = tile, self.height // self._tall(tile), self.width // tile
        # For each tile, one sign a channel, and whether its pattern lies on its side; then two places, and the same.
        self.first_numbers = (self.channels + 1) * self._tiling[1] * self._tiling[2]
        self.numbers = 5 + self.channels
        self._gain = 1  # How many times too large a new window is.

    def _rounded(self, side: float) -> int:
        """Odd, so that a peak has a middle, and at least 3, as in the paper's code."""
        return max(round(side) // 2 * 2 + 1, 3)

    def first(self, uniform: Tensor) -> Tensor:
        """Tiles of the pattern with random signs, in the middle of the image."""
        tile, down, across = self._tiling
        drawn = uniform.view(-1, self.channels + 1, down, across)
        patterns = self._patterns(drawn[:, :1], tile) * self._signs(drawn[:, 1:])[..., None, None]
        tall = self._tall(tile)
        tiled = patterns.transpose(3, 4).reshape(-1, self.channels, down * tall, across * tile)
        top, left = (self.height - down * tall) // 2, (self.width - across * tile) // 2
        offsets = torch.zeros_like(self.inputs)
        offsets[:, :, top : top + down * tall, left : left + across * tile] = tiled
        return self._place(offsets * (self._gain * self.epsilon / self._length(offsets)))

    def change(self, points: Tensor, side: int, uniform: Tensor) -> Tensor:
        """Empty one window into another, together with what clipping left unused of epsilon (algorithm 3)."""
        top, left = self._corner(uniform[:, :2], side)
        gains, emptied = self._inside(top, left, side), self._inside(*self._corner(uniform[:, 2:4], side), side)
        offsets = points - self.inputs
        powers = offsets.abs() ** self._order
        unused = (self.epsilon**self._order - powers.sum((1, 2, 3))).clamp_min_(0)[:, None]
        available = ((powers * (gains | emptied)).sum((2, 3)) + unused / self.channels) ** (1 / self._order)
        where = self._index(top, left, side)
        old = offsets[where]
        gained = self._patterns(uniform[:, 4:5], side) * self._signs(uniform[:, 5:])[:, :, None, None]
        offsets = offsets.masked_fill_(emptied, 0)
        offsets[where] = self._normalised(gained + self._normalised(old)) * self._gain * available[:, :, None, None]
        return self._place(offsets)

    def _place(self, offsets: Tensor) -> Tensor:
        # Rounding would add up over many changes: what lies over epsilon is never taken away again by them.
        shrunk = offsets * (self.epsilon / self._length(offsets).clamp_min(self.epsilon))
        return (self.inputs + shrunk).clamp_(*self.bounds)

    def _length(self, offsets: Tensor) -> Tensor:
        """Norm of each row, ``(N, 1, 1, 1)``."""
        length: Tensor = torch.linalg.vector_norm(offsets, ord=self._order, dim=(1, 2, 3), keepdim=True)
        return length

    def _normalised(self, windows: Tensor) -> Tensor:
        """Each channel of each row divided by its norm; zeros stay."""
        length: Tensor = windows.abs().pow(self._order).sum((2, 3), keepdim=True) ** (1 / self._order)
        return windows / length.clamp_min_(torch.finfo(windows.dtype).tiny)

    def _patterns(self, uniform: Tensor, side: int) -> Tensor:
        """The pattern ``(*uniform.shape, side, side)``, on its side where the number is below a half.

        In series it is ``(*uniform.shape, 1, side)``, and turned round.
        """
        series = self.height == 1
        upright = pattern(side, order=self._order, series=series).to(self.inputs)
        lies = (uniform < 0.5).to(self.inputs.device)[..., None, None]
        return torch.where(lies, upright.flip(1) if series else upright.T, upright)

    def _index(self, top: Tensor, left: Tensor, side: int) -> tuple[Tensor, ...]:
        """Index of the windows ``(N, C, side, side)``."""
        down, steps = (torch.arange(size, device=top.device) for size in (self._tall(side), side))
        rows = torch.arange(len(top), device=top.device)
        channels = torch.arange(self.channels, device=top.device)
        return (
            rows[:, None, None, None],
            channels[:, None, None],
            (top[:, None] + down)[:, None, :, None],
            (left[:, None] + steps)[:, None, None, :],
        )


class L1Windows(L2Windows):
    """Windows as in l2, with sums of sizes, a sharper pattern, and a joint projection onto ball and bounds.

    The new window is as much too large as there are channels, which the projection takes from the smallest values, so
    that perturbations become sparse.
    """

    _order = 1

    def __init__(self, inputs: Tensor, threat_model: ThreatModel) -> None:
        super().__init__(inputs, threat_model)
        self._gain = self.channels

    def _place(self, offsets: Tensor) -> Tensor:
        return project(self.inputs + offsets, self.inputs, self._threat_model)


@cache
def pattern(side: int, *, order: int = 2, series: bool = False) -> Tensor:
    """The pattern of equation 2, float32 ``(side, side)``, not to be changed; of norm 1, of order 1 or 2.

    Its middle column, as a row ``(1, side)``, is that of series.

    It has two halves of opposite sign, the upper one positive, each with a peak in its middle. For order 1 the peaks
    are sharper, with fourth powers for squares.
    """
    half = side // 2
    power = {1: 4, 2: 2}[order]
    width = 1 if series else side
    both = torch.cat([_peak(half, width, power), -_peak(side - half, width, power)])
    both = both.T if series else both
    unit: Tensor = both / torch.linalg.vector_norm(both, ord=order)
    return unit.float()


def _peak(height: int, width: int, power: int) -> Tensor:
    """At distance d from the middle (in the larger coordinate), the sum of ``1 / (k + 1)^power`` from k = d on."""
    farthest = max(height, width) // 2
    terms = torch.arange(1, farthest + 2, dtype=torch.float64).pow(-power)
    sums = terms.flip(0).cumsum(0).flip(0)
    rows = (torch.arange(height) - height // 2).abs()
    columns = (torch.arange(width) - width // 2).abs()
    peak: Tensor = sums[torch.maximum(rows[:, None], columns[None, :])]
    return peak
