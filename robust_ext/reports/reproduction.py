"""The result of a reproduction: the figures of a paper next to ours."""

from __future__ import annotations

from typing import Any

from robust_ext.core.wording import count, plain
from robust_ext.reports.blocks import Block, Cell, Plot, Report, Row, Section, Table, muted
from robust_ext.reports.plots import MUTED, SCORE, Drawing, line_plot

_AGREES = {True: "yes", False: "no", None: "-"}


def report(result: Row) -> Report:
    """Return the report: a figure a row, and where the rest of the item is."""
    item = plain(result["item"])
    title = f"{item[:1].upper()}{item[1:]}, {plain(result['paper'])}"
    tolerance = f"{result['tolerance']:g}"
    rows = [
        {
            "row": plain(one["name"]),
            "quantity": plain(one["quantity"]),
            "paper": one["paper"] or "-",
            "ours": _number(one["ours"]),
            "difference": _number(one["difference"], sign="+"),
            f"within {tolerance}": Cell(_AGREES[one["agrees"]]),
        }
        for one in result["figures"]
    ]
    drawing = _beside(result)
    table = Table(title=title, rows=rows, words=(0, 1))
    headline = f"{result['agree']} of {count(result['compared'], 'figure')} within {tolerance} of the paper's"
    what = plain(result["what"])
    about = f"{what[:1].upper()}{what[1:]}. Ours: {plain(result['setup'])}."
    where = f"In this project: {plain(result['where']).replace('`', '')}"
    return Report(
        title=title,
        about=title,
        headline=headline,
        first=[Block("words", about), Block("plots", [Plot(drawing)])],
        sections=[Section("The paper's figures and ours", [table, muted(where)], open=True)],
        text=[[f"{title}. {about}"], [table], [f"{headline}. {where}"]],
        badge=("within the tolerance", f"{result['agree']} of {result['compared']}", "number"),
        figure=drawing,
    )


def _beside(result: Row) -> Drawing:
    """Draw our figures against the paper's, with the band of the tolerance; bounds have no place there."""

    def extra(axes: Any) -> None:
        pairs = [(float(one["paper"]), one["ours"]) for one in result["figures"] if one["difference"] is not None]
        ends = [edge(value for pair in [*pairs, (0, 0), (1, 1)] for value in pair) for edge in (min, max)]
        axes.fill_between(ends, *([end + shift for end in ends] for shift in (-width, width)), color=MUTED, alpha=0.2)
        axes.plot(ends, ends, color=MUTED, linewidth=0.8, linestyle=":")
        axes.plot(*zip(*pairs, strict=True) if pairs else ([], []), "o", color=SCORE, markersize=5)

    width, label = result["tolerance"], "Our figures against those of the paper"
    return line_plot([], label=label, size=(4.2, 3.1), extra=extra, xlabel="the paper's", ylabel="ours")


def _number(value: float | None, *, sign: str = "") -> str:
    return "-" if value is None else format(value, f"{sign}.2f")
