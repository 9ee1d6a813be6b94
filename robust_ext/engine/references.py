"""Points that attacks imitate: clean inputs of other classes that the detector lets pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from robust_ext.core.random import derive_seed, seeded_globals, stream
from robust_ext.detectors.base import Detector

COUNT = 4


def draw_references(
    inputs: Tensor, logits: Tensor, rows: Sequence[int], *, detector: Detector, seed: int, count: int = COUNT
) -> Tensor | None:
    """Draw points for some rows from the clean inputs, ``(n, count, ...)``; None where a row has too few.

    A row's points depend on the seed and the row, not on the rows beside it.

    Args:
        inputs: All clean inputs ``(N, ...)``.
        logits: Of them, ``(N, K)``.
        rows: The rows that need some.
        detector: With a threshold.
        seed: Of the draws.
        count: Points for each row.
    """
    with seeded_globals(derive_seed(seed, "arm references")):
        passed = ~torch.cat([detector.decide(batch) for batch in torch.split(inputs, 250)])
    predicted = logits.argmax(1)
    drawn = []
    for row in rows:
        others = (passed & (predicted != predicted[row])).nonzero().squeeze(1)
        if len(others) < count:
            return None
        order = torch.randperm(len(others), generator=stream(seed, row, "arm references"))[:count]
        drawn.append(inputs[others[order.to(others.device)]])
    return torch.stack(drawn)
