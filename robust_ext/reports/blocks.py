"""Blocks that reports are made of: a page shows sections of them, and a terminal prints those that are text."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from robust_ext.core import finding_texts as findings
from robust_ext.core.tabular import paragraph, table
from robust_ext.core.wording import percent, plain
from robust_ext.engine.verify import OUTCOMES
from robust_ext.reports.plots import Drawing

Row = Mapping[str, Any]


class Cell(NamedTuple):
    """A cell of a table with a detail next to it; ``look`` is a class or a colour of the style sheet."""

    text: str
    detail: str = ""
    look: str = ""
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under a header; the name of a verdict is shown as a tag.

    Args:
        title: For readers who do not see the table.
        rows: Cells by the titles of their columns: texts, numbers, shares as floats (shown in per cent), None, or cells
            with details; rows need not have all columns.
        words: Columns that hold words rather than numbers.
        hidden: Columns that only a page has.
        terse: Titles of columns whose details only a page has.
        foot: The last row holds totals.
        style: Class of the table in the style sheet.
    """

    title: str
    rows: Sequence[Mapping[str, Any]]
    words: Collection[int] = (0,)
    hidden: Collection[int] = ()
    terse: Collection[str] = ()
    foot: bool = False
    style: str = "stack"

    @cached_property
    def columns(self) -> list[str]:
        """The titles."""
        return list(dict.fromkeys(title for row in self.rows for title in row))

    @property
    def cells(self) -> list[list[Cell]]:
        """The cells of all rows, without the header."""
        return [[_cell(row.get(title, "")) for title in self.columns] for row in self.rows]

    def lines(self) -> list[str]:
        """Return the table as lines for a terminal, none without rows."""
        shown = [place for place in range(len(self.columns)) if place not in self.hidden]
        rows = [tuple(self._words(row[place], self.columns[place]) for place in shown) for row in self.cells]
        header = tuple(self.columns[place] for place in shown)
        words = [place for place, column in enumerate(shown) if column in self.words]
        return table([header, *rows], words=words) if rows else []

    def _words(self, cell: Cell, title: str) -> str:
        # A cell that begins with spaces stands under another.
        indent = "  " if cell.text.startswith("  ") else ""
        return indent + plain(cell.text if title in self.terse else f"{cell.text} {cell.detail}")


def _cell(value: Any) -> Cell:
    if isinstance(value, Cell):
        return value
    return Cell(percent(value) if value is None or isinstance(value, float) else str(value))


class Block(NamedTuple):
    """A part of a section: ``kind`` names how ``page.html.jinja`` shows the content, ``style`` is a class."""

    kind: str
    content: Any
    style: str = ""


Part = Table | str | list[str]
"""A part of a text: a table, a sentence to wrap, or lines."""


class Plot(NamedTuple):
    """A drawing with a title above and a caption below."""

    drawing: Drawing
    title: str = ""
    caption: str = ""


class Section(NamedTuple):
    """Blocks under a title, folded unless open; links lead to the anchor."""

    title: str
    blocks: Sequence[Block | Table]
    anchor: str = ""
    open: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """The visible parts of a result.

    Args:
        title: Of the page.
        about: What was done, in a few words above the headline.
        headline: The answer.
        verdict: How the headline looks: ``passed``, ``failed``, ``inconclusive``, or ``mixed`` where a verdict stands
            although something failed; empty where the answer is a number.
        first: Blocks below the headline.
        sections: The rest of the page.
        text: What a terminal prints: groups of parts with an empty line between them.
        badge: The subject of a badge, its text, and a verdict, or ``"number"`` without one.
        figure: The main figure; None where there is nothing to draw.
    """

    title: str
    about: str
    headline: str
    verdict: str = ""
    first: Sequence[Block | Table]
    sections: Sequence[Section]
    text: Sequence[Sequence[Part]]
    badge: tuple[str, str, str]
    figure: Drawing | None

    def lines(self) -> list[str]:
        """Return the report as lines for a terminal."""
        groups = [[line for part in group for line in _lines(part)] for group in self.text]
        return "\n\n".join("\n".join(lines) for lines in groups if lines).split("\n")


def _lines(part: Part) -> Sequence[str]:
    return part.lines() if isinstance(part, Table) else paragraph(part) if isinstance(part, str) else part


