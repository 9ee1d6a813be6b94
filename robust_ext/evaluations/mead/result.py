"""The result of a MEAD run, as an object."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from robust_ext import reports


@dataclass(frozen=True)
class MeadResult:
    """How detectors fare against all arms at once.

    Args:
        content: Everything ``result.json`` holds; numbers, not strings.
        examples: Candidates that slipped through, as images, for the report.
    """

    content: Mapping[str, Any]
    examples: Sequence[reports.Example] = field(default=(), repr=False)

    @property
    def detectors(self) -> dict[str, Mapping[str, Any]]:
        """The numbers of each detector, by name."""
        return {one["name"]: one for one in self.content["detectors"]}

    @property
    def arms(self) -> dict[str, Mapping[str, Any]]:
        """The numbers of each arm, by name."""
        return {one["name"]: one for one in self.content["arms"]}

    def auroc(self, detector: str, norm: str | None = "all", *, objective: str | None = None) -> float | None:
        """The average AUROC of a detector.

        Args:
            detector: Its name.
            norm: Of the groups that are averaged; None for those without a norm, ``"all"`` for the mean of the norms.
            objective: Of the arms; None for all of them together.
        """
        for row in self.content["averages"]:
            if (row["detector"], row["norm"], row["objective"]) == (detector, norm, objective):
                value: float | None = row["auroc"]
                return value
        return None

    def __str__(self) -> str:
        return reports.report_text(self.content)

    def to_dict(self) -> dict[str, Any]:
        """The content, as a dict of its own."""
        return dict(self.content)

    def to_html(self) -> str:
        """One self-contained page."""
        return reports.report_page(self.content, self.examples)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``result.json`` and ``report.html`` to a folder."""
        reports.save(self.content, folder, self.examples)
