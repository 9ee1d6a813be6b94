"""Rows of a result as text, a data frame, CSV, LaTeX, and a fragment of HTML."""

from __future__ import annotations

import csv
import html
import io
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from robust_ext.core.errors import MissingDependencyError, printable
from robust_ext.core.wording import plain, retyped, shorten, typed

WIDTH = 110
"""Columns that a text takes at most, and a table where it is not on a wider terminal."""

Line = tuple[str, ...]

_NARROWEST, _TALLEST = 16, 4


def room() -> int:
    """Return the columns that a table may take: those of the terminal that is written to, :data:`WIDTH` at least."""
    return max(WIDTH, min(shutil.get_terminal_size().columns, 200)) if sys.stdout.isatty() else WIDTH


def table(rows: Sequence[Line], *, words: Collection[int], width: int | None = None) -> list[str]:
    """Lines of aligned cells with a rule under the header, which is the first row.

    Columns of ``words`` stand flush left; where lines are wider than ``width`` (:func:`room` by default), their cells
    go on below, and lose their middle beyond four lines. The others hold numbers, and stand flush right.
    """
    from rich.cells import cell_len

    width = width or room()
    rows = [tuple(retyped(printable(cell)) for cell in row) for row in rows]
    height = max(cell.count("\n") for cell in rows[0]) + 1
    titles = [(cell.split("\n") + [""] * height)[:height] for cell in rows[0]]
    lines = [*zip(*titles, strict=True), *rows[1:]]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    # The widest column of words gives way, or else the widest of all.
    while sum(widths) + 2 * (len(widths) - 1) > width:
        wide = [place for place in words if widths[place] > _NARROWEST] or range(len(widths))
        widths[max(wide, key=widths.__getitem__)] -= 1

    def aligned(text: str, place: int) -> str:
        text = shorten(text, widths[place])
        space = " " * (widths[place] - cell_len(text))
        return text + space if place in words else space + text

    def lines_of(text: str, place: int) -> list[str]:
        if place not in words or cell_len(text) <= widths[place]:
            return [text]
        found, short = _wrapped(text, widths[place]), shorten(text, (_TALLEST - 1) * widths[place])
        return found if len(found) <= _TALLEST else _wrapped(short, widths[place])[:_TALLEST]

    def made(line: Line) -> list[str]:
        cells = [lines_of(cell, place) for place, cell in enumerate(line)]
        return [
            "  ".join(aligned(cell, place) for place, cell in enumerate(one)).rstrip()
            for one in zip_longest(*cells, fillvalue="")
        ]

    head, body = ([text for line in part for text in made(line)] for part in (lines[:height], lines[height:]))
    return [*head, "-" * (sum(widths) + 2 * (len(widths) - 1)), *body]


def _wrapped(text: str, width: int) -> list[str]:
    """``text`` as lines of at most this many columns."""
    from rich.console import Console
    from rich.text import Text

    lines = Text(text).wrap(Console(file=io.StringIO(), force_jupyter=False), width) or [Text(text)]
    return [line.plain.rstrip() for line in lines]


def paragraph(text: str) -> list[str]:
    """``text`` as lines of at most :data:`WIDTH` columns, later ones indented."""
    lines = _wrapped(" ".join(retyped(printable(text)).split()), WIDTH - 2)
    return [f"{'  ' if place else ''}{line}" for place, line in enumerate(lines)]


Cell = str | int | float | bool | None
Row = Mapping[str, Cell]
Columns = Mapping[str, type]
"""Names of columns in order, with the type of their values, any of which may be missing (None)."""

_COLOURS = {"passed": "#009e73", "failed": "#d55e00", "inconclusive": "#e69f00"}
_CELL = "padding: .2em .7em; border: none; border-bottom: 1px solid rgba(128, 128, 128, .35); text-align: "
_ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    **{char: f"\\{char}" for char in "&%$#_{}"},
}


