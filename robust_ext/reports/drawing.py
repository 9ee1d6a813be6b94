"""Drawings of a result: colours, style, and a plot as SVG text in a page or on a reader's axes.

Figures are made with matplotlib's objects, never through pyplot, so that no state of the caller is touched. Text is
left to the fonts of the page, colours to its scheme. Names of attacks are put in after drawing: they are nobody's
markup, and matplotlib neither reads dollar signs in them nor misses their glyphs.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from robust_ext.core.errors import MissingDependencyError

SCORE, RANDOM, INK, MUTED, REST = "#0072b2", "#d98200", "#1f2933", "#616e7c", "#9aa5b1"
"""Colours told apart by colour-blind readers (after Okabe and Ito), and three greys."""

COLOURS = (SCORE, RANDOM, "#009e73", "#cc79a7", "#56b4e9", "#8a4b08", "#7a5195", MUTED)
"""Colours of things that are compared, in order."""

MARKERS = "osD^v*PX"

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
    "#12355b": "#c3cfe8",
    "#c3cad2": "#4b5663",
    "#e4e7eb": "#3a4450",
    "#ffffff": "#1b2128",
}
"""Each colour of plots and of keys to them, and what takes its place on a dark page; the last is the paper."""

_STYLE = {
    "svg.fonttype": "none",
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": REST,
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
    "hatch.color": "#ffffff",
    "hatch.linewidth": 1.2,
}


def themed(colour: str) -> str:
    """A colour of :data:`DARK` as a style sheet writes it: the page decides, and without one it is that of paper."""
    return f"var(--plot-{colour[1:]}, {colour})"


def draw(
    prefix: str,
    size: tuple[float, float],
    box: tuple[float, float, float, float],
    paint: Callable[[Any], None],
    label: str,
    names: Sequence[str] = (),
) -> Drawing:
    """Draw ``paint`` on axes in ``box``, in inches like ``size``; see :class:`Drawing`."""
    return Drawing(prefix=prefix, size=size, box=box, paint=paint, label=label, names=names)


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawing:
    """A plot that is not drawn yet: a page draws it as SVG, a notebook on axes of its own.

    The prefix stands before every identifier, because all plots of a page share one name space. ``paint`` may fill
    ``names``, and writes ``name-0``, ``name-1``, ... where one belongs. The label is for readers who do not see it.
    """

    prefix: str
    size: tuple[float, float]
    box: tuple[float, float, float, float]
    paint: Callable[[Any], None]
    label: str
    names: Sequence[str] = ()

    def __html__(self) -> str:
        """An SVG element without a fixed size, which is how a template writes it."""
        file = io.StringIO()
        # The defaults first: a page does not depend on the reader's own matplotlib configuration.
        with _matplotlib().style.context(["default", {**_STYLE, "svg.hashsalt": self.prefix}]):
            figure = _matplotlib().figure.Figure(figsize=self.size)
            self.paint(figure.add_axes(self._box))
            metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            figure.savefig(file, format="svg", transparent=True, metadata=metadata)
        svg = file.getvalue()
        svg = svg[svg.index("<svg") :]
        # Comments repeat the texts, and the style sheet would hold for the whole page.
        svg = re.sub(r"<!--.*?-->|<style.*?</style>", "", svg, flags=re.DOTALL)
        svg = re.sub(r'style="[^"]*"|fill="#[^"]*"', lambda found: re.sub("#[0-9a-f]{6}", _themed, found[0]), svg)
        svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{self.prefix}-", svg)
        spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        opened = f'{spaces} role="img" aria-label="{html.escape(self.label)}">'
        # A function, as a backslash in the label would be read as an escape.
        svg = re.sub(r'<svg[^>]*(viewBox="[^"]*")[^>]*>', lambda match: f"<svg {match[1]} {opened}", svg, count=1)
        return re.sub(r">name-(\d+)<", lambda match: f">{html.escape(self.names[int(match[1])])}<", svg).strip()

    def on(self, axes: Any = None) -> Any:
        """Draw on matplotlib axes; returns them.

        Left out, they are those of a new figure of pyplot. Dark lines take the reader's colour of text.
        """
        matplotlib = _matplotlib()
        if axes is None:
            from matplotlib import pyplot

            axes = pyplot.figure(figsize=self.size).add_axes(self._box)
        # Lines of a grid are as bright as text on dark ground.
        with matplotlib.rc_context({"font.size": _STYLE["font.size"], "grid.alpha": 0.3}):
            self.paint(axes)
        axes.set_axisbelow(True)
        ink = matplotlib.rcParams["text.color"]
        for artist in (*axes.lines, *axes.collections, *axes.texts):
            if hasattr(artist, "get_color") and matplotlib.colors.same_color(artist.get_color(), INK):
                artist.set_color(ink)
        # A page has a key of its own.
        legend = axes.get_legend() or (axes.legend() if axes.get_legend_handles_labels()[0] else None)
        for text in [*axes.texts, *(legend.get_texts() if legend else ())]:
            if named := re.fullmatch(r"name-(\d+)", text.get_text()):
                text.set(text=self.names[int(named[1])], parse_math=False)
        return axes

    @property
    def _box(self) -> tuple[float, float, float, float]:
        """The place of the axes, as shares of the figure."""
        (left, bottom, width, height), size = self.box, self.size
        return left / size[0], bottom / size[1], width / size[0], height / size[1]


def _matplotlib() -> Any:
    try:
        import matplotlib.colors
        import matplotlib.figure
        import matplotlib.style
    except ImportError as error:
        raise MissingDependencyError('Plots need matplotlib: pip install "robust-ext[cli]"') from error
    return matplotlib


def _themed(found: re.Match[str]) -> str:
    return themed(found[0])
