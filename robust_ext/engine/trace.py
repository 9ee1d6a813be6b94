"""Traces of an attack's queries as a few numbers, and witnesses among the queried points."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from robust_ext.core.threat import ThreatModel

_POWERS = {"linf": torch.inf, "l2": 2.0, "l1": 1.0}


class Witnesses:
    """For each input ``(N, ...)`` the nearest queried point in bounds and ball whose logits are not finite.

    ``points`` are NaN in rows without one; None where no row has one.
    """

    def __init__(self, inputs: Tensor, threat_model: ThreatModel) -> None:
        self.points: Tensor | None = None
        self._inputs, self._threat_model = inputs, threat_model
        self._distances = torch.full((len(inputs),), torch.inf, dtype=torch.float64, device=inputs.device)

    def note(self, points: Tensor, logits: Tensor) -> None:
        """Look at the logits ``(M, K)`` of queried points ``(M, ...)``, which costs next to nothing while finite."""
        # One number, that is not finite wherever one of them is not: less to compute than a mask.
        if math.isfinite(float(logits.sum())):
            return
        inputs, model = self._inputs, self._threat_model
        broken = ~torch.isfinite(logits.flatten(1)).all(1)
        if points.shape[1:] != inputs.shape[1:] or len(broken) != len(points):
            return
        points = points.to(inputs)
        low, high = model.bounds
        valid = broken & ((points >= low) & (points <= high)).flatten(1).all(1)
        if not model.plain and len(points) != len(inputs):
            return  # Which row a point is of is seen by its place alone.
        if not bool(valid.any()):
            return
        if len(points) == len(inputs):
            # A full batch comes in the order of the inputs.
            nearest, distances = points, model.distance(points, inputs).where(valid, torch.inf)
        else:
            points = points[valid]
            here, there, exact = points.flatten(1).double(), inputs.flatten(1).double(), "donot_use_mm_for_euclid_dist"
            distances, which = torch.cdist(here, there, p=_POWERS[model.norm], compute_mode=exact).min(0)
            nearest = points[which]
        limit = model.epsilon + model.tolerance(inputs[0].numel())
        closer = (distances <= limit) & (distances < self._distances)
        if bool(closer.any()):
            kept = torch.full_like(inputs, torch.nan) if self.points is None else self.points
            self.points = torch.where(closer.view(-1, *[1] * (inputs.dim() - 1)), nearest, kept)
            self._distances = torch.where(closer, distances, self._distances)


Point = Mapping[str, Any]

# What a trace holds of a row. Distances are in epsilons, in the threat model's norm; a margin is the highest other
# logit less the label's, above 0 where the point is adversarial.
COLUMNS = (
    "queries",  # Times the row was sent forward
    "graphs",  # Of these, with a graph from an input that requires a gradient
    "cut",  # Of these, whose logits had no graph
    "gradients",  # Gradients that arrived at the input
    "zero",  # Of these, exactly zero
    "non_finite",  # Of these, with NaN or infinity
    "zero_loss",  # Gradients of the loss by the logits that were exactly zero
    "other_label",  # Gradients by the logits of the form of cross-entropy's, for another label than the row's
    "turns",  # Share of consecutive gradients with a negative inner product
    "first",  # Margin at the first query
    "best",  # Highest margin of a query in bounds and ball
    "last",  # Margin at the last query
    "best_at",  # Number of the query with the best margin, from 0
    "adversarial_at",  # Number of the first query in bounds and ball with a margin above 0
    "late",  # What the best margin gained in the last tenth of the queries
    "recent",  # What it gained in the last ten queries
    "lowest",  # Lowest margin of any query
    "scale",  # Largest logit met, as a magnitude
    "saturated",  # Queries at which cross-entropy is exactly 0 in float32
    "reach",  # Largest distance of a query from the input
    "end",  # Distance of the last query
    "low",  # Its smallest value
    "high",  # Its largest value
    "step",  # Median movement between consecutive queries that had gradients
    "longest",  # The longest of these movements
    "follows",  # Of all its steps, how much went up the gradient that came before where that is away from the label: 1
    # all the way, -1 all of it down
    "uses",  # The same for either direction: 0 where steps have nothing to do with it
    "back",  # Share of steps with a negative inner product with the step before
    "held",  # Share of values that a step left as they were, though the gradient was not 0 and nothing held them
    "fixed",  # The same of all rows together: share of values that no step of any row changed
    "grid",  # Whether the last query with a gradient was on the grid of 8 bits
    "elsewhere",  # Share of queries with gradients that are the input scaled or shifted, out of bounds or ball
    "slope",  # Its scale at the last of them
    "shift",  # The addition to it
    "outside",  # Queries out of the ball or the bounds
    "unmoved",  # Queries of the input itself
    "batch_queries",  # Most queries of any row in the same call
)
_MARGINS = ("first", "best", "last", "late", "recent", "lowest", "scale")
_PATH = ("turns", *_MARGINS, "reach", "end", "low", "high", "step", "longest")
_PARTS = (*_PATH, "follows", "uses", "back", "held", "fixed", "elsewhere", "slope", "shift")
_WHOLE = frozenset(COLUMNS) - frozenset(_PARTS)
# Points of a curve; in a trace that comes from another process there are no more.
LONGEST_CURVE = 64
CURVE = ("query", "margin", "distance", "gradient", "adversarial")


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A recording of one call of an attack on N rows.

    Args:
        values: float64 ``(N, len(COLUMNS))``; NaN where nothing is known.
        curve: Means over rows at their n-th query, at most 64 points: ``query`` (from 0), ``margin``, ``distance``
            (epsilons), ``gradient`` (largest value, as a magnitude; None without one), ``adversarial`` (a share).
    """

    values: Tensor
    curve: Sequence[Point]

    def rows(self) -> list[dict[str, Any] | None]:
        """A dict of plain values for each row, with four digits; None for rows that were not queried."""
        columns = [
            [round(value) if math.isfinite(value) else None for value in column]
            if name in _WHOLE
            else [finite(value) for value in column]
            for name, column in zip(COLUMNS, self.values.T.tolist(), strict=True)
        ]
        named = (dict(zip(COLUMNS, row, strict=True)) for row in zip(*columns, strict=True))
        return [row if (row["queries"] or 0) > 0 else None for row in named]


