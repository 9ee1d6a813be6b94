"""Points that attacks on detectors imitate: clean inputs of other classes that the detector lets pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from robust_ext.core.random import derive_seed, seeded_globals, stream
from robust_ext.detectors.base import Detector
from robust_ext.engine.inputs import EvaluationInputs

# Points for each row.
_REFERENCES = 4
# Rows that a detector decides at once.
_DECIDED = 250


def passed_inputs(given: EvaluationInputs, *, detector: Detector, seed: int) -> Tensor:
    """Which clean inputs a detector lets pass, bool ``(N,)``."""
    with seeded_globals(derive_seed(seed, "arm references")):
        return ~torch.cat([detector.decide(batch) for batch in torch.split(given.inputs, _DECIDED)])


def draw_references(
    given: EvaluationInputs, rows: Sequence[int], *, passed: Tensor, seed: int, count: int = _REFERENCES
) -> Tensor | None:
    """Draw points that attacks imitate, ``(n, count, ...)``: inputs of other classes among those that ``passed``.

    A row's points depend on the seed and the row, not on the rows beside it. None where a row has too few.
    """
    predicted, drawn = given.logits.argmax(1), []
    for row in rows:
        others = (passed & (predicted != predicted[row])).nonzero().squeeze(1)
        if len(others) < count:
            return None
        order = torch.randperm(len(others), generator=stream(seed, row, "arm references"))[:count]
        drawn.append(given.inputs[others[order.to(others.device)]])
    return torch.stack(drawn)
