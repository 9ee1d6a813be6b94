"""Lines of aligned cells for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from robust_ext.reports.table import WIDTH
from robust_ext.reports.wording import cells, shorten

Line = tuple[str, ...]

GAP = "  "


def layout(rows: Sequence[Line], *, words: Sequence[int]) -> list[str]:
    """Lines of aligned cells with a rule under the first row; where they are too wide, columns of words give way.

    Args:
        rows: Cells, the header first; all rows have as many.
        words: Columns of words, which stand flush left; the others hold numbers, and stand flush right.
    """
    widths = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    while sum(widths) + len(GAP) * (len(widths) - 1) > WIDTH:
        widest = max(words, key=lambda column: widths[column])
        if widths[widest] == 1:
            break
        widths[widest] -= 1
    lines = [line(row, widths, words=words) for row in rows]
    return [lines[0], "-" * max(map(cells, lines)), *lines[1:]]


def line(row: Line, widths: Sequence[int], *, words: Sequence[int]) -> str:
    """One line: words flush left, numbers flush right.

    Args:
        row: Cells.
        widths: Of the columns.
        words: Columns of words.
    """
    parts = []
    for column, (text, width) in enumerate(zip(row, widths, strict=True)):
        short = shorten(text, width)
        padding = " " * (width - cells(short))
        parts.append(short + padding if column in words else padding + short)
    return GAP.join(parts).rstrip()
