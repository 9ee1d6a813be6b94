"""How hard a binarization test was: curves over kappa, and the calibration of its settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

from robust_ext.core.wording import attack_title, share
from robust_ext.reports.blocks import Block, Plot, Row, Section, Table, muted
from robust_ext.reports.plots import DASHED, MARKERS, MUTED, RANDOM, SCORE, Drawing, Line, ink, line_plot, paper

_HARDNESS = (
    "The same candidates judged with the decision boundary farther from the planted point. The attack was not run "
    "again, so its scores are lower bounds of what it would reach there. Dashed horizontal line: the score needed to "
    "pass."
)


def hardness_plot(
    curves: Mapping[str, Sequence[tuple[float, float | None, float | None]]],
    threshold: float,
    *,
    axis: str,
    mark: tuple[float, str] | None,
    rising: bool,
) -> Drawing:
    """Draw score and R-ASR over a logarithmic axis, harder to the right; ``rising``: larger positions are harder.

    Curves are triples of position above 0, score and R-ASR by label; None leaves a gap. ``threshold`` is the score
    needed to pass, ``mark`` a position to mark and the words for it.
    """
    everything = [point for points in curves.values() for point in points]
    positions = sorted({point[0] for point in everything})
    values = [value for point in everything for value in point[1:] if value is not None]
    low, high = positions[0] / 1.7, positions[-1] * 1.7
    lines: list[Line] = []
    # All scores first: the legend fills its first column before its second.
    for index, kind, colour, dashes in ((1, "score", SCORE, "-"), (2, "R-ASR", RANDOM, "--")):
        for marker, (label, points) in zip(cycle(MARKERS), curves.items(), strict=False):
            kept = sorted((point[0], value) for point in points if (value := point[index]) is not None)
            # Curves may lie on each other; a hollow marker leaves the one below in sight.
            style = {"color": colour, "linestyle": dashes, "marker": marker}
            style |= {} if index == 1 else {"markerfacecolor": "none"}
            name = f"{kind}, {label}" if len(curves) > 1 else kind
            lines.append((name, [x for x, _ in kept], [y for _, y in kept], style))

    def extra(axes: Any) -> None:
        axes.axhline(threshold, color=ink(), linewidth=1.0, linestyle=DASHED)
        # A mark next to the curves would mark nothing.
        if mark is not None and mark[0] in positions:
            axes.axvline(mark[0], color=MUTED, linewidth=0.8, linestyle=":")
            # Where no point comes near; below the curves in any case.
            height = max((0.1, 0.3, 0.6, 0.75), key=lambda free: min(abs(free - value) for value in values or [1.0]))
            box = {"facecolor": paper(), "edgecolor": "none", "pad": 1}
            axes.text(mark[0], height, mark[1], color=MUTED, ha="center", va="center", bbox=box, zorder=1.5)

    ticks = [positions[0]]
    gap = (positions[-1] / positions[0]) ** 0.16
    for position in positions[1:]:
        # Labels of closer ones would touch.
        if position >= ticks[-1] * gap:
            ticks.append(position)
    words = f"{axis} (harder to the right)"
    return line_plot(
        lines,
        label=f"Test score and R-ASR against {words}",
        columns=2,
        size=(3.5, 2.1),
        ticks=(ticks, [f"{tick:.4g}" for tick in ticks]),
        extra=extra,
        xscale="log",
        xlabel=words,
        xlim=(low, high) if rising else (high, low),
        ylim=(0, 1.02),
        yticks=[0, 0.5, threshold],
        yticklabels=["0", "0.5", f"{threshold:g}"],
    )


def hardness_section(result: Row, tests: Sequence[Row]) -> list[Section]:
    """Return the curves of each attack over kappa, and how the settings were calibrated; nothing without any."""
    threshold, calibration = result["settings"]["threshold"], result["calibration"]
    found: list[Block | Table] = []
    if shown := [plot for one in tests for plot in _hardness_of(one, threshold)]:
        found += [muted(_HARDNESS), Block("plots", shown, "grid")]
    if calibration is not None:
        found += _calibration(calibration, threshold)
    return [Section("How hard was the test?", found)] if found else []


def _hardness_of(attack: Row, threshold: float) -> Iterator[Plot]:
    """Yield the plot of an attack whose candidates were judged at other settings."""
    if points := hardness_points(attack["hardness"]):
        place, *scores = min(points, key=lambda point: point[0])
        # The settings alone do not determine where the run itself stood: kappa has more than one convention.
        mark = (place, "this run") if scores == [attack["score"], attack["random_score"]] else None
        drawing = hardness_plot({"": points}, threshold, axis="1 - kappa", mark=mark, rising=False)
        yield Plot(drawing, attack_title(attack))


def hardness_points(rows: Sequence[Row], axis: str = "kappa") -> list[tuple[float, Any, Any]]:
    """Return positions on an axis, scores and R-ASR; kappa of 1 and a gap of 0 have no place on a log axis."""
    kept = [row for row in rows if _position(row, axis) > 0]
    return [(_position(row, axis), row["score"], row["random_score"]) for row in kept]


def _position(row: Row, axis: str) -> float:
    position: float = 1 - row["kappa"] if axis == "kappa" else row.get(axis, 1)
    return position


# Settings of points that a calibration varies.
_POINTS = ("inner_points", "gap", "boundary_points")


def _calibration(calibration: Row, threshold: float) -> list[Block | Table]:
    chosen, choice = calibration["chosen"], "No setting was chosen."

    def setting(row: Row) -> tuple[Any, ...]:
        return (*(row.get(key) for key in ("kappa", *_POINTS)), row.get("depth", 1))

    if chosen is not None:
        depth = f" at depth {chosen['depth']:g}" if "depth" in chosen else ""
        planted = f", gap {chosen['gap']:g} and {chosen['boundary_points']} planted" if "gap" in chosen else ""
        choice = f"Chosen: kappa {chosen['kappa']} with {chosen['inner_points']} inner points{planted}{depth}."
    why = (
        "Before the test, the attacks were run on a few samples at several settings, to find the hardest one at which "
        f"one of them still reaches {threshold}. {choice} {calibration.get('reason', '')}"
    )
    rows = [
        {
            "attack": row["attack"],
            "kappa": str(row["kappa"]),
            "inner points": row["inner_points"],
            "gap": f"{row.get('gap', 0.05):g}",
            "planted points": row.get("boundary_points", 1),
            "depth": f"{row.get('depth', 1):g}",
            "test score": share(row["score"], threshold),
            "R-ASR": share(row["random_score"], threshold),
            "planted": row["samples"],
            "": "chosen" if chosen is not None and setting(row) == setting(chosen) else "",
        }
        for row in calibration["rows"]
    ]
    table = Table(title="Calibration", rows=rows, words=(0, 9))
    shown = Block("plots", list(_calibration_plots(calibration, threshold)), "grid")
    return [Block("heading", "Calibration"), muted(why), shown, *([table] if calibration["rows"] else [])]


def _alike(row: Row, other: Row, *names: str) -> bool:
    return all(row.get(name) == other.get(name) for name in names)


def _calibration_plots(calibration: Row, threshold: float) -> Iterator[Plot]:
    """Yield a plot for every attack and every axis along which its settings were varied."""
    chosen = calibration["chosen"]
    for name in dict.fromkeys(row["attack"] for row in calibration["rows"]):
        rows = [row for row in calibration["rows"] if row["attack"] == name]
        deeper = [row for row in rows if row.get("depth", 1) > 1]
        # One at a time: each axis has the rows that are like the first in the numbers of other points.
        first, wider, more = (
            [row for row in rows if row not in deeper and _alike(row, rows[0], *others)]
            for others in (("gap", "boundary_points"), ("inner_points", "boundary_points"), ("inner_points", "gap"))
        )
        begin = {(row["kappa"], row["inner_points"]) for row in deeper}
        along_depth = [row for row in rows if (row["kappa"], row["inner_points"]) in begin]
        # Along what settings were varied, what the points of a curve have in common, and its label.
        for axis, words, other, label, along in (
            ("kappa", "1 - kappa", "inner_points", "{} inner points", first),
            ("inner_points", "inner points", "kappa", "kappa {:g}", first),
            ("gap", "gap", "kappa", "kappa {:g}", wider),
            ("boundary_points", "planted points", "kappa", "kappa {:g}", more),
            ("depth", "depth", "kappa", "kappa {:g}", along_depth),
        ):
            curves = {
                label.format(value): hardness_points([row for row in along if row[other] == value], axis)
                for value in sorted({row[other] for row in rows})
            }
            # A curve of one point shows nothing along this axis; it is a point along the other, or in the table.
            curves = {one: points for one, points in curves.items() if len(points) > 1}
            if curves:
                mark = None if chosen is None else (_position(chosen, axis), "chosen")
                drawing = hardness_plot(
                    curves, threshold, axis=words, mark=mark, rising=axis in ("inner_points", "depth")
                )
                yield Plot(drawing, ", ".join([name, *curves]) if len(curves) == 1 else name)
