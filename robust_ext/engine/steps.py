"""The steps of an attack between queries with gradients, and checkpoints of its best margins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from robust_ext.core.threat import ThreatModel
from robust_ext.engine.trace import CURVE, LONGEST_CURVE, finite

T = TypeVar("T")
# Fewest queries of which a last tenth means something.
_LATE = 10
# The queries at the end that Pintor et al. (2022) look at.
_RECENT = 10
_MEANS = ("margin", "distance", "adversarial")


class Checkpoints:
    """Checkpoints of ``count`` rows, by number of query from 0: best margins so far, movements, and sums for a curve.

    Once there are too many, every other one is dropped, and half as many are kept from then on. ``rows`` is which rows
    are meant, int64 ``(n,)``, or None for all in order.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device, self._stride = count, device, 1
        self._best: dict[int, Tensor] = {}
        self._steps: dict[int, Tensor] = {}
        self._sums: dict[int, dict[str, Any]] = {}  # Numbers, or tensors without dimensions, on the device

    def due(self, number: int) -> bool:
        """Return whether the query of this number is kept."""
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
        """Return the gain of best margins ``(N,)`` in the last tenth of ``queries`` ``(N,)``; NaN for few queries."""
        return self._gained(best, since=torch.where(queries >= _LATE, 0.9 * queries, 0.0))

    def recent(self, queries: Tensor, best: Tensor) -> Tensor:
        """Return the gain in the last ten queries, or in all of fewer."""
        return self._gained(best, since=(queries - _RECENT).clamp_min(1.0))

    def _gained(self, best: Tensor, *, since: Tensor) -> Tensor:
        """Return the gain of best margins in the last queries, or since the last checkpoint before; NaN without one."""
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
        points = []
        for number, sums in sorted(self._sums.items()):
            found: dict[str, float | None] = {name: float(sums[name]) / sums["rows"] for name in _MEANS}
            found["gradient"] = float(sums["gradient"]) / sums["gradients"] if sums["gradients"] else None
            points.append({name: number if name == "query" else finite(found[name]) for name in CURVE})
        return points

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


# Parts of a gradient below this one, relative to its largest, may move a value by less than it is rounded to.
_COUNTS = 1e-3
# From here on, in epsilons, the ball may hold a value back; and the nearest that this is.
_EDGE, _LEAST = 0.99, 0.5
_FIRST, _EVERY = 4, 7
# Times that a value has to have been free to move, over all rows and steps, for its staying to mean anything.
_CHANCES = 4


@dataclass(eq=False)
class Query:
    """One forward pass whose gradients are still to come."""

    rows: Tensor | None = None  # Which rows, int64; None for all in order
    points: Tensor | None = None  # (n, D); None where no gradient is to come
    number: int = 0  # How many came before, of these rows
    graph: bool = False  # Whether a gradient at its input was wanted
    direction: Tensor | None = None  # Its gradient (n, D), scaled to a largest magnitude of 1
    sense: Tensor | None = None  # (n,): 1 where more of the loss is less of the label's logit, -1 where it is more


def sampled(number: int) -> bool:
    """Return whether a query or step of this number is looked at closely: the first ones, then one of seven."""
    return number < _FIRST or number % _EVERY == 0


