"""What a search for the nearest points has found so far, after how much work, and whether it may go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.oracle import BoundaryOracle, nearest_rows
from robust_ext.attacks.linear_region.state import KINDS, SearchState
from robust_ext.attacks.native import Step, Watch


@dataclass(frozen=True, kw_only=True)
class HistoryEntry:
    """The state after one stage.

    Attributes:
        regions: Regions solved for each input so far, int64 ``(N,)``.
        passes: Rows sent forward and backward for each input so far, int64 ``(N,)``.
        seconds: CPU time of this process since the attack began.
        distances: Of the nearest adversarial point of each input, float64 ``(N,)``; infinite where there is none.
    """

    regions: Tensor
    passes: Tensor
    seconds: float
    distances: Tensor


@dataclass(frozen=True, kw_only=True)
class LinearRegionResult:
    """What the attack found.

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
        """The share of the budget that is spent for each input, float64 ``(N,)``; may end above 1."""
        if self._unit == "passes":
            return self._oracle.passes / self._budget
        seconds = time.process_time() - self._began
        return torch.full_like(self._oracle.nearest, seconds / (self._budget * max(1, len(self._kinds))))

    def going(self, sample_index: Tensor, *, until: float | Tensor = 1.0) -> Tensor:
        """Which may be searched on from, bool ``(B,)``: shows where the search is, and is called before each step.

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

    def limited(self, until: float) -> Callable[[Tensor], Tensor]:
        """:meth:`going` until a share of the budget is spent."""
        return lambda sample_index: self.going(sample_index, until=until)

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
        """What was found."""
        return LinearRegionResult(
            candidates=self._oracle.points,
            found=torch.isfinite(self._oracle.nearest),
            distances=self._oracle.nearest,
            kinds=tuple(None if kind < 0 else KINDS[kind] for kind in self._kinds.tolist()),
            regions=self.regions,
            history=tuple(self._history),
        )
