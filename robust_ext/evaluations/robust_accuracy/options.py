"""Keywords of :class:`RobustAccuracySettings`; written by .ci/generate_settings.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class RobustAccuracyOptions(TypedDict, total=False):
    """Settings of robust accuracy; each may be left out."""

    epsilons: Sequence[float] | None
    batch_size: int
    seed: int
