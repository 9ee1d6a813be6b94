"""Candidates as images, for reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from robust_ext.core.errors import InvalidArgumentError


@dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """One clean input ``(C, H, W)``, of the sample with this index, and the candidate an attack returned for it.

    ``planted`` is the adversarial example that was there to be found, where one was planted.

    One or three channels are shown as grey or colour, of other numbers of channels the first one; inputs of other
    shapes are left out of a page. The outcome is one such as ``"found"``; the bounds are shown as black and white.
    """

    attack: str
    sample: int
    outcome: str
    clean: NDArray[Any]
    candidate: NDArray[Any]
    bounds: tuple[float, float]
    planted: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        for name, points in (("candidate", self.candidate), ("planted", self.planted)):
            if points is not None and points.shape != self.clean.shape:
                raise InvalidArgumentError(name, f"shape {points.shape}", f"the shape of clean, {self.clean.shape}")
        if not self.bounds[0] < self.bounds[1]:
            raise InvalidArgumentError("bounds", self.bounds, "a pair whose first number is below its second")

    @property
    def is_image(self) -> bool:
        """True if the input has the shape of an image, ``(C, H, W)`` with at least one pixel."""
        return self.clean.ndim == 3 and self.clean.size > 0
