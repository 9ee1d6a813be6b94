"""Keywords of :class:`DiagnosisSettings`; written by .ci/generate_settings.py."""

from __future__ import annotations

from typing import TypedDict

from robust_ext.models.readouts.base import Readout


class DiagnosisOptions(TypedDict, total=False):
    """Settings of a diagnosis; each may be left out."""

    seed: int
    judge_seed: int | None
    planted: int
    inner_points: int
    layer: str | None
    readout: str | Readout
    references: bool
    queries: int
    random_points: int
    affordable: int
    minutes: float | None
    batch_size: int
