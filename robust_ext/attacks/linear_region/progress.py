"""What a run of the linear-region attack has found so far, and whether it may go on."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.history import LinearRegionResult, Moment
from robust_ext.attacks.linear_region.judge import Judge
from robust_ext.attacks.linear_region.runners import Runners
from robust_ext.attacks.linear_region.settings import LinearRegionSettings
from robust_ext.attacks.native import Step, Watch


class Run:
    """The best points so far, the limits and the history.

    Args:
        judge: Holds the inputs, and counts their passes.
        settings: Give the limits.
        watch: Called after each round.

    Attributes:
        points: The nearest adversarial points, the inputs where there is none, ``(N, ...)``.
        distance: Of these, float64 ``(N,)``; infinite where there is none.
        regions: Regions solved for each input, int64 ``(N,)``; kept by the search.
    """

    def __init__(self, judge: Judge, settings: LinearRegionSettings, watch: Watch | None) -> None:
        self._judge, self._settings, self._watch = judge, settings, watch
        self._began = time.perf_counter()
        self._moments: list[Moment] = []
        self.points = judge.inputs.clone()
        self.distance = torch.full((len(self.points),), torch.inf, dtype=torch.float64, device=self.points.device)
        self.regions = torch.zeros_like(judge.passes)

    def running(self) -> bool:
        """Whether there is time left."""
        limit = self._settings.seconds
        return limit is None or time.perf_counter() - self._began < limit

    def open(self) -> Tensor:
        """Which inputs may have more passes, and are not adversarial as they are; bool ``(N,)``."""
        limit = self._settings.passes
        going = self.distance > 0
        return going if limit is None else going & (self._judge.passes < limit)

    def moment(self, runners: Runners, *, number: int | None = None, total: int = 0) -> None:
        """Take over what is nearer, and write down where the search stands."""
        for row in range(len(runners.streams)):
            owner = int(runners.owners[row])
            if runners.distances[row] < self.distance[owner]:
                self.points[owner], self.distance[owner] = runners.points[row], runners.distances[row]
        self._moments.append(
            Moment(
                regions=self.regions.clone(),
                passes=self._judge.passes.clone(),
                seconds=time.perf_counter() - self._began,
                distance=self.distance.clone(),
            )
        )
        if self._watch is not None and number is not None:
            self._watch(Step(number=number, total=total, points=self.points.clone(), loss=-self.distance))

    def result(self) -> LinearRegionResult:
        """What was found."""
        return LinearRegionResult(
            candidates=self.points,
            found=torch.isfinite(self.distance),
            distance=self.distance,
            regions=self.regions,
            history=tuple(self._moments),
        )
