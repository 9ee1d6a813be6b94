"""A result as plain text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from robust_ext.reports.pairs import spread_out
from robust_ext.reports.wording import attack_title, cells, check_result, interval, plain, seconds, share, shorten

WIDTH = 110
"""Columns that a table takes at most."""

_GAP = "  "
_NARROWEST_TITLE = 16
_HEADER = ("verdict", "attack", "test score", "R-ASR", "planted", "canaries", "seconds")
_TITLE = _HEADER.index("attack")
_NUMBERS = _HEADER.index("planted")


def table(result: Mapping[str, Any]) -> str:
    """Return the result of a binarization test as text of at most :data:`WIDTH` columns, without colour.

    A row an attack (or two, where it went through the regular and the inverted test): its verdict, its test score and
    the random attack's success rate (R-ASR) with their intervals, the planted problems, the canaries it repaired of
    those there were, and its seconds. Then the reasons and the verdict.

    Args:
        result: The content of ``result.json``, of kind ``"binarization"``.

    Raises:
        InvalidArgumentError: The result is of another kind or has no attacks.
    """
    check_result(result)
    threshold = result["settings"]["threshold"]
    one_target = len({attack["target"] for attack in result["attacks"]}) == 1
    shown = spread_out(result)["attacks"]
    rows = [_HEADER, *(_row(attack, threshold, one_target) for attack in shown)]
    widths = [max(cells(row[column]) for row in rows) for column in range(len(_HEADER))]
    others = sum(widths) - widths[_TITLE] + len(_GAP) * (len(_HEADER) - 1)
    widths[_TITLE] = min(widths[_TITLE], max(WIDTH - others, _NARROWEST_TITLE))
    lines = [_line(row, widths) for row in rows]
    lines.insert(1, "-" * max(map(cells, lines)))
    lines.append("")
    for attack in result["attacks"]:
        both = f" {attack['verdict']}, score {share(attack['score'], threshold)}." if "tests" in attack else ""
        lines.extend(wrap(f"{attack_title(attack)}:{both} {plain(attack['reason'])}"))
    lines.append("")
    lines.extend(wrap(f"Verdict: {result['verdict'].upper()}. {plain(result['reason'])}"))
    return "\n".join(lines) + "\n"


def _row(attack: Mapping[str, Any], threshold: float, one_target: bool) -> tuple[str, ...]:
    """Return the cells of one attack, in the order of the header; a target that all share leaves room for the name."""
    canaries = attack["canaries"]
    return (
        attack["verdict"],
        plain(attack["name"]) if one_target else attack_title(attack),
        f"{share(attack['score'], threshold)} {interval(attack['score_interval'], decimals=2)}".rstrip(),
        f"{share(attack['random_score'], threshold)} {interval(attack['random_score_interval'], decimals=2)}".rstrip(),
        str(attack["samples"]),
        f"{canaries['repaired']} of {canaries['planted']}" if canaries["planted"] else "-",
        seconds(attack["seconds"]["total"]),
    )


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    """Return one row: words flush left, numbers flush right."""
    parts = []
    for column, (text, width) in enumerate(zip(row, widths, strict=True)):
        short = shorten(text, width)
        padding = " " * (width - cells(short))
        parts.append(padding + short if column >= _NUMBERS else short + padding)
    return _GAP.join(parts).rstrip()


def wrap(text: str) -> list[str]:
    """Return ``text`` as lines of at most :data:`WIDTH` columns, later ones indented.

    The standard library's ``textwrap`` counts characters, and wide ones take two columns.
    """
    lines, line = [], ""
    for word in text.split():
        rest = word
        if line.strip() and cells(f"{line} {rest}") <= WIDTH:
            line = f"{line} {rest}"
            continue
        if line:
            lines.append(line)
        line = _GAP if lines else ""
        for char in rest:
            if cells(line + char) > WIDTH:
                lines.append(line)
                line = _GAP
            line += char
    return [*lines, line]
