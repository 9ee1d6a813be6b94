"""Plots of a result: rows of bars, and lines, as an image in a page or on a reader's axes.

Figures are matplotlib's objects, never pyplot's, so that no state of the caller is touched. Names of attacks are drawn
without mathtext, and each image brings its colours for dark pages.
"""

from __future__ import annotations

import base64
import io
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from robust_ext.core.errors import MissingDependencyError
from robust_ext.core.wording import plain, shorten

SCORE, RANDOM, INK, MUTED, REST = "#0072b2", "#d98200", "#1f2933", "#616e7c", "#9aa5b1"
"""Colours told apart by colour-blind readers (after Okabe and Ito), and three greys."""

COLOURS = (SCORE, RANDOM, "#009e73", "#cc79a7", "#56b4e9", "#8a4b08", "#7a5195", MUTED)
"""Colours of things that are compared, in order."""

MARKERS = "osD^v*PX"
DASHED = (0, (4, 2))

DARK = {
    INK: "#e4e7eb",
    MUTED: "#a9b4c0",
    REST: "#6b7885",
    SCORE: "#4fa8e0",
    RANDOM: "#f0a030",
    "#009e73": "#2fc49a",
    "#cc79a7": "#e39ac2",
    "#56b4e9": "#9ad7fb",
    "#8a4b08": "#cf8f4e",
    "#7a5195": "#b892d6",
    "#e4e7eb": "#3a4450",
    "#ffffff": "#1b2128",
}
"""Each colour of a plot, and the one that takes its place on a dark page; the last is the paper."""

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "robust_ext",
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": REST,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.facecolor": "#ffffff",
    "grid.color": "#e4e7eb",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "hatch.color": "#ffffff",
    "hatch.linewidth": 1.2,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawing:
    """A plot that is not drawn yet; the label is for readers who do not see it.

    The size and the margins (left, bottom, right, top) are in inches. Layouts of matplotlib's own draw a plot twice.
    """

    size: tuple[float, float]
    margins: tuple[float, float, float, float]
    paint: Callable[[Any], None]
    label: str

    def image(self) -> str:
        """Return the plot as a data URI of an SVG image, the same for the same plot."""
        file, matplotlib = io.StringIO(), _matplotlib()
        # The defaults first: a page does not depend on the reader's own configuration of matplotlib.
        with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
            # Readers' fonts have glyphs that matplotlib's lack.
            warnings.filterwarnings("ignore", message="Glyph")
            figure = matplotlib.figure.Figure(figsize=self.size)
            self.paint(figure.add_axes(self._box))
            metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            figure.savefig(file, format="svg", transparent=True, metadata=metadata)
        svg = file.getvalue()
        svg = re.sub("|".join(DARK), lambda found: f"var(--c{found[0][1:]}, {found[0]})", svg[svg.index("<svg") :])
        dark = " ".join(f"--c{light[1:]}: {colour};" for light, colour in DARK.items() if light in svg)
        style = f"<style>@media screen and (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>"
        svg = svg.replace("<defs>", f"{style}<defs>", 1)
        return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"

    def on(self, axes: Any = None) -> Any:
        """Draw on matplotlib axes and return them; left out, they are those of a new figure of pyplot."""
        matplotlib = _matplotlib()
        if axes is None:
            from matplotlib import pyplot

            axes = pyplot.figure(figsize=self.size).add_axes(self._box)
        # Lines of a grid are as bright as text on dark ground.
        with matplotlib.rc_context({"font.size": _STYLE["font.size"], "grid.alpha": 0.3}):
            self.paint(axes)
        axes.set_axisbelow(True)
        return axes

    @property
    def _box(self) -> tuple[float, float, float, float]:
        """The place of the axes, as shares of the figure."""
        (width, height), (left, bottom, right, top) = self.size, self.margins
        return left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height


def ink() -> str:
    """Return the colour of text in the current style of matplotlib."""
    return str(_matplotlib().rcParams["text.color"])


def paper() -> str:
    """Return the colour of the ground in the current style of matplotlib."""
    return str(_matplotlib().rcParams["axes.facecolor"])


def write(text: Any, words: str, columns: int = 44) -> None:
    """Set the words of a matplotlib text: on one line of limited width, and never as markup."""
    text.set(text=shorten(plain(words), columns), parse_math=False)


def name_width(names: Iterable[str]) -> float:
    """Return the inches that names to the left of the axes take."""
    from rich.cells import cell_len

    return 0.15 + 0.075 * max((cell_len(shorten(plain(name), 26)) for name in names), default=0)


