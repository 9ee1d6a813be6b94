"""Keywords of :class:`AdaptiveSettings`; written by .ci/generate_settings.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict


class AdaptiveOptions(TypedDict, total=False):
    """Settings of the evaluation of a test-time defense; each may be left out."""

    seed: int
    judge_seed: int | None
    steps: int
    transfer_steps: int
    queries: int
    draws: int
    repeats: int
    only: Sequence[Literal["naive", "transfer", "black-box", "white-box"]]
    skip: Sequence[Literal["naive", "transfer", "black-box", "white-box"]]
    full: bool
    minutes: float | None
    batch_size: int