class Steps:
    """Sums over the steps of each row, from inputs ``(N, D)``."""

    def __init__(self, clean: Tensor, threat_model: ThreatModel) -> None:
        self._clean, self._threat_model = clean, threat_model
        names = ("pairs", "turned", "way", "along", "beside", "held", "free", "moves", "returned")
        self._sums = {name: torch.zeros(len(clean), dtype=torch.float64, device=clean.device) for name in names}
        values = clean.shape[1]
        # Of each value, whether it moved in any row, and how often it might have.
        self._stirred = torch.zeros(values, dtype=torch.bool, device=clean.device)
        self._chances = torch.zeros(values, dtype=torch.float64, device=clean.device)
        self._before: Query | None = None
        self._count = 0
        self._moved: tuple[Tensor | None, Tensor] | None = None  # Rows and the step before
        epsilon, cell = threat_model.epsilon, threat_model.width / 255
        # On the grid of 8 bits values end up to a cell before the edge.
        self._edge = min(_EDGE * epsilon, max(epsilon - cell, _LEAST * epsilon))

    def add(self, query: Query) -> Tensor | None:
        """Count the step that led to a query with its gradient; how each row moved ``(n, D)``, None at the first."""
        before, self._before = self._before, query
        if before is None or before.direction is None or before.points is None or not _alike(before.rows, query.rows):
            return None
        assert query.direction is not None
        assert query.points is not None
        product = (query.direction * before.direction).sum(1)
        self._add("pairs", query.rows, torch.isfinite(product) & (product != 0))
        self._add("turned", query.rows, product < 0)
        moved = query.points - before.points
        if before.sense is not None:
            # Where the gradient is not finite, its product is not either.
            along = (moved * before.direction.sign()).sum(1)
            known = torch.isfinite(along) & (before.sense != 0)
            self._add("way", query.rows, moved.abs().sum(1).where(known, 0))
            self._add("along", query.rows, (before.sense * along).where(known, 0))
            self._add("beside", query.rows, along.abs().where(known, 0))
        if sampled(self._count):
            self._hold(before, moved)
        self._count += 1
        if self._moved is not None and _alike(self._moved[0], query.rows):
            back, way = (moved * self._moved[1]).sum(1), moved.abs().sum(1)
            self._add("moves", query.rows, way)
            self._add("returned", query.rows, way.where(back < 0, 0))
        self._moved = query.rows, moved
        before.direction = before.points = None
        return moved

    def _hold(self, before: Query, moved: Tensor) -> None:
        """Count the values that stayed where they were, of those that neither ball nor bounds may have held."""
        assert before.direction is not None
        assert before.points is not None
        (low, high), points = self._threat_model.bounds, before.points
        free = (before.direction.abs() > _COUNTS) & (points > low) & (points < high)
        if self._threat_model.norm == "linf":
            clean = self._clean if before.rows is None else self._clean[before.rows]
            free &= (points - clean).abs() < self._edge
        self._add("free", before.rows, free.sum(1))
        self._add("held", before.rows, (free & (moved == 0)).sum(1))
        self._stirred |= (moved != 0).any(0)
        self._chances += free.sum(0)

    def end(self, returned: Tensor) -> None:
        """Count the values that the step to the returned points ``(N, D)`` held, where no step came before it."""
        before = self._before
        if before is None or before.points is None or before.direction is None or bool(self._stirred.any()):
            return
        if before.rows is None:
            # Passes at one point, whose gradients are averaged, are no steps.
            for sums in (self._sums["held"], self._sums["free"], self._chances):
                sums.zero_()
            self._hold(before, returned - before.points)

    def found(self) -> dict[str, Tensor]:
        """Shares over all steps, float64 ``(N,)``; NaN where there were none."""
        sums = {name: values.cpu() for name, values in self._sums.items()}
        parts = {"turns": ("turned", "pairs"), "follows": ("along", "way"), "uses": ("beside", "way")}
        parts |= {"held": ("held", "free"), "back": ("returned", "moves")}
        known = self._chances >= _CHANCES
        fixed = (known & ~self._stirred).sum() / known.sum()  # NaN of none
        return {
            "fixed": fixed.double().cpu().expand(len(self._clean)),
            **{
                name: (sums[part] / sums[whole]).where(sums[whole] > 0, torch.nan)
                for name, (part, whole) in parts.items()
            },
        }

    def _add(self, name: str, rows: Tensor | None, values: Tensor) -> None:
        if rows is None:
            self._sums[name] += values
        else:
            self._sums[name].index_add_(0, rows, values.double())


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return len(one) == len(other) and bool((one == other).all())
