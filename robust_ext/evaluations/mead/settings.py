"""Settings of a MEAD run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.validation import check_choice, check_integer, check_number
from robust_ext.detectors.combining import METHODS
from robust_ext.evaluations.mead.metric import NATURALS


@dataclass(frozen=True, kw_only=True)
class MeadSettings:
    """How arms are run and judged.

    Args:
        naturals: ``"kept"``: samples that are misclassified as they are count like the others, as in the paper.
            ``"filtered"``: they are left out.
        resamples: Of the bootstrap intervals; 0 leaves the intervals out.
        combine: Ways to make one detector of all of them, see :mod:`robust_ext.detectors.combining`: ``"mean"``,
            ``"max"``, ``"mixture"``. They need clean inputs to calibrate on.
        detector_fpr: Share of clean inputs that a detector without a threshold may flag.
        published: Whether to state too what the paper's public code computes, see
            :mod:`robust_ext.evaluations.mead.published`.
        batch_size: Samples attacked at once. Results of attacks that draw random numbers depend on it.
        seed: Of every draw.
    """

    naturals: str = "kept"
    resamples: int = 500
    combine: tuple[str, ...] = ()
    detector_fpr: float = 0.05
    published: bool = False
    batch_size: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("naturals", self.naturals, NATURALS)
        check_integer("resamples", self.resamples, minimum=0)
        if not isinstance(self.combine, (tuple, list)):
            raise InvalidArgumentError("combine", repr(self.combine), f"a tuple of some of {', '.join(METHODS)}")
        object.__setattr__(self, "combine", tuple(self.combine))
        for method in self.combine:
            check_choice("combine", method, METHODS)
        check_number("detector_fpr", self.detector_fpr, minimum=0, maximum=1, open_minimum=True, open_maximum=True)
        if not isinstance(self.published, bool):
            raise InvalidArgumentError("published", self.published, "True or False")
        check_integer("batch_size", self.batch_size, minimum=1)
        check_integer("seed", self.seed, minimum=0)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values."""
        return {**vars(self), "combine": list(self.combine)}
