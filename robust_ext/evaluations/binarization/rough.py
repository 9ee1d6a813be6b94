"""Problems of a group of samples: points measured and readouts fitted, in lower precision where a re-check holds.

On GPUs that compute faster in half precision, all points are measured in it, under ``torch.autocast``, and readouts are
fitted to that. What a problem is decided by is measured again as the test measures it otherwise: the clean sample, what
is planted, and the inner points that come closest to it. They give the boundary its place. Where rounding moves their
scores by a good part of the gap, other inner points could lie on the wrong side: such samples are measured again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from robust_ext.engine.progress import Phases, phase
from robust_ext.evaluations.binarization.forward import Forward
from robust_ext.evaluations.binarization.points import draw_inner
from robust_ext.evaluations.binarization.problems import Measured, Problems, fit, measure
from robust_ext.evaluations.binarization.settings import BinarizationSettings

logger = logging.getLogger(__name__)

RECHECKED = 8
"""Inner points of each sample that are measured again, beside the clean sample."""

# How far rounding may move the scores of these from each other, as a share of the gap.
_DRIFT = 0.25


def fit_problems(
    forward: Forward,
    readout: nn.Module,
    inputs: Tensor,
    samples: Sequence[int],
    settings: BinarizationSettings,
    *,
    candidates: Sequence[Tensor] | None = None,
    references: Tensor | None = None,
    phases: Phases | None = None,
) -> Problems:
    """Measure and fit the problems of inputs ``(B, ...)`` in the precision of the settings; random models in their own.

    Arguments are those of :func:`~robust_ext.evaluations.binarization.problems.measure`, and what is told how long
    parts take.
    """

    def stop(name: str) -> None:
        if phases is not None:
            phases.stop(name)

    def measured(way: Forward, rows: Sequence[int]) -> Measured:
        phase("planting")
        some = list(rows)
        found = measure(
            way,
            inputs[some],
            [samples[row] for row in some],
            settings,
            candidates=None if candidates is None else [candidates[row] for row in some],
            references=None if references is None else references[some],
        )
        stop("features")
        return found

    def fitted(points: Measured) -> Problems:
        phase("readouts")
        found = fit(points, readout, settings)
        stop("readout")
        return found

    rows = range(len(samples))
    if settings.planting_precision == "float32" or settings.draws > 1:
        return fitted(measured(forward, rows))
    try:
        rough = measured(replace(forward, precision=getattr(torch, settings.planting_precision)), rows)
    except RuntimeError as error:
        logger.info("the network cannot be measured in %s (%s)", settings.planting_precision, error)
        return fitted(measured(forward, rows))
    problems, holds = _rechecked(fitted(rough), rough, forward, settings)
    stop("features")
    kept, again = ([row for row in rows if holds[row] is good] for good in (True, False))
    if not again:
        return problems
    logger.info("%d of %d samples are measured again in float32", len(again), len(samples))
    joined = Problems.join([problems.select(kept), fitted(measured(forward, again))])
    order = [*kept, *again]
    return joined.select([order.index(row) for row in rows])


def _rechecked(
    problems: Problems, rough: Measured, forward: Forward, settings: BinarizationSettings
) -> tuple[Problems, list[bool]]:
    """The problems with boundaries as ``forward`` measures them, and which of them hold."""
    kind, planted, count = problems.readout, problems.planted.shape[1], settings.inner_points
    # The clean sample and inner points, planted points; references take no part in the boundary.
    rows = rough.features[:, : 1 + count + planted]
    scores = kind.scores(rows, problems.parameters).double()
    closest = scores[:, 1 : 1 + count].nan_to_num(-torch.inf).topk(min(RECHECKED, count), dim=1).indices
    own = torch.arange(len(rows), device=rows.device)[:, None]
    # Drawn once more, sample by sample: they are not kept, for large images are many numbers.
    drawn = torch.cat(
        [
            draw_inner(problems.inputs[row : row + 1], [sample], settings, count)[:, closest[row]]
            for row, sample in enumerate(problems.samples)
        ]
    )
    points = torch.cat([problems.inputs[:, None], drawn, problems.planted], 1)
    found = forward(points.flatten(0, 1))
    exact = kind.scores(found.view(*points.shape[:2], *found.shape[1:]), problems.parameters).double()
    before = torch.cat([scores[:, :1], scores[own, 1 + closest], scores[:, 1 + count :]], 1)
    moved = exact - before
    edge = exact[:, -planted:].amin(1)
    gap = edge - exact[:, :-planted].amax(1)
    limit = min(_DRIFT, settings.boundary_position) * gap
    holds = (problems.gap > 0) & (gap > 0) & (moved.amax(1) - moved.amin(1) <= limit)
    parameters, anchored = kind.anchored(dict(problems.parameters), edge)
    shift = edge - problems.edge
    made = replace(
        problems,
        parameters=parameters,
        edge=anchored,
        gap=gap,
        lowest=problems.lowest - shift,
        highest=problems.highest - shift,
    )
    return made, holds.tolist()
