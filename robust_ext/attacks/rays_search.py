"""Where RayS stands on each row of a batch: the point to ask about next, and what follows from the answer."""

from __future__ import annotations

import torch
from torch import Tensor


class RaySearch:
    """The searches of a batch, each row at a place of its own.

    A row asks whether the best ray with a block of signs turned is misclassified at the best distance (a check), and
    after each check that is, where on that ray the boundary lies (a binary search). Blocks follow algorithm 3 of Chen
    and Gu (2020): the vector is cut into 1, 2, 4, ... parts, the last cut into single values being repeated.

    Args:
        inputs: float32 ``(N, D)``.
        bounds: Lowest and highest valid value.
        tolerance: Euclidean length, for bounds one apart, at which a binary search ends.

    Attributes:
        open: Rows that are not finished, bool ``(N,)``.
        found: Rows with a misclassified point, bool ``(N,)``.
        radius: How far on the best ray it is, float64 ``(N,)``; the width of the bounds where there is none.
    """

    def __init__(self, inputs: Tensor, *, bounds: tuple[float, float], tolerance: float) -> None:
        rows, values = inputs.shape
        width = bounds[1] - bounds[0]
        self._inputs, self._bounds, self._values = inputs, bounds, values
        # Halving intervals that float32 cannot tell apart would ask about the same point again and again.
        resolution = torch.finfo(inputs.dtype).eps * max(abs(bounds[0]), abs(bounds[1]))
        self._tolerance = max(tolerance * width / max(values, 1) ** 0.5, resolution)
        self._columns = torch.arange(values, device=inputs.device)
        self._last_level = max(values - 1, 0).bit_length()
        self._signs = torch.ones_like(inputs)
        self.found, self.open = inputs.new_zeros(rows, dtype=torch.bool), inputs.new_ones(rows, dtype=torch.bool)
        self.radius = inputs.new_full((rows,), width, dtype=torch.float64)
        # The first question is the input itself, the second the ray with no sign turned.
        self._asks_input = self.open.clone()
        self._searching = torch.zeros_like(self.found)
        self._clear = inputs.new_zeros(rows, dtype=torch.float64)
        self._level, self._block, self._start, self._end = inputs.new_zeros(4, rows, dtype=torch.int64)
        self._changed, self._single = torch.zeros_like(self.found), torch.zeros_like(self.found)

    def points(self) -> Tensor:
        """The points to ask about, ``(N, D)``; of a finished row the best one."""
        asked = self._asked_radius().where(self.open, self.radius * self.found)
        turned = self._turned() & self.open[:, None]
        return self._on_ray(torch.where(turned, -self._signs, self._signs), asked)

    def best(self) -> Tensor:
        """The nearest misclassified points on the best rays, ``(N, D)``; on the farthest of all where none is known."""
        return self._on_ray(self._signs, self.radius)

    def close(self, rows: Tensor) -> None:
        """Finish some rows, bool ``(N,)``."""
        self.open = self.open & ~rows

    def update(self, wrong: Tensor) -> None:
        """Take in whether the points of open rows were misclassified, bool ``(N,)``, and choose the next ones."""
        hit, miss = wrong & self.open, ~wrong & self.open
        solved = hit & self._asks_input
        self.radius = torch.where(solved, 0.0, self.radius)
        self.found = self.found | solved
        self.close(solved)
        asked = self._asked_radius()
        first = self._asks_input & miss
        # A ray is taken over where it has a nearer point than the best one, or the first point of all.
        better = hit & ~solved & (self._searching | ~self.found)
        self._signs = torch.where(self._turned() & better[:, None], -self._signs, self._signs)
        self._start, self._end = self._start.where(~better, 0), self._end.where(~better, 0)
        self.radius = torch.where(better, asked, self.radius)
        self.found, self._changed = self.found | better, self._changed | better
        self._clear = torch.where(self._searching, torch.where(miss, asked, self._clear), 0.0)
        wide = self.radius - self._clear > self._tolerance
        self._searching = self.open & (hit | self._searching) & wide
        self._asks_input = torch.zeros_like(first)
        self._advance(self.open & ~self._searching & ~first)

    def _advance(self, rows: Tensor) -> None:
        """Give rows their next block; finish those whose last pass over single values changed nothing."""
        begins = rows & (self._block == 0)
        self.close(begins & self._single & ~self._changed)
        self._changed = self._changed & ~begins
        self._single = torch.where(begins, self._level == self._last_level, self._single)
        size = (torch.full_like(self._level, self._values - 1) >> self._level) + 1
        start = self._block * size
        end = (start + size).clamp_max(self._values)
        self._start, self._end = torch.where(rows, start, self._start), torch.where(rows, end, self._end)
        passed = end == self._values
        following = torch.where(passed, self._level + 1, self._level).clamp_max(self._last_level)
        self._level = torch.where(rows, following, self._level)
        self._block = torch.where(rows, torch.where(passed, 0, self._block + 1), self._block)

    def _asked_radius(self) -> Tensor:
        """How far on their rays the points to ask about lie, ``(N,)``."""
        asked = torch.where(self._searching, (self._clear + self.radius) / 2, self.radius)
        return asked.where(~self._asks_input, 0.0)

    def _turned(self) -> Tensor:
        """Which signs the rays that are asked about have turned, bool ``(N, D)``."""
        turned: Tensor = (self._columns >= self._start[:, None]) & (self._columns < self._end[:, None])
        return turned

    def _on_ray(self, signs: Tensor, radius: Tensor) -> Tensor:
        points: Tensor = self._inputs + radius.to(signs.dtype)[:, None] * signs
        return points.clamp(*self._bounds)
