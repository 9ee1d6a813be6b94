"""The result of the evaluation of a test-time defense, as an object."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from robust_ext import reports


@dataclass(frozen=True)
class AdaptiveResult:
    """What is left of a static model and of its defense.

    Args:
        content: Everything ``result.json`` holds; numbers, not strings.
    """

    __test__ = False

    content: Mapping[str, Any]

    @property
    def static(self) -> float:
        """Robust accuracy of the static model under all attacks."""
        return float(self.content["static"]["worst_case"]["robust_accuracy"])

    @property
    def defended(self) -> float:
        """Robust accuracy of the defense under all attacks."""
        return float(self.content["defended"]["worst_case"]["robust_accuracy"])

    def __str__(self) -> str:
        return reports.report_text(self.content)

    def to_dict(self) -> dict[str, Any]:
        """The content, as a dict of its own."""
        return dict(self.content)

    def to_html(self) -> str:
        """One self-contained page."""
        return reports.report_page(self.content)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``result.json`` and ``report.html`` to a folder."""
        reports.save(self.content, folder)
