"""What a run of the linear-region attack had found, after how much work."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The state after one step.

    Attributes:
        regions: Regions solved for each input so far, int64 ``(N,)``.
        passes: Rows sent forward and backward for each input so far, int64 ``(N,)``.
        seconds: Wall-clock time since the attack began.
        distance: Of the nearest adversarial point of each input, float64 ``(N,)``; infinite where there is none.
    """

    regions: Tensor
    passes: Tensor
    seconds: float
    distance: Tensor


@dataclass(frozen=True, kw_only=True)
class LinearRegionResult:
    """What the attack found.

    Attributes:
        candidates: The nearest adversarial point of each input, or the input itself, ``(N, ...)``.
        found: Where there is one, bool ``(N,)``.
        distance: Of the candidates, float64 ``(N,)``; infinite where none was found.
        regions: Regions solved for each input, int64 ``(N,)``.
        history: A moment after the starts, one after the walk, and one after each hop and round.
    """

    candidates: Tensor
    found: Tensor
    distance: Tensor
    regions: Tensor
    history: tuple[Moment, ...]
