"""The starts of a search, and the record of what the search has found."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from robust_ext.attacks._common.rows import Selectable
from robust_ext.attacks.linear_region.oracle import BoundaryOracle, nearest_rows
from robust_ext.attacks.native import Step, Watch

# Kinds of starts; those that are given come from outside.
KINDS = ("given", "descent", "boundary", "noise", "nearest")
# The share by which a new start may become nearer, and the factor by which it fades with each search.
_HOPE, _FADING = 0.2, 0.5
_COLUMNS = ("sample_index", "points", "distances", "kinds", "hopes")


@dataclass
class SearchState(Selectable):
    """The starts that are searched from, a row each, with the input each belongs to, int64 ``(B,)``.

    The points ``(B, ...)`` are the nearest adversarial ones, the distances float64; each start has a CPU generator.
    ``kinds`` are places in :data:`KINDS`, int64; ``hopes`` the shares by which starts may still become nearer, float64.
    """

    sample_index: Tensor
    points: Tensor
    distances: Tensor
    streams: list[torch.Generator]
    kinds: Tensor
    hopes: Tensor

    @classmethod
    def begin(
        cls, sample_index: Tensor, points: Tensor, distances: Tensor, streams: list[torch.Generator], kind: str
    ) -> SearchState:
        """Return starts of one kind."""
        kinds = torch.full_like(sample_index, KINDS.index(kind))
        return cls(sample_index, points, distances, streams, kinds, torch.full_like(distances, _HOPE))

    @classmethod
    def join(cls, parts: Sequence[SearchState]) -> SearchState:
        """Return all starts of several states."""
        streams = [one for part in parts for one in part.streams]
        columns = {name: torch.cat([getattr(part, name) for part in parts]) for name in _COLUMNS}
        return cls(streams=streams, **columns)

    def update(self, rows: Tensor, latest: SearchState) -> None:
        """Replace starts with these indices, int64, after a search from them; their hopes fade."""
        gained = 1 - latest.distances / self.distances[rows]
        self.hopes[rows] = torch.maximum(gained, self.hopes[rows] * _FADING)
        self.points[rows], self.distances[rows] = latest.points, latest.distances

    def promising(self, most: int, open_samples: Tensor) -> Tensor:
        """Return indices of the ``most`` promising starts of each input that is open, bool ``(N,)``."""
        order = (self.distances * (1 - self.hopes)).argsort(stable=True)
        order = order[torch.isfinite(self.distances[order])]
        order = order[self.sample_index[order].argsort(stable=True)]
        samples = self.sample_index[order]
        place = torch.arange(len(samples), device=samples.device) - torch.searchsorted(samples, samples)
        return order[(place < most) & open_samples[samples]].sort().values


@dataclass(frozen=True, kw_only=True)
class HistoryEntry:
    """The state after one stage.

    Attributes:
        regions: Regions solved for each input so far, int64 ``(N,)``.
        passes: Rows sent forward and backward for each input so far, int64 ``(N,)``.
        seconds: CPU time of this process since the attack began.
        distances: Of the nearest adversarial point of each input, float64 ``(N,)``; infinite without one.
    """

    regions: Tensor
    passes: Tensor
    seconds: float
    distances: Tensor


@dataclass(frozen=True, kw_only=True)
class LinearRegionResult:
    """The result of a search.

    Attributes:
        candidates: The nearest adversarial point of each input, or the input itself, ``(N, ...)``.
        found: Where there is one, bool ``(N,)``.
        distances: Of the candidates, float64 ``(N,)``; infinite where none was found.
        kinds: The kind of start that led to each candidate, one of :data:`KINDS`; None where nothing was found, and
            where the input is adversarial as it is.
        regions: Regions solved for each input, int64 ``(N,)``.
        history: An entry after each kind of start, each hop, each round of regions, and at the end.
    """

    candidates: Tensor
    found: Tensor
    distances: Tensor
    kinds: tuple[str | None, ...]
    regions: Tensor
    history: tuple[HistoryEntry, ...]


class SearchRecord:
    """The one budget of a search, in passes or CPU seconds for each input, and its history.

    The nearest points themselves are kept by the oracle, which sees them first.
    """

    def __init__(self, oracle: BoundaryOracle, *, budget: float, unit: str, watch: Watch | None) -> None:
        self._oracle, self._budget, self._unit, self._watch = oracle, budget, unit, watch
        self._began, self._shown = time.process_time(), 0
        self._history: list[HistoryEntry] = []
        self._before = oracle.nearest.clone()
        self._kinds = torch.full_like(oracle.passes, -1)
        self.regions = torch.zeros_like(oracle.passes)

    def spent(self) -> Tensor:
        """Return the spent share of each input's budget, float64 ``(N,)``; may end above 1."""
        if self._unit == "passes":
            return self._oracle.passes / self._budget
        seconds = time.process_time() - self._began
        return torch.full_like(self._oracle.nearest, seconds / (self._budget * max(1, len(self._kinds))))

    def in_time(self) -> bool:
        """Return whether solvers may continue; passes count only once they are done."""
        return self._unit == "passes" or bool((self.spent() < 1).all())

    def going(self, sample_index: Tensor, *, until: float | Tensor = 1.0) -> Tensor:
        """Return whether the search may continue, bool ``(B,)``, and show its progress; called before each step.

        Finished are inputs that are adversarial as they are, and those for which more than the share ``until`` of the
        budget is spent.
        """
        spent = self.spent()
        if self._watch is not None:
            self._shown += 1
            share = min(1.0, max(float(spent.amax()), 1e-3)) if len(spent) else 1.0
            total = max(self._shown, round(self._shown / share))
            points, loss = self._oracle.points.clone(), -self._oracle.nearest
            self._watch(Step(number=self._shown - 1, total=total, points=points, loss=loss))
        open_samples = (spent < until) & (self._oracle.nearest > 0)
        return open_samples[sample_index]

    def add(self, state: SearchState) -> None:
        """Append to the history, and note which kind of start led nearer since the last entry."""
        nearest = self._oracle.nearest
        found = torch.isfinite(state.distances).nonzero().flatten()
        found = found[nearest_rows(state.distances[found], state.sample_index[found])]
        latest = self._kinds.clone()
        latest[state.sample_index[found]] = state.kinds[found]
        self._kinds = torch.where(nearest < self._before, latest, self._kinds)
        self._before = nearest.clone()
        seconds, passes = time.process_time() - self._began, self._oracle.passes.clone()
        regions = self.regions.clone()
        self._history.append(HistoryEntry(regions=regions, passes=passes, seconds=seconds, distances=nearest.clone()))

    def result(self) -> LinearRegionResult:
        """Return the result."""
        return LinearRegionResult(
            candidates=self._oracle.points,
            found=torch.isfinite(self._oracle.nearest),
            distances=self._oracle.nearest,
            kinds=tuple(None if kind < 0 else KINDS[kind] for kind in self._kinds.tolist()),
            regions=self.regions,
            history=tuple(self._history),
        )