def frame(columns: Columns, rows: Iterable[Row]) -> Any:
    """A ``pandas.DataFrame``; numbers are float64 (NaN where missing), texts objects (None where missing)."""
    try:
        import pandas
    except ImportError as error:
        raise MissingDependencyError("A data frame needs pandas: pip install pandas") from error
    found = list(rows)
    numeric = {name for name, kind in columns.items() if kind in (int, float)}
    return pandas.DataFrame(
        {
            name: pandas.Series([row[name] for row in found], dtype="float64" if name in numeric else "object")
            for name in columns
        }
    )


def csv_text(columns: Columns, rows: Iterable[Row]) -> str:
    """A header and a line a row; numbers in full, empty where missing."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([row[name] for name in columns] for row in rows)
    return file.getvalue()


def latex_text(columns: Columns, rows: Sequence[Row], shown: Sequence[str]) -> str:
    """A ``tabular`` with the rules of booktabs; all text is escaped."""
    header, lines, numeric = _cells(columns, rows, shown)
    # A bracket at the start of a line would be an argument of the line break before it.
    body = [("{}" if line[0].startswith("[") else "") + " & ".join(map(escaped_latex, line)) + r" \\" for line in lines]
    spec = "".join("r" if number else "l" for number in numeric)
    head = " & ".join(map(escaped_latex, header)) + r" \\"
    return "\n".join(
        [rf"\begin{{tabular}}{{{spec}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", ""]
    )


def html_fragment(
    headline: str, reason: str, columns: Columns, rows: Sequence[Row], shown: Sequence[str], *, verdict: str | None
) -> str:
    """An element for a notebook: a headline, a table, and a reason; colours are those around it, dark or light."""
    header, lines, numeric = _cells(columns, rows, shown)
    sides = ["right" if number else "left" for number in numeric]

    def row(cells: Iterable[str], tag: str) -> str:
        parts = (
            f'<{tag} style="{_CELL}{side}">{html.escape(cell)}</{tag}>' for cell, side in zip(cells, sides, strict=True)
        )
        return f'<tr style="background: transparent">{"".join(parts)}</tr>'

    colour = _COLOURS.get(verdict or "", "#808080")
    return (
        f'<div style="border-left: .3em solid {colour}; padding: .1em 0 .1em .9em; margin: .4em 0">'
        f'<div style="font-weight: bold; font-size: 1.1em">{html.escape(plain(headline))}</div>'
        f'<div style="overflow-x: auto"><table style="border-collapse: collapse; color: inherit; margin: .5em 0">'
        f"<thead>{row(header, 'th')}</thead><tbody>{''.join(row(line, 'td') for line in lines)}</tbody></table></div>"
        f'<div style="opacity: .8; max-width: 60em">{html.escape(plain(reason))}</div></div>'
    )


def _cells(
    columns: Columns, rows: Sequence[Row], shown: Sequence[str]
) -> tuple[list[str], list[list[str]], list[bool]]:
    """Header, cells, and which columns hold numbers; those that are missing in all rows are left out."""
    kept = [name for name in shown if any(row[name] is not None for row in rows)]
    lines = [[_cell(row, name) for name in kept] for row in rows]
    return [name.replace("_", " ") for name in kept], lines, [columns[name] in (int, float) for name in kept]


def _cell(row: Row, name: str) -> str:
    """A value, with its interval where there is one."""
    value = row[name]
    if value is None:
        return "-"
    if isinstance(value, float):
        ends = (row.get(f"{name}_low"), row.get(f"{name}_high"))
        if None not in ends:
            return f"{value:.3f} [{ends[0]:.3f}, {ends[1]:.3f}]"
        return typed(value) if name == "epsilon" else f"{value:.4g}"
    return plain(value)


def escaped_latex(text: str) -> str:
    """``text`` with what LaTeX would take for commands escaped."""
    return re.sub(r'[\\~^<>|"&%$#_{}]', lambda match: _ESCAPES[match[0]], text)
