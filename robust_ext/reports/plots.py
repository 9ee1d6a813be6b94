"""Plots of a result as SVG text that can stand inside a page.

Figures are made with matplotlib's objects, never through pyplot, so that no state of the caller is touched. Text is
left to the fonts of the page. Names of attacks are put in after drawing: they are nobody's markup, and matplotlib
neither reads dollar signs in them nor misses their glyphs.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from robust_ext.core.errors import MissingDependencyError
from robust_ext.reports.wording import PHASES, attack_title, seconds, share, shorten

SCORE, RANDOM, INK, MUTED = "#0072b2", "#d98200", "#1f2933", "#616e7c"
"""Colours told apart by colour-blind readers (after Okabe and Ito), and two greys."""

PHASE_COLOURS = dict(zip(PHASES, ("#12355b", "#0072b2", "#d98200", "#56b4e9", "#9aa5b1"), strict=True))
REST_COLOUR = "#e4e7eb"

_STYLE = {
    "svg.fonttype": "none",
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": "#9aa5b1",
    "axes.linewidth": 0.8,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e4e7eb",
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.minor.visible": False,
    "legend.columnspacing": 1.2,
    "legend.handlelength": 1.8,
    "legend.handletextpad": 0.5,
    "hatch.color": "white",
    "hatch.linewidth": 1.2,
}
_THRESHOLD = {"color": INK, "linewidth": 1.0, "linestyle": (0, (4, 2))}
_TITLE_COLUMNS = 44
_MARKERS = "osD^v*PX"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Test score and R-ASR along one axis.

    Args:
        label: What the points have in common; empty where there is only one curve.
        points: Triples of position (above 0), score and R-ASR, where None leaves a gap.
    """

    label: str
    points: Sequence[tuple[float, float | None, float | None]]


def score_plot(result: Mapping[str, Any]) -> str:
    """Return bars of every attack's test score and R-ASR, with their intervals and the threshold, as SVG."""
    attacks, threshold = result["attacks"], result["settings"]["threshold"]
    height = 0.72 * len(attacks)

    def paint(axes: Any) -> None:
        for row, attack in enumerate(attacks):
            axes.text(0, row - 0.34, f"name-{row}", va="center", fontweight="bold")
            for kind, words, offset, colour, hatch in (
                ("score", "score", -0.06, SCORE, ""),
                ("random_score", "R-ASR", 0.2, RANDOM, "////"),
            ):
                value, bounds, place = attack[kind], attack[f"{kind}_interval"], row + offset
                shown = "no" if value is None else share(value, threshold)
                axes.text(1.03, place, f"{shown} {words}", va="center", color=MUTED)
                if value is None:
                    continue
                axes.barh(place, value, height=0.22, color=colour, hatch=hatch)
                if bounds is not None:
                    ends = {"marker": "|", "markersize": 5, "clip_on": False}
                    axes.plot(bounds, (place, place), color=INK, linewidth=1.1, **ends)
        # A line for each row, so that it does not run through the names.
        rows = range(len(attacks))
        axes.vlines([threshold] * len(attacks), [row - 0.2 for row in rows], [row + 0.34 for row in rows], **_THRESHOLD)
        axes.text(threshold, -0.62, f"pass from {threshold:g}", ha="right", va="bottom", color=INK)
        axes.set(xlim=(0, 1), ylim=(len(attacks) - 0.55, -0.58), yticks=[], xlabel="share of planted problems solved")
        axes.grid(axis="x")
        axes.spines["left"].set_visible(False)

    names = [shorten(attack_title(attack), _TITLE_COLUMNS) for attack in attacks]
    box = (0.1, 0.48, 2.98, height)
    return draw("score", (4.0, height + 0.72), box, paint, "Test score and R-ASR of each attack", names)


def seconds_plot(result: Mapping[str, Any]) -> str:
    """Return stacked bars of every attack's seconds by phase as SVG."""
    attacks = result["attacks"]
    height = 0.46 * len(attacks)

    def paint(axes: Any) -> None:
        longest = max(*(attack["seconds"]["total"] for attack in attacks), 1e-9)
        for row, attack in enumerate(attacks):
            taken, start = attack["seconds"], 0.0
            parts = [(taken[phase], colour) for phase, colour in PHASE_COLOURS.items()]
            rest = max(taken["total"] - sum(part for part, _ in parts), 0.0)
            for part, colour in (*parts, (rest, REST_COLOUR)):
                axes.barh(row + 0.12, part, left=start, height=0.34, color=colour, edgecolor="white", linewidth=0.6)
                start += part
            axes.text(0, row - 0.24, f"name-{row}", va="center", fontweight="bold")
            across = {"transform": axes.get_yaxis_transform(), "va": "center", "color": MUTED}
            axes.text(1.03, row + 0.12, f"{seconds(taken['total'])} s", **across)
        axes.set(xlim=(0, longest), ylim=(len(attacks) - 0.6, -0.48), yticks=[], xlabel="seconds")
        axes.grid(axis="x")
        axes.spines["left"].set_visible(False)

    names = [shorten(attack_title(attack), _TITLE_COLUMNS) for attack in attacks]
    box = (0.1, 0.48, 3.25, height)
    return draw("seconds", (4.0, height + 0.55), box, paint, "Seconds of each attack by phase", names)


def closeness_plot(curves: Sequence[Curve], threshold: float, *, mark: tuple[float, str] | None, prefix: str) -> str:
    """Return score and R-ASR against 1 - kappa, harder to the right, as SVG.

    Args:
        curves: With positions of 1 - kappa.
        threshold: The score needed to pass.
        mark: A value of 1 - kappa to mark and the words for it, if any.
        prefix: Makes the identifiers of this SVG unique in a page.
    """
    return _curves(curves, threshold, "1 - kappa (harder to the right)", mark, prefix, harder_to_the_right=False)