def muted(text: str) -> Block:
    """Return a paragraph that explains."""
    return Block("words", text, "muted")


def evidence(result: Mapping[str, Any], warnings: Sequence[str] = ()) -> list[Section]:
    """Return sections of the findings with evidence and remedies, and of warnings; nothing of what there is none of."""
    order = "In order of weight, those that explain others first: the cause, the evidence for it, and what to do."
    found = findings.shared(result.get("findings", ()))
    parts = {
        "Every finding, with its evidence": [muted(order), Block("findings", found)] if found else [],
        f"Warnings ({len(warnings)})": [Block("list", warnings)] if warnings else [],
    }
    return [Section(title, shown) for title, shown in parts.items() if shown]


# Causes that the first screen names, and what to run next, by kind and verdict, where there is no remedy.
_CAUSES = 3
# Characters in a line of a command.
_LONGEST_LINE = 96
_NEXT = {
    ("binarization", "passed"): "Measure robust accuracy with an attack that passes: robust-ext robust-accuracy.",
    ("binarization", "failed"): "Find the cause, and try its remedies: robust-ext diagnose --try-remedies.",
    ("binarization", "inconclusive"): "Run it again with more samples.",
    ("evaluation", "passed"): "Publish the number with its certificate: see the texts below.",
    ("evaluation", "failed"): "Find out why the attacks miss what is planted: robust-ext diagnose --try-remedies.",
    ("robust_accuracy", ""): "Check that the strongest attack finds what is there: robust-ext binarization.",
    ("test_time", ""): "Run every attack on every sample: robust-ext test-time --full.",
    ("mead", ""): "Attack with arms that know the detector: robust-ext mead --suite white-box.",
}


def command_lines(words: Sequence[str]) -> list[str]:
    """Return the words of a command, quoted for a shell, on lines that fit the page."""
    lines = [words[0]]
    for word in words[1:]:
        key, equals, value = word.partition("=")
        quoted = f"{key}={shlex.quote(value)}" if equals and key.startswith("--") else shlex.quote(word)
        if len(lines[-1]) + len(quoted) > _LONGEST_LINE:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {quoted}"
    return lines


def _step(one: Mapping[str, str]) -> tuple[str, str, list[str]]:
    command = one["command"]
    return "Next", one["words"], command_lines(shlex.split(command)) if command.startswith("robust-ext ") else [command]


def answers(headline: str, result: Mapping[str, Any], repeating: Sequence[str]) -> list[tuple[str, str, list[str]]]:
    """Return causes, remedies, the next step and the command that repeats the run, for the first screen.

    Each has a title, words, and lines to paste. A cause in the headline is not repeated.
    """
    found: list[tuple[str, str, list[str]]] = []
    causes = findings.shared(findings.leading(result.get("findings", ())))
    remedies: dict[str, list[str]] = {}
    for one, names in causes[:_CAUSES]:
        if one["cause"].rstrip(".") not in headline:
            layer = f" Layer {one['layer']}." if one["layer"] and one["layer"] not in one["cause"] else ""
            term = "Cause" if result["kind"] == "diagnosis" or result.get("verdict") == "failed" else "Warning"
            found.append((term, f"{findings.subject(names)}: {one['cause'].rstrip('.')}.{layer}", []))
        untried = [each for each in one["remedies"] if not findings.failed(each)]
        if (words := findings.remedy(one)) and words not in remedies:
            remedies[words] = findings.to_paste(untried[0])
            found.append(("Remedy", words, remedies[words]))
    if len(causes) > _CAUSES:
        found.append(("", f"{len(causes) - _CAUSES} more causes are below, with the evidence for each.", []))
    steps = [_step(one) for one in result.get("next", ())]
    following = _NEXT.get((result["kind"], result.get("verdict", "")), "")
    done = result["settings"].get("full") or any(one.get("white_box") for one in result.get("detectors", ()))
    if following and not any((done, steps, *remedies.values())):
        steps.append(("Next", following, []))
    return [*found, *steps, ("Repeat", "", list(repeating))]


def outcomes(counts: Mapping[str, int]) -> str:
    """Counts of outcomes as text, those that did not occur left out."""
    parts = [
        f"{count} {OUTCOMES[key][0].lower() if key in OUTCOMES else key}" for key, count in counts.items() if count
    ]
    return ", ".join(parts) or "none"
