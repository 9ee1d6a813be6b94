"""What several draws of a classifier say together, gathered chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from torch import Tensor, logaddexp

VALUES = ("last", "logits", "softmax")


class RunningMean:
    """The last logits, the mean of the logits, and the logarithm of the mean softmax, over draws in chunks.

    Args:
        wanted: Which of ``"last"``, ``"logits"`` and ``"softmax"``.
        draws: How many there will be.
    """

    def __init__(self, wanted: Collection[str], draws: int) -> None:
        self._wanted, self._draws = wanted, draws
        self._found: dict[str, Tensor] = {}

    def add(self, out: Tensor) -> None:
        """Take in the logits ``(count, N, K)`` of some draws."""
        found = self._found
        if "last" in self._wanted:
            found["last"] = out[-1]
        if "logits" in self._wanted:
            total = out.sum(0)
            found["logits"] = total + found["logits"] if "logits" in found else total
        if "softmax" in self._wanted:
            total = out.log_softmax(2).logsumexp(0)
            found["softmax"] = logaddexp(total, found["softmax"]) if "softmax" in found else total

    def values(self) -> dict[str, Tensor]:
        """Each aggregate, ``(N, K)``."""
        finish: dict[str, Callable[[Tensor], Tensor]] = {
            "last": Tensor.clone,
            "logits": lambda total: total / self._draws,
            "softmax": lambda total: total - math.log(self._draws),
        }
        return {name: finish[name](total) for name, total in self._found.items()}


def spread(out: Tensor, cotangent: Tensor, draws: int, log_mean: Tensor | None) -> Tensor:
    """From the gradient by an aggregate to the gradient by the logits of some of its draws.

    Args:
        out: The logits of these draws, ``(count, N, K)``.
        cotangent: By the aggregate, ``(N, K)``.
        draws: How many draws the aggregate has.
        log_mean: The aggregate where it is the logarithm of the mean softmax, ``(N, K)``; None where it is the mean of
            the logits.

    Returns:
        As ``out``.
    """
    if log_mean is None:
        return (cotangent / draws).expand_as(out)
    logarithms = out.log_softmax(2)
    # Each draw's part in the mean of the softmax comes from logarithms, as the mean itself may be 0 as a float.
    share = cotangent * (logarithms - log_mean).exp() / draws
    return share - logarithms.exp() * share.sum(2, keepdim=True)
