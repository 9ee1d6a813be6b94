"""Keywords of :class:`AdaptiveSettings`; written by .ci/generate_settings.py."""

from __future__ import annotations

from typing import TypedDict


class AdaptiveOptions(TypedDict, total=False):
    """Settings of the evaluation of a test-time defense; each may be left out."""

    seed: int
    judge_seed: int | None
    steps: int
    queries: int
    draws: int
    repeats: int
    batch_size: int
