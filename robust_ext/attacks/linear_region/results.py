"""What a run of the linear-region attack has found so far, after how much work, and whether it may go on."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.oracle import BoundaryOracle
from robust_ext.attacks.linear_region.state import SearchState
from robust_ext.attacks.native import Step, Watch


@dataclass(frozen=True, kw_only=True)
class HistoryEntry:
    """The state after one step.

    Attributes:
        regions: Regions solved for each input so far, int64 ``(N,)``.
        passes: Rows sent forward and backward for each input so far, int64 ``(N,)``.
        seconds: Wall-clock time since the attack began.
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
        regions: Regions solved for each input, int64 ``(N,)``.
        history: An entry after the starts, one after the steps along the boundary, one after each hop and round.
    """

    candidates: Tensor
    found: Tensor
    distances: Tensor
    regions: Tensor
    history: tuple[HistoryEntry, ...]


class SearchRecord:
    """The nearest points so far ``(N, ...)``, with distances and regions as in the result; the limits, the history."""

    def __init__(
        self, oracle: BoundaryOracle, *, passes: int | None, seconds: float | None, watch: Watch | None
    ) -> None:
        self._oracle, self._passes, self._seconds, self._watch = oracle, passes, seconds, watch
        self._began = time.perf_counter()
        self._history: list[HistoryEntry] = []
        self.points = oracle.inputs.clone()
        self.distances = torch.full((len(self.points),), torch.inf, dtype=torch.float64, device=self.points.device)
        self.regions = torch.zeros_like(oracle.passes)

    def in_time(self) -> bool:
        """Whether there is time left."""
        return self._seconds is None or time.perf_counter() - self._began < self._seconds

    def open_samples(self) -> Tensor:
        """Which inputs may have more passes, and are not adversarial as they are; bool ``(N,)``."""
        going = self.distances > 0
        return going if self._passes is None else going & (self._oracle.passes < self._passes)

    def add(self, state: SearchState, *, number: int | None = None, total: int = 0) -> None:
        """Keep what is nearer, and append to the history."""
        for row, sample in enumerate(state.sample_index.tolist()):
            if state.distances[row] < self.distances[sample]:
                self.points[sample], self.distances[sample] = state.points[row], state.distances[row]
        seconds, passes = time.perf_counter() - self._began, self._oracle.passes.clone()
        regions, distances = self.regions.clone(), self.distances.clone()
        self._history.append(HistoryEntry(regions=regions, passes=passes, seconds=seconds, distances=distances))
        if self._watch is not None and number is not None:
            self._watch(Step(number=number, total=total, points=self.points.clone(), loss=-self.distances))

    def result(self) -> LinearRegionResult:
        """What was found."""
        return LinearRegionResult(
            candidates=self.points,
            found=torch.isfinite(self.distances),
            distances=self.distances,
            regions=self.regions,
            history=tuple(self._history),
        )
