"""What has rows, whichever evaluation it is of: as a data frame, CSV, LaTeX, and in a notebook."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from robust_ext.core.files import replace_file
from robust_ext.reports import tabular
from robust_ext.reports.tabular import Columns, Row

if TYPE_CHECKING:
    import pandas


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
        """One a line of the table: plain values, None where there is none."""

    @property
    @abstractmethod
    def headline(self) -> str:
        """What it comes to, in a few words."""

    @property
    def reason(self) -> str:
        """Why, in a sentence or two; empty where there is nothing to say."""
        return ""

    def to_frame(self) -> pandas.DataFrame:
        """The rows as a data frame of pandas, which is an optional package.

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        frame: pandas.DataFrame = tabular.frame(self.columns, self.rows())
        return frame

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
