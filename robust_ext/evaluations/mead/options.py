"""Keywords of :class:`MeadSettings`; written by .ci/generate_settings.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict


class MeadOptions(TypedDict, total=False):
    """Settings of mead; each may be left out."""

    seed: int
    judge_seed: int | None
    naturals: Literal["kept", "filtered"]
    resamples: int
    combine: Sequence[Literal["mean", "max", "mixture"]]
    detector_fpr: float
    published: bool
    batch_size: int
