"""The hardness of a binarization test: curves over kappa, and the calibration of its settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from robust_ext.core.wording import attack_title, share
from robust_ext.reports.blocks import Block, Plot, Row, Section, Table, muted
from robust_ext.reports.plots import DASHED, MUTED, RANDOM, SCORE, Drawing, Line, ink, line_plot, paper

_HARDNESS = (
    "The same candidates judged with the decision boundary farther from the planted point. The attack was not run "
    "again, so its scores are lower bounds of what it would reach there. Dashed horizontal line: the score needed to "
    "pass."
)


def hardness_plot(
    points: Sequence[tuple[float, float | None, float | None]], threshold: float, *, mark: float | None = None
) -> Drawing:
    """Draw score and R-ASR over 1 - kappa, harder to the right.

    Points are triples of position above 0, score and R-ASR; None leaves a gap. ``threshold`` is the score needed to
    pass, ``mark`` the position of the run itself.
    """
    positions = sorted({point[0] for point in points})
    values = [value for point in points for value in point[1:] if value is not None]
    lines: list[Line] = []
    for index, kind, style in (
        (1, "score", {"color": SCORE, "marker": "o"}),
        # Curves may lie on each other; a hollow marker leaves the one below in sight.
        (2, "R-ASR", {"color": RANDOM, "marker": "o", "linestyle": "--", "markerfacecolor": "none"}),
    ):
        kept = sorted((point[0], value) for point in points if (value := point[index]) is not None)
        lines.append((kind, [x for x, _ in kept], [y for _, y in kept], style))

    def extra(axes: Any) -> None:
        axes.axhline(threshold, color=ink(), linewidth=1.0, linestyle=DASHED)
        if mark is not None:
            axes.axvline(mark, color=MUTED, linewidth=0.8, linestyle=":")
            # Where no point comes near; below the curves in any case.
            height = max((0.1, 0.3, 0.6, 0.75), key=lambda free: min(abs(free - value) for value in values or [1.0]))
            box = {"facecolor": paper(), "edgecolor": "none", "pad": 1}
            axes.text(mark, height, "this run", color=MUTED, ha="center", va="center", bbox=box, zorder=1.5)

    ticks = [positions[0]]
    gap = (positions[-1] / positions[0]) ** 0.16
    for position in positions[1:]:
        # Labels of closer ones would touch.
        if position >= ticks[-1] * gap:
            ticks.append(position)
    words = "1 - kappa (harder to the right)"
    return line_plot(
        lines,
        label=f"Test score and R-ASR against {words}",
        columns=2,
        size=(3.5, 2.1),
        ticks=(ticks, [f"{tick:.4g}" for tick in ticks]),
        extra=extra,
        xscale="log",
        xlabel=words,
        xlim=(positions[-1] * 1.7, positions[0] / 1.7),
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
        mark = place if scores == [attack["score"], attack["random_score"]] else None
        yield Plot(hardness_plot(points, threshold, mark=mark), attack_title(attack))


def hardness_points(rows: Sequence[Row]) -> list[tuple[float, Any, Any]]:
    """Return 1 - kappa, scores and R-ASR; a kappa of 1 has no place on a log axis."""
    return [(1 - row["kappa"], row["score"], row["random_score"]) for row in rows if row["kappa"] < 1]


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
    return [Block("heading", "Calibration"), muted(why), *([table] if calibration["rows"] else [])]
