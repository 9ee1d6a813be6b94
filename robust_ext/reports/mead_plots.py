"""Plots of a MEAD result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from robust_ext.reports.drawing import COLOURS, INK, RANDOM, REST, SCORE, Drawing, draw
from robust_ext.reports.mead_views import Group, Row, averages_of, largest_attribution, objectives, short_arm
from robust_ext.reports.plots import Bar, bar_plot
from robust_ext.reports.wording import percent, seconds, shorten

LINES = ("solid", "5 2", "5 2 1.2 2", "1.3 1.5")
"""Dashes of the objectives' curves, as SVG writes them, so that they differ without colour too."""

Styles = Mapping[str, tuple[str, str]]

_BESIDE = 1.15


def objective_styles(result: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Colour and dashes of every objective of a result, in its order."""
    names = [row["objective"] for detector in result["detectors"] for row in detector["results"]]
    known = dict.fromkeys([*objectives(result), *(name for name in names if name is not None)])
    return {name: (COLOURS[place % 6], LINES[place % len(LINES)]) for place, name in enumerate(known)}


def summary_plot(result: Mapping[str, Any]) -> Drawing:
    """Bars of every detector's mean AUROC, with that of its worst single objective as a diamond."""
    rows = []
    for detector in result["detectors"]:
        averages = averages_of(result, detector["name"])
        means = {objective: row["auroc"] for (norm, objective), row in averages.items() if norm == "all"}
        multi = means.pop(None, None)
        lowest = min((value for value in means.values() if value is not None), default=None)
        rows.append((detector["name"], [_auroc_bar(multi, SCORE, mark=lowest)]))
    label = "Mean AUROC of each detector, in per cent"
    return bar_plot(rows, axis="AUROC, per cent", label=label, prefix="mead-summary", line=(0.5, "guessing"))


def _auroc_bar(value: float | None, colour: str, **more: Any) -> Bar:
    words = "no AUROC" if value is None else percent(value)
    return Bar(parts=[] if value is None else [(value, colour)], words=words, hatched=colour == RANDOM, **more)


def roc_plot(rows: Sequence[tuple[str | None, Row]], styles: Styles, *, label: str, prefix: str) -> Drawing:
    """Curves of true over false positive rates; ``rows`` are objectives (None: all arms together) and their entries."""

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

    return draw(prefix, (2.35, 2.2), (0.34, 0.42, 1.86, 1.7), paint, label)


def attribution_plot(
    groups: Sequence[Group], arms: Mapping[str, Row], styles: Styles, detector: str, number: int
) -> Drawing:
    """A stacked bar a group: the attribution by objective past a detector, and the arm with the largest."""
    rows = []
    for group in groups:
        row = group.blind or {}
        parts = dict.fromkeys([*styles, None], 0.0)
        for arm, part in row["attribution"].items():
            parts[arms[arm]["objective"] if arm in arms else None] += part
        coloured = [(part, REST if name is None else styles[name][0]) for name, part in parts.items() if part]
        most = largest_attribution(row)
        words = "" if most is None else f"{percent(most[1])} {shorten(short_arm(most[0], group.name), 13)}"
        rows.append((group.name, [Bar(parts=coloured, words=words)]))
    axis = "share of samples where it scored lowest, per cent"
    label = f"Attribution by group, past detector {detector}"
    return bar_plot(rows, axis=axis, label=label, prefix=f"attribution-{number}", beside=_BESIDE)


def white_box_plot(groups: Sequence[Group], detector: str, number: int) -> Drawing:
    """For every group the AUROC of blind arms against a detector, and with white-box arms besides."""

    def bar(row: Row | None, colour: str) -> Bar:
        if row is None:
            return Bar(words="no arms")
        return _auroc_bar(row["auroc"], colour, interval=row["auroc_interval"])

    rows = [(group.name, [bar(group.blind, SCORE), bar(group.with_white_box, RANDOM)]) for group in groups]
    label, prefix = f"Blind and white-box arms against detector {detector}", f"white-{number}"
    return bar_plot(rows, axis="AUROC, per cent", label=label, prefix=prefix, line=(0.5, ""), beside=_BESIDE)


def cost_plot(result: Mapping[str, Any]) -> Drawing:
    """Bars of the seconds of every group of arms and of every detector's scoring."""
    attacks: dict[str, float] = {}
    for arm in result["arms"]:
        attacks[arm["group"]] = attacks.get(arm["group"], 0.0) + arm["seconds"]
    scoring = [(detector["name"], detector["seconds"]) for detector in result["detectors"]]
    taken = [*((*pair, SCORE) for pair in attacks.items()), *((*pair, RANDOM) for pair in scoring)]
    rows = [
        (name, [Bar(parts=[(time, colour)], words=f"{seconds(time)} s", hatched=colour == RANDOM)])
        for name, time, colour in taken
    ]
    longest = max(*(time for _, time, _ in taken), 1e-9)
    label = "Seconds of each group of arms and each detector"
    return bar_plot(rows, axis="seconds", label=label, prefix="mead-cost", limit=longest, beside=_BESIDE)
