"""Results of evaluations, as objects and as rows of tables."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import Self

from robust_ext.core import tabular
from robust_ext.core.errors import DataError, with_collected
from robust_ext.core.examples import Example
from robust_ext.core.files import replace_file
from robust_ext.core.tabular import Columns, Row
from robust_ext.engine.context import current_context
from robust_ext.engine.evaluation_file import close_evaluation
from robust_ext.engine.identity import versions
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.engine.run import Outcome, isolated
from robust_ext.evaluations.causes.finding import Finding

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes


class Tabular(ABC):
    """Base of what has rows with the same columns."""

    columns: ClassVar[Columns]
    """Of :meth:`rows`: name and type of each."""
    keys: ClassVar[Sequence[str]]
    """Columns that tell rows apart."""
    shown: ClassVar[Sequence[str]]
    """Columns of tables for readers; an interval stands beside its number."""

    @abstractmethod
    def rows(self) -> list[Row]:
        """One a line of the table: plain values, None without one."""

    @property
    @abstractmethod
    def headline(self) -> str:
        """The result in a few words."""

    @property
    def reason(self) -> str:
        """Why, in a sentence or two; empty where there is nothing to say."""
        return ""

    def to_frame(self) -> pandas.DataFrame:
        """The rows as a data frame of pandas, which is an optional package.

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        return tabular.frame(self.columns, self.rows())

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """The rows as CSV, with a header; written to a file where a path is given.

        Raises:
            DataError: The file cannot be written.
        """
        text = tabular.csv_text(self.columns, self.rows())
        if path is not None:
            replace_file(Path(path), text)
        return text

    def to_latex(self) -> str:
        """A ``tabular`` for LaTeX with the package booktabs; text is escaped."""
        return tabular.latex_text(self.columns, self.rows(), self.shown)

    def _repr_html_(self) -> str:
        verdict = getattr(self, "verdict", None)
        return tabular.html_fragment(self.headline, self.reason, self.columns, self.rows(), self.shown, verdict=verdict)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.headline}>"


# Values measured by a clock.
_MEASURED = ("time", "seconds", "seconds_ratio")


@dataclass(frozen=True, eq=False, repr=False)
class EvaluationResult(Tabular):
    """Base of results; ``print`` shows the tables of one, and a notebook its verdict and a table.

    Results are equal if they are of one kind and their contents are equal, as ``result.json`` would hold them, except
    for the time that they took and, next to a result without a run folder, the digests of model and code.

    Args:
        content: Everything ``result.json`` holds; numbers, not strings.
        examples: A few candidates as images, for the report.
        records: One a sample, in order, where the evaluation keeps them with its result.
    """

    content: Mapping[str, Any]
    examples: Sequence[Example] = field(default=(), kw_only=True)
    records: Sequence[Mapping[str, Any]] = field(default=(), kw_only=True)

    kind: ClassVar[str]
    """What ``result.json`` calls it."""
    value: ClassVar[str]
    """The column of scores."""

    def __str__(self) -> str:
        return str(_reports().report_text(self.content))

    def __repr__(self) -> str:
        # A process that did its share of another one's run has none.
        return super().__repr__() if self.content else f"<{type(self).__name__}: made by another process>"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self) or self._canonical() != other._canonical():
            return False
        ours, theirs = (one.content.get("settings", {}) for one in (self, other))
        compared = ours.keys() | theirs.keys()
        if ("model" in ours) != ("model" in theirs):
            # Only a run folder has digests of model, code and detectors; without them all else is compared.
            compared = (ours.keys() & theirs.keys()) - {"detectors"}
        return all(_plain(ours.get(key)) == _plain(theirs.get(key)) for key in compared)

    def __hash__(self) -> int:
        return hash(self._canonical())

    @property
    def reason(self) -> str:
        """Why, in a sentence or two."""
        found = [self.content.get("reason") or "", *_reports().leading_sentences(self.content)]
        return next((words for words in found if words), "")

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Faults of attacks and model, in order of weight, explanatory ones first."""
        return tuple(Finding.from_dict(one) for one in self.content.get("findings", ()))

    def row(self, **found: Any) -> Row:
        """A row of these values, None in columns without one."""
        return {name: found.get(name) for name in self.columns}

    def solved(self) -> dict[tuple[Any, ...], dict[int, bool]]:
        """Return whether each sample counts in a row's score, by the row's keys and its id, where known."""
        return {}

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the main figure of the report's page, with matplotlib.

        Args:
            ax: Axes to draw on; those of a new pyplot figure when left out.

        Returns:
            The axes, which hold all that a reader may want to change (title, limits, ``ax.figure.savefig``).

        Raises:
            MissingDependencyError: matplotlib is not installed.
        """
        axes: Axes = _reports().figure(self.content).on(ax)
        return axes

    def to_dict(self) -> dict[str, Any]:
        """The content, as a dict of its own."""
        return dict(self.content)

    def to_html(self) -> str:
        """One self-contained page."""
        return str(_reports().report_page(self.content, self.examples))

    def badge(self) -> str:
        """A small SVG for a README, with the verdict or the main number."""
        return str(_reports().badge(self.content))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``result.json``, ``report.html`` and ``badge.svg`` to a folder."""
        _reports().save(self.content, folder, self.examples)

    def saved(self, folder: str | os.PathLike[str] | None) -> Self:
        """Return this result with the warnings issued while it was made, saved where there is a folder."""
        warnings = with_collected(self.content.get("warnings", ()))
        result = replace(self, content={**self.content, "warnings": warnings}) if warnings else self
        if folder is not None:
            result.save(folder)
            close_evaluation(Path(folder))
        return result

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The result of a run folder, see :func:`robust_ext.load_result`.

        Raises:
            DataError: There is none, it is damaged, of a newer version of this package, or of another kind.
        """
        from robust_ext.evaluations.unfinished import load_result

        found = load_result(path)
        if not isinstance(found, cls):
            raise DataError(f"{os.fspath(path)}: holds a {type(found).__name__}, not a {cls.__name__}")
        return found

    def _canonical(self) -> str:
        """The content but for its settings as text, the same for tuples and lists, and in any order of keys."""
        return json.dumps(_plain({**self.content, "settings": None}), sort_keys=True)


def _reports() -> Any:
    """Return what shows results: it reads them, and they are made without it."""
    from robust_ext import reports

    return reports


def _plain(value: Any) -> Any:
    """A value with dicts for mappings, without what differs whenever it is measured."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items() if key not in _MEASURED}
    return list(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def bounds_of(value: str, interval: Sequence[float] | None) -> dict[str, float | None]:
    """The ends of an interval as columns ``VALUE_low`` and ``VALUE_high``."""
    low, high = (None, None) if interval is None else interval
    return {f"{value}_low": low, f"{value}_high": high}


def framed(
    kind: str,
    given: EvaluationInputs,
    outcomes: Iterable[Outcome[Any]],
    *,
    settings: Mapping[str, Any],
    seed: int,
    time: Mapping[str, Any],
    **parts: Any,
) -> dict[str, Any]:
    """The parts of ``result.json``, with what all those of labelled samples hold."""
    criterion = {} if given.plain else {"criterion": given.criterion.words}
    return {
        "kind": kind,
        "samples": len(given.ids),
        **criterion,
        **parts,
        "settings": {
            **settings,
            "bounds": list(given.bounds),
            **given.threat_model.of_entries,
            **given.described,
            **current_context().origins,
        },
        "isolated": isolated(outcomes),
        "versions": versions(),
        "seed": seed,
        "time": dict(time),
    }
