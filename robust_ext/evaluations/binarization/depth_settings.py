"""Settings of the depths at which problems are posed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.validation import check_number
from robust_ext.engine.judge import JudgedSettings

DEPTHS = (1.0, 2.0, 4.0, 8.0)


def check_depths(value: Any) -> tuple[float, ...]:
    """Depths as a tuple of increasing numbers that begins with 1, the planted point's."""
    expected = "increasing numbers that begin with 1, as in (1, 2, 4, 8); (1,) alone for no further depths"
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise InvalidArgumentError("depths", repr(value), expected)
    depths = tuple(float(check_number("depths", depth, minimum=1, maximum=1e6)) for depth in value)
    if depths[:1] != (1.0,) or any(second <= first for first, second in pairwise(depths)):
        raise InvalidArgumentError("depths", tuple(value), expected)
    return depths


@settings_class
class DepthSettings(JudgedSettings):
    """Where problems are posed beyond the planted point, see :mod:`robust_ext.evaluations.binarization.depth`."""

    depths: tuple[float, ...] = setting(
        default=DEPTHS,
        help="Where the boundary is placed, in multiples of the way from the closest inner point to the planted one: 1 "
        "is the test itself, and deeper problems are posed where a witness proves that they can be solved. ``(1,)`` "
        "for none.",
        check=check_depths,
        panel="depth",
    )
    least_depth: float = setting(
        default=1.0,
        help="The depth from which on an attack may pass, as a calibration chooses it.",
        minimum=1,
        cli=None,
    )
    witness_steps: int = setting(
        default=20,
        help="Steps that this project's APGD takes to find deeper points, and half as many with the mean of four "
        "gradients nearby (not with a detector); 0 for none.",
        minimum=0,
        panel="depth",
    )
    witness_queries: int = setting(
        default=200,
        help="Queries that Square makes for the same from the planted point, without gradients; 0 for none. It needs "
        "images, and is not run with a detector.",
        minimum=0,
        panel="depth",
    )

    def to_dict(self) -> dict[str, Any]:
        """All settings by name, as plain values."""
        return {**super().to_dict(), "depths": list(self.depths)}
