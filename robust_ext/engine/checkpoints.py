"""How far a search has come after some of its queries: a bounded number of them, evenly spread."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from robust_ext.engine.trace import CURVE, LONGEST_CURVE, finite

T = TypeVar("T")
# Fewest queries of which a last tenth means something.
_LATE = 10
# The queries at the end that Pintor et al. (2022) look at.
_RECENT = 10
_MEANS = ("margin", "distance", "adversarial")


class Checkpoints:
    """Of ``count`` rows, by number of query from 0: best margins until then, movements, and sums for a curve.

    Once there are too many, every other one is dropped, and half as many are kept from then on. ``rows`` is which rows
    are meant, int64 ``(n,)``, or None for all in order.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device, self._stride = count, device, 1
        self._best: dict[int, Tensor] = {}
        self._steps: dict[int, Tensor] = {}
        self._sums: dict[int, dict[str, Any]] = {}  # Numbers, or tensors without dimensions, on the device

    def due(self, number: int) -> bool:
        """Whether the query of this number is kept."""
        return number % self._stride == 0

    def add(self, number: int, rows: Tensor | None, best: Tensor, **values: Tensor) -> None:
        """Keep the best margins ``(n,)`` after a query, and its ``margin``, ``distance`` and ``adversarial``."""
        self._put(self._best, number, rows, best)
        sums = self._sums.setdefault(number, dict.fromkeys((*_MEANS, "rows", "gradient", "gradients"), 0))
        for name in _MEANS:
            sums[name] = sums[name] + values[name].sum()
        sums["rows"] += len(best)
        if len(self._sums) > LONGEST_CURVE:
            self._stride *= 2
            self._best, self._steps = self._thinned(self._best), self._thinned(self._steps)
            self._sums = self._thinned(self._sums)

    def add_gradient(self, number: int, sizes: Tensor) -> None:
        """Keep the sizes ``(n,)`` of the gradients of a query."""
        if number in self._sums:
            sums = self._sums[number]
            sums["gradient"] = sums["gradient"] + sizes.sum()
            sums["gradients"] += len(sizes)

    def add_step(self, number: int, rows: Tensor | None, moved: Tensor) -> None:
        """Keep how far rows moved to a query."""
        self._put(self._steps, number, rows, moved)

    def late(self, queries: Tensor, best: Tensor) -> Tensor:
        """What the best margins ``(N,)`` gained in the last tenth of ``queries`` ``(N,)``; NaN where these are few."""
        return self._gained(best, since=torch.where(queries >= _LATE, 0.9 * queries, 0.0))

    def recent(self, queries: Tensor, best: Tensor) -> Tensor:
        """What they gained in the last ten queries, in all where there are no more."""
        return self._gained(best, since=(queries - _RECENT).clamp_min(1.0))

    def _gained(self, best: Tensor, *, since: Tensor) -> Tensor:
        """What the best margins gained since so many queries, or since the last checkpoint before; NaN without one."""
        gained = torch.full_like(best, torch.nan)
        for number in sorted(self._best):
            earlier = self._best[number].double().cpu()
            gained = torch.where((number + 1 <= since) & torch.isfinite(earlier), best - earlier, gained)
        return gained

    def median_step(self) -> Tensor:
        """The median movement of each row, float64 ``(N,)``; NaN where none is known."""
        nothing = torch.full((self._count,), torch.nan, dtype=torch.float64)
        return torch.stack([values.double().cpu() for values in self._steps.values()] or [nothing]).nanmedian(0).values

    def curve(self) -> list[dict[str, float | None]]:
        """Means over rows, as :class:`~robust_ext.engine.trace.Trace` has them."""
        return [_point(number, self._sums[number]) for number in sorted(self._sums)]

    def _put(self, kept: dict[int, Tensor], number: int, rows: Tensor | None, values: Tensor) -> None:
        new = torch.full((self._count,), torch.nan, device=self._device)
        put(kept.setdefault(number, new), rows, values)

    def _thinned(self, kept: dict[int, T]) -> dict[int, T]:
        return {number: values for number, values in kept.items() if self.due(number)}


def put(values: Tensor, rows: Tensor | None, new: Tensor) -> None:
    """Set the values of some rows."""
    if rows is None:
        values.copy_(new)
    else:
        values[rows] = new.to(values)


def _point(number: int, sums: dict[str, Any]) -> dict[str, float | None]:
    found: dict[str, float | None] = {name: float(sums[name]) / sums["rows"] for name in _MEANS}
    found["gradient"] = float(sums["gradient"]) / sums["gradients"] if sums["gradients"] else None
    return {name: number if name == "query" else finite(found[name]) for name in CURVE}