def plain_curve(found: object) -> list[dict[str, float | None]]:
    """A curve with its known keys and finite numbers only; ValueError for anything else."""
    if not isinstance(found, list) or len(found) > LONGEST_CURVE:
        raise ValueError("a curve that is none")
    points: list[dict[str, float | None]] = []
    for point in found:
        if not isinstance(point, Mapping):
            raise ValueError("a point of a curve that is none")
        values = {name: point.get(name) for name in CURVE}
        if not all(value is None or isinstance(value, (int, float)) for value in values.values()):
            raise ValueError("a point of a curve without numbers")
        points.append({name: finite(value) for name, value in values.items()})
    return points


def mean_curve(curves: Sequence[Sequence[Point]]) -> list[dict[str, float | None]]:
    """The mean of several curves, each point over those that have it."""
    known: dict[float, dict[str, list[float]]] = {}
    for point in (point for curve in curves for point in curve):
        values = known.setdefault(point["query"], {name: [] for name in CURVE})
        for name in CURVE:
            values[name] += [] if point[name] is None else [point[name]]
    means = [
        {name: sum(values) / len(values) if values else None for name, values in known[query].items()}
        for query in sorted(known)
    ]
    return plain_curve(means[:LONGEST_CURVE])


def finite(value: float | None) -> float | None:
    """A number with four digits; None for what is none."""
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None


def no_values(rows: int) -> Tensor:
    """Values of rows of which nothing is known."""
    return torch.full((rows, len(COLUMNS)), torch.nan, dtype=torch.float64)
