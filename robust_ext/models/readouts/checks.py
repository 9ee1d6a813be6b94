"""What a readout has to return, checked on the points that it is fitted to: those of users too."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.foreign import foreign_code
from robust_ext.models.readouts.base import Readout

# Points this close to the boundary, as a share of the gap, may fall on either side of it by rounding.
_CLOSE = 1e-6


def fitted(readout: Readout, features: Tensor, planted: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Parameters ``(B, ...)`` of the readout fitted to features ``(B, n, *F)``, and the scores ``(B, n)`` of these.

    Raises:
        InvalidArgumentError: It returned something else; the text names the method.
        DataError: It raised.
    """
    with foreign_code("readout", readout.description):
        parameters = readout.fit(features, planted)
    if not isinstance(parameters, dict) or not all(isinstance(part, Tensor) for part in parameters.values()):
        raise _error(readout, f"fit() returned {type(parameters).__name__}", "a dict of tensors by name")
    for name, part in parameters.items():
        if part.shape[:1] != features.shape[:1]:
            expected = f"{len(features)} rows, one for each problem"
            raise _error(readout, f"fit() returned {name!r} of shape {tuple(part.shape)}", expected)
    with foreign_code("readout", readout.description):
        scores = readout.scores(features, parameters)
    if not isinstance(scores, Tensor) or scores.shape != features.shape[:2]:
        shown = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        expected = f"one number for each of M rows, a tensor of shape (M,), so {tuple(features.shape[:2])} in all"
        raise _error(readout, f"score() came to {shown} for the points of all problems", expected)
    return parameters, scores.double()


def check_logits(
    readout: Readout, features: Tensor, parameters: Mapping[str, Tensor], scores: Tensor, threshold: Tensor, gap: Tensor
) -> None:
    """Raise where logits of one's own make points ``(B, n, *F)`` another class than ``scores`` ``(B, n)`` do.

    ``threshold`` and ``gap`` are float64 ``(B,)``; problems without a gap are left out.

    Raises:
        InvalidArgumentError: They do, or are of another shape than ``(M, 2)``.
        DataError: It raised.
    """
    if type(readout).logits is Readout.logits:
        return
    count, wrong = features.shape[1], torch.zeros(len(features), dtype=torch.int64, device=features.device)
    for row in (gap > 0).nonzero().flatten().tolist():
        points = features[row]
        own = {name: part[row].expand(count, *part.shape[1:]) for name, part in parameters.items()}
        limit = threshold[row].expand(count)
        with foreign_code("readout", readout.description), torch.no_grad():
            logits = readout.logits(points, own, limit, torch.ones_like(limit), torch.zeros_like(limit))
        if not isinstance(logits, Tensor) or logits.shape != (count, 2):
            shown = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise _error(readout, f"logits() returned {shown} for {count} rows", f"shape ({count}, 2)")
        beyond = scores[row] - limit
        other = (logits.argmax(1) == 1) != (beyond > 0)
        wrong[row] = (other & (beyond.abs() > _CLOSE * gap[row])).sum()
    # In one copy from the device.
    found = max(wrong.tolist(), default=0)
    if found:
        raise _error(
            readout,
            f"logits() predicts another class than score() for {found} of {count} measured points",
            "the second logit to be the larger one exactly where the score is above the threshold",
        )


def _error(readout: Readout, got: str, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError("readout", f"{readout.description}, whose {got}", f"{expected}; correct the class")