def inner_points_plot(curves: Sequence[Curve], threshold: float, *, mark: tuple[float, str] | None, prefix: str) -> str:
    """Return score and R-ASR against the number of inner points, harder to the right, as SVG.

    Args:
        curves: With positions of numbers of inner points.
        threshold: The score needed to pass.
        mark: A number of inner points to mark and the words for it, if any.
        prefix: Makes the identifiers of this SVG unique in a page.
    """
    return _curves(curves, threshold, "inner points (harder to the right)", mark, prefix, harder_to_the_right=True)


def _curves(
    curves: Sequence[Curve],
    threshold: float,
    x_label: str,
    mark: tuple[float, str] | None,
    prefix: str,
    *,
    harder_to_the_right: bool,
) -> str:
    """Return curves over a logarithmic axis as SVG; larger positions go left unless they are the harder ones."""
    positions = sorted({point[0] for curve in curves for point in curve.points})
    values = [value for curve in curves for point in curve.points for value in point[1:] if value is not None] or [1.0]
    low, high = positions[0] / 1.7, positions[-1] * 1.7

    def paint(axes: Any) -> None:
        axes.set_xscale("log")
        # Limits first: they end autoscaling, which warns where all points share one position.
        axes.set(ylim=(0, 1.02), xlabel=x_label, xlim=(low, high) if harder_to_the_right else (high, low))
        axes.axhline(threshold, **_THRESHOLD)
        # A mark beside the curves would mark nothing.
        if mark is not None and mark[0] in positions:
            place, words = mark
            axes.axvline(place, color=MUTED, linewidth=0.8, linestyle=":")
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            # Where no point comes near; below the curves in any case.
            height = max((0.1, 0.3, 0.6, 0.75), key=lambda free: min(abs(free - value) for value in values))
            axes.text(place, height, words, color=MUTED, ha="center", va="center", bbox=box, zorder=1.5)
        # All scores first: the legend fills its first column before its second.
        for index, words, colour, line in ((1, "score", SCORE, "-"), (2, "R-ASR", RANDOM, "--")):
            for number, curve in enumerate(curves):
                marker, points = _MARKERS[number % len(_MARKERS)], sorted(curve.points, key=lambda point: point[0])
                kept = [(point[0], point[index]) for point in points if point[index] is not None]
                label = f"{words}, {curve.label}" if curve.label else words
                axes.plot(
                    [x for x, _ in kept],
                    [y for _, y in kept],
                    line,
                    color=colour,
                    marker=marker,
                    # Curves may lie on each other; a hollow marker leaves the one below in sight.
                    markerfacecolor=colour if index == 1 else "white",
                    label=label,
                    clip_on=False,
                )
        ticks = _spread_ticks(positions)
        axes.set_xticks(ticks, [f"{tick:.4g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_yticks([0, 0.5, threshold], ["0", "0.5", f"{threshold:g}"])
        axes.grid(axis="y")
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.02), ncols=2, frameon=False, borderaxespad=0)

    legend = 0.2 * len(curves)
    box = (0.4, 0.45, 2.95, 1.55)
    return draw(prefix, (3.5, 2.12 + legend), box, paint, f"Test score and R-ASR against {x_label}", ())


def _spread_ticks(positions: Sequence[float]) -> list[float]:
    """Return those of the sorted positions whose labels do not touch on a logarithmic axis."""
    ticks = [positions[0]]
    gap = (positions[-1] / positions[0]) ** 0.16
    for position in positions[1:]:
        if position >= ticks[-1] * gap:
            ticks.append(position)
    return ticks


def draw(
    prefix: str,
    size: tuple[float, float],
    box: tuple[float, float, float, float],
    paint: Callable[[Any], None],
    label: str,
    names: Sequence[str],
) -> str:
    """Return what ``paint`` draws as an SVG element without a fixed size.

    Args:
        prefix: Put before every identifier, because all plots of a page share one name space.
        size: Width and height in inches.
        box: Left, bottom, width and height of the axes in inches.
        paint: Draws on the axes; writes ``name-0``, ``name-1``, ... where a name belongs.
        label: Said to readers who do not see the plot.
        names: The names.
    """
    try:
        import matplotlib.style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError('Plots in a report need matplotlib: pip install "robust-ext[cli]"') from error

    file = io.StringIO()
    # The defaults first: a page does not depend on the reader's own matplotlib configuration.
    with matplotlib.style.context(["default", {**_STYLE, "svg.hashsalt": prefix}]):
        figure = Figure(figsize=size)
        left, bottom, width, height = box
        paint(figure.add_axes((left / size[0], bottom / size[1], width / size[0], height / size[1])))
        figure.savefig(
            file,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    # Comments repeat the texts, and the style sheet would hold for the whole page.
    svg = re.sub(r"<!--.*?-->|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    opening = re.search(r'viewBox="[^"]*"', svg)
    if opening is None:
        raise RuntimeError("matplotlib wrote an SVG without a viewBox")
    attributes = f'{opening[0]} xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    opened = f'<svg {attributes} role="img" aria-label="{html.escape(label)}">'
    # A function, as a backslash in the label would be read as an escape.
    svg = re.sub(r"<svg[^>]*>", lambda _: opened, svg, count=1)
    svg = re.sub(r">name-(\d+)<", lambda match: f">{html.escape(names[int(match[1])])}<", svg)
    return svg.strip()
