"""Results as plain text for a terminal: tables laid out by rich, and paragraphs."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from robust_ext.core.printable import printable
from robust_ext.reports.wording import retyped, shorten

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.measure import Measurement

WIDTH = 110
"""Columns that a table takes at most."""

Line = tuple[str, ...]

_NARROWEST = 16
# No lines but one under the header; a cell's padding and the space between two columns make a gap of two.
_BOX = "    \n    \n -- \n    \n    \n    \n    \n    \n"


def table(rows: Sequence[Line], *, words: Collection[int], width: int = WIDTH) -> list[str]:
    """Lines of aligned cells with a rule under the header, which is the first row.

    Columns of ``words`` stand flush left; where lines are wider than ``width``, their cells lose their middle. The
    others hold numbers, and stand flush right.
    """
    from rich.box import Box
    from rich.table import Table
    from rich.text import Text

    rows = [tuple(retyped(printable(cell)) for cell in row) for row in rows]
    grid = Table(box=Box(_BOX), show_edge=False, padding=(0, 1, 0, 0), pad_edge=False, header_style="")
    for column, title in enumerate(rows[0]):
        if column in words:
            grid.add_column(Text(title))
        else:
            grid.add_column(Text(title), justify="right", no_wrap=True, overflow="ellipsis")
    for row in rows[1:]:
        grid.add_row(*(_Words(cell) if column in words else Text(cell) for column, cell in enumerate(row)))
    return _lines(grid, width)


def paragraph(text: str) -> list[str]:
    """``text`` as lines of at most :data:`WIDTH` columns, later ones indented."""
    from rich.text import Text

    first, *others = _lines(Text(" ".join(retyped(printable(text)).split())), WIDTH - 2) or [""]
    return [first, *(f"  {line}" for line in others)]


class _Words:
    """A cell on one line, which loses its middle where it is too long."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.cells import cell_len
        from rich.measure import Measurement

        width = cell_len(self.text)
        return Measurement(min(width, _NARROWEST), width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[str]:
        from rich.text import Text

        yield Text(shorten(self.text, options.max_width))  # type: ignore[misc]


def _lines(renderable: Any, width: int) -> list[str]:
    from rich.console import Console

    file = io.StringIO()
    # In a notebook rich would display what it prints in place of writing it to the file.
    console = Console(
        file=file, width=width, color_system=None, force_terminal=False, force_jupyter=False, legacy_windows=False
    )
    console.print(renderable)
    return [line.rstrip() for line in file.getvalue().splitlines()]
