"""Results of evaluations, as objects."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import Self

from robust_ext import reports
from robust_ext.engine.context import current_context
from robust_ext.engine.identity import versions
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.engine.run import Outcome, isolated


@dataclass(frozen=True)
class EvaluationResult:
    """Base of results; ``print`` shows the tables of one.

    Args:
        content: Everything ``result.json`` holds; numbers, not strings.
        examples: A few candidates as images, for the report.
    """

    content: Mapping[str, Any]
    examples: Sequence[reports.Example] = field(default=(), repr=False, kw_only=True)

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

    def saved(self, folder: str | os.PathLike[str] | None) -> Self:
        """This result, saved where there is a folder."""
        if folder is not None:
            self.save(folder)
        return self


def framed(
    kind: str,
    given: EvaluationInputs,
    outcomes: Iterable[Outcome[Any]],
    *,
    settings: Mapping[str, Any],
    seed: int,
    seconds: Mapping[str, float],
    **parts: Any,
) -> dict[str, Any]:
    """The parts of ``result.json``, with what those of all labelled samples hold."""
    return {
        "kind": kind,
        "samples": len(given.ids),
        "clean_accuracy": float(given.correct.mean()),
        **parts,
        "settings": {**settings, "bounds": list(given.bounds), **given.described, **current_context().origins},
        "isolated": isolated(outcomes),
        "versions": versions(),
        "seed": seed,
        "seconds": dict(seconds),
    }
