"""Keywords of every evaluation that are its settings; written by .ci/generate_settings.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from robust_ext.models.readouts.base import Readout


class BinarizationOptions(TypedDict, total=False):
    """Settings of the binarization test; each may be left out, see :class:`BinarizationSettings`."""

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
    random: Literal["fixed", "match"]
    random_inner: int
    random_corners: int
    canaries: int
    threshold: float
    proven_rate: float
    maximum_random_score: float
    random_stops: bool
    calibrate_on: int
    sequential: bool
    error_rate: float
    confidence: float
    batch_size: int | Literal["auto"]
    forward_batch: int | Literal["auto"]
    fold: bool


class MeadOptions(TypedDict, total=False):
    """Settings of mead; each may be left out, see :class:`MeadSettings`."""

    seed: int
    judge_seed: int | None
    naturals: Literal["kept", "filtered"]
    resamples: int
    combine: Sequence[Literal["mean", "max", "mixture"]]
    detector_fpr: float
    published: bool
    batch_size: int


class RobustAccuracyOptions(TypedDict, total=False):
    """Settings of robust accuracy; each may be left out, see :class:`RobustAccuracySettings`."""

    epsilons: Sequence[float] | None
    batch_size: int
    seed: int


class AdaptiveOptions(TypedDict, total=False):
    """Settings of the evaluation of a test-time defense; each may be left out, see :class:`AdaptiveSettings`."""

    seed: int
    judge_seed: int | None
    steps: int
    transfer_steps: int
    losses: Sequence[Literal["ce", "margin", "dlr", "targeted-dlr", "targeted-margin"]]
    restarts: int
    target_classes: int
    queries: int
    draws: int
    repeats: int
    only: Sequence[Literal["naive", "transfer", "black-box", "white-box"]]
    skip: Sequence[Literal["naive", "transfer", "black-box", "white-box"]]
    full: bool
    minutes: float | None
    batch_size: int


class DiagnosisOptions(TypedDict, total=False):
    """Settings of a diagnosis; each may be left out, see :class:`DiagnosisSettings`."""

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


class EvaluateOptions(TypedDict, total=False):
    """Settings of an evaluation; each may be left out, see :class:`EvaluateSettings`."""

    seed: int
    judge_seed: int | None
    budget: Literal["quick", "standard", "thorough"]
    claim: float | None
    planted: int
    search: bool
    accept_setup: bool
    layer: str | None
    detector_fpr: float
    minutes: float | None
    batch_size: int
