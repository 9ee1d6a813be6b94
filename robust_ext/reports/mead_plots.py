"""Plots of a MEAD result as SVG text that can stand inside a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from robust_ext.reports.mead_views import (
    Group,
    Row,
    averages_of,
    most_blamed,
    objectives,
    percent,
    short_arm,
)
from robust_ext.reports.plots import INK, MUTED, RANDOM, SCORE, draw
from robust_ext.reports.wording import plain, seconds, shorten

LINES = ("solid", "5 2", "5 2 1.2 2", "1.3 1.5")
"""Dashes of the objectives' curves, as SVG writes them, so that they differ without colour too."""

COLOURS = ("#0072b2", "#d98200", "#009e73", "#cc79a7", "#56b4e9", "#8a4b08")
"""Colours of the objectives, told apart by colour-blind readers (after Okabe and Ito)."""

NO_OBJECTIVE = "#9aa5b1"

_GUESSING = {"color": MUTED, "linewidth": 0.8, "linestyle": ":"}
_NAME_COLUMNS = 16
_ARM_COLUMNS = 13
_ROW = 0.21


def objective_styles(result: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Colour and dashes of every objective of a result, in its order."""
    names = [row["objective"] for detector in result["detectors"] for row in detector["results"]]
    known = dict.fromkeys([*objectives(result), *(name for name in names if name is not None)])
    return {name: (COLOURS[place % len(COLOURS)], LINES[place % len(LINES)]) for place, name in enumerate(known)}


def summary_plot(result: Mapping[str, Any]) -> str:
    """Return bars of every detector's mean AUROC, with that of its worst single objective, as SVG."""
    detectors = result["detectors"]
    height = 0.5 * len(detectors)

    def paint(axes: Any) -> None:
        # A line for each bar, so that it does not run through the names.
        rows = range(len(detectors))
        axes.vlines([0.5] * len(rows), [row - 0.08 for row in rows], [row + 0.34 for row in rows], **_GUESSING)
        axes.text(0.5, -0.62, "guessing", ha="center", va="bottom", color=MUTED)
        for row, detector in enumerate(detectors):
            averages = averages_of(result, detector["name"])
            means = {objective: row["auroc"] for (norm, objective), row in averages.items() if norm == "all"}
            multi = means.pop(None, None)
            singles = [value for value in means.values() if value is not None]
            axes.text(0, row - 0.26, f"name-{row}", va="center", fontweight="bold")
            words = "no AUROC" if multi is None else percent(multi)
            axes.text(1.03, row + 0.12, words, va="center", color=MUTED)
            if multi is not None:
                axes.barh(row + 0.12, multi, height=0.34, color=SCORE)
            if singles:
                marker = {"marker": "D", "markersize": 5, "markerfacecolor": "white", "clip_on": False}
                axes.plot([min(singles)], [row + 0.12], linestyle="none", color=RANDOM, markeredgewidth=1.5, **marker)
        axes.set(xlim=(0, 1), ylim=(len(detectors) - 0.6, -0.55), yticks=[], xlabel="AUROC, per cent")
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100"])
        axes.spines["left"].set_visible(False)

    names = [shorten(plain(detector["name"]), 44) for detector in detectors]
    box = (0.1, 0.45, 3.4, height)
    return draw("mead-summary", (4.0, height + 0.68), box, paint, "Mean AUROC of each detector, in per cent", names)


def roc_plot(
    rows: Sequence[tuple[str | None, Row]], styles: Mapping[str, tuple[str, str]], *, label: str, prefix: str
) -> str:
    """Return curves of true over false positive rates as SVG.

    Args:
        rows: Objectives (None: all arms together) and their entries, each with a curve of at least one point.
        styles: As :func:`objective_styles` gives them.
        label: Said to readers who do not see the plot.
        prefix: Makes the identifiers of this SVG unique in a page.
    """

    def paint(axes: Any) -> None:
        axes.plot([0, 1], [0, 1], color="#c3cad2", linewidth=0.8)
        # All arms last, so that their curve lies on top.
        for objective, row in sorted(rows, key=lambda pair: pair[0] is None):
            x, y = row["curve"]["fpr"], row["curve"]["tpr"]
            if objective is None:
                axes.plot(x, y, color=INK, linewidth=2.2)
            else:
                colour, dashes = styles[objective]
                line = "-" if dashes == "solid" else (0, tuple(float(part) for part in dashes.split()))
                axes.plot(x, y, color=colour, linewidth=1.3, linestyle=line)
        axes.set(xlim=(0, 1), ylim=(0, 1.01), xlabel="natural flagged, per cent", ylabel="caught, per cent")
        axes.set_xticks([0, 0.5, 1], ["0", "50", "100"])
        # The label stands where a middle number would.
        axes.set_yticks([0, 0.5, 1], ["0", "", "100"])
        axes.yaxis.labelpad = -9
        axes.grid()

    return draw(prefix, (2.35, 2.2), (0.34, 0.42, 1.86, 1.7), paint, label, ())


def blame_plot(
    groups: Sequence[Group], arms: Mapping[str, Row], styles: Mapping[str, tuple[str, str]], *, label: str, prefix: str
) -> str:
    """Return a stacked bar a group as SVG: how the blame falls on the objectives, and the arm with most of it.

    Args:
        groups: With blame.
        arms: The arms by name.
        styles: As :func:`objective_styles` gives them.
        label: Said to readers who do not see the plot.
        prefix: Makes the identifiers of this SVG unique in a page.
    """
    names: list[str] = []
    height = _ROW * len(groups)

    def paint(axes: Any) -> None:
        for place, group in enumerate(groups):
            row = group.blind or {}
            parts = dict.fromkeys([*styles, None], 0.0)
            for arm, part in row["blame"].items():
                parts[arms[arm]["objective"] if arm in arms else None] += part
            start = 0.0
            for objective, part in parts.items():
                colour = NO_OBJECTIVE if objective is None else styles[objective][0]
                if part:
                    axes.barh(place, part, left=start, height=0.66, color=colour, edgecolor="white", linewidth=0.7)
                start += part
            axes.text(-0.03, place, f"name-{len(names)}", ha="right", va="center")
            names.append(shorten(plain(group.name), _NAME_COLUMNS))
            if (most := most_blamed(row)) is not None:
                axes.text(1.03, place, f"name-{len(names)}", va="center", color=MUTED)
                names.append(f"{percent(most[1])} {shorten(short_arm(most[0], group.name), _ARM_COLUMNS)}")
        _rows(axes, len(groups), "share of samples where it scored lowest, per cent")

    return draw(prefix, (4.3, height + 0.6), (1.15, 0.5, 1.85, height), paint, label, names)


def white_box_plot(groups: Sequence[Group], *, label: str, prefix: str) -> str:
    """Return for every group the AUROC of blind arms, and with white-box arms besides, as bars in SVG.

    Args:
        groups: With white-box arms.
        label: Said to readers who do not see the plot.
        prefix: Makes the identifiers of this SVG unique in a page.
    """
    height = 1.6 * _ROW * len(groups)

    def paint(axes: Any) -> None:
        axes.axvline(0.5, **_GUESSING)
        for place, group in enumerate(groups):
            axes.text(-0.03, place, f"name-{place}", ha="right", va="center")
            for row, offset, colour, hatch in (
                (group.blind, -0.19, SCORE, ""),
                (group.with_white_box, 0.19, RANDOM, "////"),
            ):
                value = None if row is None else row["auroc"]
                words = "no arms" if row is None else "no AUROC" if value is None else percent(value)
                axes.text(1.03, place + offset, words, va="center", color=MUTED)
                if row is None or value is None:
                    continue
                axes.barh(place + offset, value, height=0.34, color=colour, hatch=hatch)
                if row["auroc_interval"] is not None:
                    ends = {"marker": "|", "markersize": 4, "clip_on": False}
                    axes.plot(row["auroc_interval"], [place + offset] * 2, color=INK, linewidth=1.0, **ends)
        _rows(axes, len(groups), "AUROC, per cent")

    names = [shorten(plain(group.name), _NAME_COLUMNS) for group in groups]
    return draw(prefix, (4.3, height + 0.6), (1.15, 0.5, 2.5, height), paint, label, names)


def cost_plot(result: Mapping[str, Any]) -> str:
    """Return bars of the seconds of every group of arms and of every detector's scoring, as SVG."""
    attacks: dict[str, float] = {}
    for arm in result["arms"]:
        attacks[arm["group"]] = attacks.get(arm["group"], 0.0) + arm["seconds"]
    scoring = [(detector["name"], detector["seconds"]) for detector in result["detectors"]]
    bars = [*((*pair, SCORE) for pair in attacks.items()), *((*pair, RANDOM) for pair in scoring)]
    height = _ROW * len(bars)

    def paint(axes: Any) -> None:
        for place, (_, taken, colour) in enumerate(bars):
            axes.barh(place, taken, height=0.66, color=colour, hatch="" if colour == SCORE else "////")
            axes.text(-0.02, place, f"name-{place}", ha="right", va="center", transform=axes.get_yaxis_transform())
            axes.text(
                1.03, place, f"{seconds(taken)} s", va="center", color=MUTED, transform=axes.get_yaxis_transform()
            )
        axes.set(xlim=(0, max(*(taken for _, taken, _ in bars), 1e-9)), yticks=[], xlabel="seconds")
        axes.set_ylim(len(bars) - 0.5, -0.5)
        axes.grid(axis="x")
        axes.spines["left"].set_visible(False)

    names = [shorten(plain(name), 20) for name, _, _ in bars]
    box = (1.3, 0.45, 2.3, height)
    return draw("mead-cost", (4.3, height + 0.55), box, paint, "Seconds of each group of arms and each detector", names)


def _rows(axes: Any, count: int, words: str) -> None:
    """Set up axes of shares with a row for each of so many bars, the first at the top."""
    axes.set(xlim=(0, 1), ylim=(count - 0.5, -0.5), yticks=[], xlabel=words)
    axes.set_xticks([0, 0.5, 1], ["0", "50", "100"])
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
