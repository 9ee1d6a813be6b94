"""Keywords of :class:`BinarizationSettings`; written by .ci/generate_settings.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

from robust_ext.models.readouts.base import Readout


class BinarizationOptions(TypedDict, total=False):
    """Settings of the binarization test; each may be left out."""

    seed: int
    judge_seed: int | None
    depths: Sequence[float]
    least_depth: float
    witness_steps: int
    witness_queries: int
    layer: str | None
    readout: str | Readout
    C: float
    draws: int
    inner_points: int
    inner: float | Literal["uniform"]
    boundary_points: int
    planted_candidates: int
    boundary: Literal["auto", "corners", "surface"]
    gap: float
    kappa: float
    kappa_convention: Literal["paper", "reference"]
    logit_scale: Literal["original", "unit"]
    exposure: Literal["classifier", "reject", "margin"]
    detector_fpr: float
    reference_points: int
    reference_distance: float
    planting_tries: int
    detector_draws: int
    random_inner: int
    random_corners: int
    canaries: int
    threshold: float
    proven_rate: float
    maximum_random_score: float
    calibrate_on: int
    sequential: bool
    error_rate: float
    confidence: float
    batch_size: int | Literal["auto"]
    forward_batch: int | Literal["auto"]
    fold: bool
