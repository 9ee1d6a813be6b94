"""Plots of rows of bars and of curves, of which reports have several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from robust_ext.reports.drawing import INK, MARKERS, MUTED, RANDOM, SCORE, Drawing, draw
from robust_ext.reports.wording import plain, shorten

_THRESHOLD = {"color": INK, "linewidth": 1.0, "linestyle": (0, (4, 2))}
# Of a bar, and of the space between two rows of bars, which counts as part of one.
_SLOT, _SPACE = 0.19, 0.45


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar of a row: lengths and colours one after another, and words to its right.

    A hatched one differs from its neighbour without colours too. ``interval`` is a thin line over it, ``mark`` a
    diamond.
    """

    parts: Sequence[tuple[float, str]] = ()
    words: str = ""
    hatched: bool = False
    interval: Sequence[float] | None = None
    mark: float | None = None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Triples of position (above 0), score and R-ASR (None leaves a gap); an only curve needs no label."""

    label: str
    points: Sequence[tuple[float, float | None, float | None]]


def bar_plot(
    rows: Sequence[tuple[str, Sequence[Bar]]],
    *,
    axis: str,
    label: str,
    prefix: str,
    limit: float = 1.0,
    line: tuple[float, str] | None = None,
    beside: float = 0.0,
) -> Drawing:
    """Rows of bars as SVG, each with a name above it, or to its left, where ``beside`` is a width in inches.

    Shares are written in per cent where the words of the axis, which ends at ``limit``, end so. ``line`` is a value
    that bars are compared with, and words for it.
    """
    names: list[str] = []

    def named(text: str, columns: float) -> str:
        names.append(shorten(plain(text), int(columns)))
        return f"name-{len(names) - 1}"

    width = 3.6 - beside
    height = _SLOT * sum(len(entries) + (0 if beside else 1) + _SPACE for _, entries in rows)

    def paint(axes: Any) -> None:
        right = {"transform": axes.get_yaxis_transform(), "va": "center"}
        place = 0.0
        for name, entries in rows:
            if beside:
                # Thirteen columns take an inch.
                axes.text(-0.03, place + len(entries) / 2, named(name, 13 * beside), ha="right", **right)
            else:
                axes.text(0, place + 0.5, named(name, 44), fontweight="bold", **right)
                place += 1
            if line is not None:
                axes.vlines(line[0], place - 0.1, place + len(entries) + 0.1, **_THRESHOLD)
            for bar in entries:
                _paint_bar(axes, bar, place + 0.5)
                if bar.words:
                    axes.text(1.03, place + 0.5, named(bar.words, 22), color=MUTED, **right)
                place += 1
            place += _SPACE
        if line is not None:
            axes.text(line[0], -0.1, line[1], ha="right" if line[0] > 0.5 else "center", va="bottom", color=MUTED)
        axes.set(xlim=(0, limit), ylim=(place, -0.1), yticks=[], xlabel=axis)
        if axis.endswith("per cent"):
            axes.set_xticks([0, limit / 2, limit], ["0", "50", "100"])
        axes.grid(axis="x")
        axes.spines["left"].set_visible(False)

    box = (beside or 0.1, 0.45, width, height)
    return draw(prefix, (box[0] + width + 0.95, height + 0.68), box, paint, label, names)


def _paint_bar(axes: Any, bar: Bar, place: float) -> None:
    start = 0.0
    for length, colour in bar.parts:
        hatch = "////" if bar.hatched else ""
        axes.barh(place, length, left=start, height=0.84, color=colour, hatch=hatch, edgecolor="#ffffff", linewidth=0.6)
        start += length
    if bar.interval is not None:
        ends = {"marker": "|", "markersize": 5, "clip_on": False}
        axes.plot(bar.interval, (place, place), color=INK, linewidth=1.1, **ends)
    if bar.mark is not None:
        marker = {"marker": "D", "markersize": 5, "markerfacecolor": "#ffffff", "clip_on": False}
        axes.plot([bar.mark], [place], linestyle="none", color=RANDOM, markeredgewidth=1.5, **marker)


def curve_plot(
    curves: Sequence[Curve], threshold: float, *, axis: str, mark: tuple[float, str] | None, prefix: str, rising: bool
) -> Drawing:
    """Score and R-ASR over a logarithmic axis, harder to the right, as SVG; ``rising``: larger positions are harder.

    ``threshold`` is the score needed to pass, ``mark`` a position to mark and the words for it.
    """
    positions = sorted({point[0] for curve in curves for point in curve.points})
    values = [value for curve in curves for point in curve.points for value in point[1:] if value is not None] or [1.0]
    low, high = positions[0] / 1.7, positions[-1] * 1.7
    words = f"{axis} (harder to the right)"

    def paint(axes: Any) -> None:
        axes.set_xscale("log")
        # Limits first: they end autoscaling, which warns where all points share one position.
        axes.set(ylim=(0, 1.02), xlabel=words, xlim=(low, high) if rising else (high, low))
        axes.axhline(threshold, **_THRESHOLD)
        # A mark next to the curves would mark nothing.
        if mark is not None and mark[0] in positions:
            axes.axvline(mark[0], color=MUTED, linewidth=0.8, linestyle=":")
            box = {"facecolor": "#ffffff", "edgecolor": "none", "pad": 1}
            # Where no point comes near; below the curves in any case.
            height = max((0.1, 0.3, 0.6, 0.75), key=lambda free: min(abs(free - value) for value in values))
            axes.text(mark[0], height, mark[1], color=MUTED, ha="center", va="center", bbox=box, zorder=1.5)
        # All scores first: the legend fills its first column before its second.
        for index, kind, colour, line in ((1, "score", SCORE, "-"), (2, "R-ASR", RANDOM, "--")):
            for number, curve in enumerate(curves):
                points = sorted(curve.points, key=lambda point: point[0])
                kept = [(point[0], point[index]) for point in points if point[index] is not None]
                axes.plot(
                    [x for x, _ in kept],
                    [y for _, y in kept],
                    line,
                    color=colour,
                    marker=MARKERS[number % len(MARKERS)],
                    # Curves may lie on each other; a hollow marker leaves the one below in sight.
                    markerfacecolor=colour if index == 1 else "#ffffff",
                    label=f"{kind}, {curve.label}" if curve.label else kind,
                    clip_on=False,
                )
        ticks = _spread_ticks(positions)
        axes.set_xticks(ticks, [f"{tick:.4g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_yticks([0, 0.5, threshold], ["0", "0.5", f"{threshold:g}"])
        axes.grid(axis="y")
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.02), ncols=2, frameon=False, borderaxespad=0)

    size = (3.5, 2.12 + 0.2 * len(curves))
    return draw(prefix, size, (0.4, 0.45, 2.95, 1.55), paint, f"Test score and R-ASR against {words}")


def _spread_ticks(positions: Sequence[float]) -> list[float]:
    """Return the sorted positions whose labels do not touch on a logarithmic axis."""
    ticks = [positions[0]]
    gap = (positions[-1] / positions[0]) ** 0.16
    for position in positions[1:]:
        if position >= ticks[-1] * gap:
            ticks.append(position)
    return ticks