def name_rows(axes: Any, places: Sequence[float], names: Sequence[str]) -> None:
    """Write names to the left of the axes."""
    axes.set_yticks(places, [shorten(plain(name), 26) for name in names])
    for text in axes.get_yticklabels():
        text.set(color=ink(), parse_math=False)
    axes.tick_params(axis="y", length=0)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar of a row: lengths and colours one after another, and words to its right.

    ``interval`` is a thin line over it, ``mark`` a diamond. What has the colour :data:`RANDOM` is hatched, so that it
    differs without colours too.
    """

    parts: Sequence[tuple[float, str]] = ()
    words: str = ""
    interval: Sequence[float] | None = None
    mark: float | None = None


def bar_plot(
    rows: Sequence[tuple[str, Sequence[Bar]]],
    *,
    axis: str,
    label: str,
    limit: float = 1.0,
    line: tuple[float, str] | None = None,
    key: Mapping[str, str] | None = None,
) -> Drawing:
    """Draw rows of bars, each with a name to its left.

    Shares are written in per cent where the words of the axis, which ends at ``limit``, end so. ``line`` is a value
    that bars are compared with, and words for it; ``key`` has words for the colours.
    """
    count = sum(len(bars) + 0.5 for _, bars in rows)
    height, above = 0.19 * count, 0.2 if line is not None and line[1] else 0.05

    def paint(axes: Any) -> None:
        places, place = [], 0.0
        for _, bars in rows:
            places.append(place + (len(bars) - 1) / 2)
            for bar in bars:
                _paint_bar(axes, bar, place)
                place += 1
            place += 0.5
        name_rows(axes, places, [name for name, _ in rows])
        axes.set(xlim=(0, limit), ylim=(place - 0.9, -0.6), xlabel=axis)
        if line is not None:
            axes.axvline(line[0], color=ink(), linewidth=1.0, linestyle=DASHED)
            axes.annotate(line[1], (line[0], 1), xycoords=axes.get_xaxis_transform(), ha="right", va="bottom")
        if axis.endswith("per cent"):
            axes.set_xticks([0, limit / 2, limit], ["0", "50", "100"])
        axes.grid(axis="x")
        axes.spines["left"].set_visible(False)
        if key:
            from matplotlib.patches import Patch

            patches = [Patch(facecolor=one, hatch="////" * (one == RANDOM), edgecolor=paper()) for one in key]
            add_legend(axes, patches, list(key.values()), columns=3, above=1 + above / height)

    margins = (name_width(name for name, _ in rows), 0.42, 1.0, above + 0.2 * -(-len(key or ()) // 3))
    size = (3.0 + margins[0] + margins[2], height + margins[1] + margins[3])
    return Drawing(size=size, margins=margins, paint=paint, label=label)


def _paint_bar(axes: Any, bar: Bar, place: float) -> None:
    start = 0.0
    for length, colour in bar.parts:
        hatch = "////" if colour == RANDOM else ""
        axes.barh(place, length, left=start, height=0.84, color=colour, hatch=hatch, edgecolor=paper(), linewidth=0.6)
        start += length
    if bar.interval is not None:
        axes.plot(bar.interval, (place, place), color=ink(), linewidth=1.1, marker="|", markersize=5, clip_on=False)
    if bar.mark is not None:
        axes.plot([bar.mark], [place], "D", markersize=5, markerfacecolor=paper(), color=RANDOM, clip_on=False)
    if bar.words:
        right = axes.text(1.03, place, "x", color=MUTED, va="center", transform=axes.get_yaxis_transform())
        write(right, bar.words, 22)


def add_legend(
    axes: Any, handles: Sequence[Any], names: Sequence[str], *, columns: int = 1, above: float = 1.02
) -> None:
    """Add a legend above the axes; names are drawn as they are."""
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.02, above), "borderaxespad": 0}
    look = {"frameon": False, "columnspacing": 1.2, "handlelength": 1.8, "handletextpad": 0.5}
    legend = axes.legend(handles, ["x"] * len(handles), ncols=columns, **place, **look)
    for text, name in zip(legend.get_texts(), names, strict=True):
        write(text, name)


Line = tuple[str, Sequence[float], Sequence[float], Mapping[str, Any]]
"""A name for the legend (empty: none), places, values, and settings of matplotlib's ``plot``."""


def line_plot(
    lines: Sequence[Line],
    *,
    label: str,
    size: tuple[float, float] = (3.7, 2.5),
    columns: int = 1,
    ticks: tuple[Sequence[float], Sequence[str]] | None = None,
    extra: Callable[[Any], None] = lambda axes: None,
    **settings: Any,
) -> Drawing:
    """Draw lines with a legend above them, and then what ``extra`` paints.

    ``ticks`` are those of the horizontal axis and their labels; ``settings`` are those of matplotlib's ``Axes.set``.
    The legend's rows come on top of the size.
    """
    named = [line for line in lines if line[0]]

    def paint(axes: Any) -> None:
        # Limits first: they end autoscaling, which warns where all points share one position.
        axes.set(**settings)
        handles: list[Any] = []
        for number, (name, x, y, style) in enumerate(lines):
            known = {"color": COLOURS[number % len(COLOURS)], "linewidth": 1.5, "clip_on": False, **style}
            drawn = axes.plot(x, y, **{**known, "color": ink() if known["color"] == INK else known["color"]})
            handles += drawn if name else []
        if ticks is not None:
            axes.set_xticks(*ticks)
        axes.minorticks_off()
        axes.grid(axis="y" if settings.get("xscale") == "log" else "both")
        extra(axes)
        if named:
            add_legend(axes, handles, [name for name, *_ in named], columns=columns)

    top = 0.1 + 0.19 * -(-len(named) // columns)
    return Drawing(size=(size[0], size[1] + top), margins=(0.5, 0.42, 0.1, top), paint=paint, label=label)


def _matplotlib() -> Any:
    try:
        import matplotlib.figure
        import matplotlib.style
    except ImportError as error:
        raise MissingDependencyError('Plots need matplotlib: pip install "robust-ext[cli]"') from error
    return matplotlib
