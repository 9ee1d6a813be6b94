"""Settings of the evaluation of a test-time defense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from robust_ext.core.validation import check_integer


@dataclass(frozen=True, kw_only=True)
class AdaptiveSettings:
    """How hard a defense is attacked, and how often a random one is asked.

    Args:
        steps: Of APGD in each run.
        queries: Of Square and RayS for each sample.
        draws: Draws that gradients of a random defense are averaged over.
        repeats: How often a random defense is asked about each candidate: so often to choose the worst attack on each
            sample, and so often again, afresh, to state what is left.
        batch_size: Samples attacked and judged at once; for batch-level defenses the nearest number of whole groups.
        seed: Of every draw.
    """

    __test__ = False

    steps: int = 50
    queries: int = 500
    draws: int = 8
    repeats: int = 5
    batch_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name, minimum in (
            ("steps", 1),
            ("queries", 1),
            ("draws", 1),
            ("repeats", 1),
            ("batch_size", 1),
            ("seed", 0),
        ):
            check_integer(name, getattr(self, name), minimum=minimum)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values."""
        return dict(vars(self))
