"""How near each sample is to being broken: the margins of the defense at the candidates of all steps so far."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robust_ext.engine.run import Outcome, candidates_name
from robust_ext.evaluations.adaptive.protocol import StepRun


def highest_margins(done: Sequence[Outcome[StepRun]]) -> NDArray[np.float64]:
    """The highest margin of each sample, ``(N,)``, over the candidates of all steps."""
    found = np.full(len(done[0].run.given.ids), -np.inf)
    for record in (record for one in done for record in one.records):
        found[record["index"]] = max(found[record["index"]], record["margin"])
    return found


def margins_for(run: StepRun, done: Sequence[Outcome[StepRun]]) -> NDArray[np.float64]:
    """The margins ``(N,)`` that decide which samples a step is run on.

    They are those of the step that it comes after, as what is near by one way may be far by another; of all steps where
    it begins at their best points, or comes after none.
    """
    before = [one for one in done if run.step and one.run.title == run.step.after and not run.step.warm]
    return highest_margins(before or done)


def best_points(done: Sequence[Outcome[StepRun]]) -> Tensor:
    """The candidate of the highest margin of each sample, ``(N, ...)``."""
    given = done[0].run.given
    points, best = given.inputs.clone(), np.full(len(given.ids), -np.inf)
    for one in done:
        records = {record["index"]: record for record in one.records}
        for block in one.run.blocks:
            rows = [row for row in block if row in records]
            # Under the first row that the step was run on, which need not be the block's.
            arrays = one.store.load(candidates_name(rows[0])) if rows else None
            for row, point in zip(rows, [] if arrays is None else arrays["candidates"], strict=arrays is not None):
                if records[row]["margin"] > best[row]:
                    best[row], points[row] = records[row]["margin"], torch.from_numpy(point).to(points)
    return points
