"""Settings of a MEAD run."""

from __future__ import annotations

from typing import Any

from robust_ext.core.settings import setting, settings_class
from robust_ext.detectors.combining import METHODS
from robust_ext.engine.judge import JudgedSettings
from robust_ext.evaluations.mead.metric import NATURALS


@settings_class
class MeadSettings(JudgedSettings):
    """How arms are run and judged."""

    label = "mead"

    naturals: str = setting(
        default="kept",
        help='``"kept"``: samples that are misclassified as they are count like the others, as in the paper. '
        '``"filtered"``: they are left out.',
        choices=NATURALS,
    )
    resamples: int = setting(
        default=500, help="Of the bootstrap intervals; 0 leaves the intervals out.", minimum=0, maximum=1_000_000
    )
    combine: tuple[str, ...] = setting(
        default=(),
        help="Ways to make one detector of all of them, see :mod:`robust_ext.detectors.combining`: "
        '``"mean"``, ``"max"``, ``"mixture"``. They need clean inputs to calibrate on.',
        choices=METHODS,
        panel="detector",
    )
    detector_fpr: float = setting(
        default=0.05,
        help="Share of clean inputs that a detector without a threshold may flag, in (0, 1).",
        above=0,
        below=1,
        panel="detector",
    )
    published: bool = setting(
        default=False,
        help="Whether to state too what the paper's public code computes, see "
        ":mod:`robust_ext.evaluations.mead.published`.",
    )
    batch_size: int = setting(
        default=100,
        help="Samples attacked at once. Results of attacks that draw random numbers depend on it.",
        minimum=1,
        panel="run",
    )

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values."""
        return {**super().to_dict(), "combine": list(self.combine)}
