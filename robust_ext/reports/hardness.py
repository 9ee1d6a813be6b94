"""Plots of a binarization test's hardness, its calibration and its depths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from robust_ext.reports.drawing import COLOURS, INK, MARKERS, MUTED, Drawing, draw
from robust_ext.reports.plots import Curve, curve_plot
from robust_ext.reports.wording import attack_title, plain, shorten

# Attacks in one plot; more would not be told apart.
_CURVES = len(COLOURS)


def depth_words(attack: Mapping[str, Any]) -> str:
    """The depth up to which an attack solves what is proved, with a plus where nothing deeper was posed to it."""
    depth, depths = attack.get("depth"), attack.get("depths") or []
    if depth is None:
        return "-"
    return f"{depth:g}{'+' if depth == depths[-1]['depth'] else ''}"


def depth_plots(result: Mapping[str, Any]) -> Iterator[tuple[str, Drawing]]:
    """A title and a plot for every few attacks with deeper problems; one title where one plot holds all."""
    attacks = [attack for attack in result["attacks"] if len(attack.get("depths") or []) > 1]
    groups = [attacks[start : start + _CURVES] for start in range(0, len(attacks), _CURVES)]
    for number, group in enumerate(groups):
        title = "" if len(groups) == 1 else f"Attacks {number * _CURVES + 1} to {number * _CURVES + len(group)}"
        depths = {row["depth"] for attack in group for row in attack["depths"]} | {
            *result["settings"].get("depths", ())
        }
        yield title, _plot_depth(group, sorted(depths), f"depth-{number}")


def _plot_depth(attacks: Sequence[Mapping[str, Any]], depths: Sequence[float], prefix: str) -> Drawing:
    """The share of samples that each attack solves at every depth, and the share that is proved to be solvable."""
    names: list[str] = []

    def named(text: str) -> str:
        names.append(shorten(plain(text), 44))
        return f"name-{len(names) - 1}"

    def paint(axes: Any) -> None:
        axes.set_xscale("log")
        axes.set(ylim=(0, 1.02), xlim=(depths[0] / 1.15, depths[-1] * 1.15), xlabel="depth of the boundary")
        # Attacks may have been stopped after other samples; what is proved is shown for the one that took most.
        most = max(attacks, key=lambda attack: attack["samples"])
        style = {"color": INK, "linewidth": 4.5, "alpha": 0.25, "solid_capstyle": "round"}
        axes.plot(*_shares(most, depths, "problems"), label="proved by witnesses", **style)
        for number, attack in enumerate(attacks):
            style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
            line = "-" if number % 2 == 0 else "--"
            axes.plot(
                *_shares(attack, depths, "found"), line, label=named(attack_title(attack)), clip_on=False, **style
            )
        axes.set_xticks(list(depths), [f"{depth:g}" for depth in depths])
        axes.minorticks_off()
        axes.set_yticks([0, 0.5, 1], ["0", "0.5", "1"])
        axes.grid(axis="y")
        axes.tick_params(colors=MUTED)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.02), ncols=1, frameon=False, borderaxespad=0)

    height = 2.12 + 0.2 * (len(attacks) + 1)
    label = "Share of planted samples solved against the depth of the boundary"
    return draw(prefix, (3.5, height), (0.4, 0.45, 2.95, 1.55), paint, label, names)


def _shares(attack: Mapping[str, Any], depths: Sequence[float], key: str) -> tuple[list[float], list[float]]:
    """Positions and shares of an attack's samples; 0 at depths at which nothing was posed to it."""
    shares = {row["depth"]: row[key] / (row.get("samples", attack["samples"]) or 1) for row in attack["depths"]}
    return list(depths), [shares.get(depth, 0.0) for depth in depths]


# Along what settings were varied, what the points of a curve have in common, and its label.
_AXES = (
    ("kappa", "inner_points", "{} inner points"),
    ("inner_points", "kappa", "kappa {:g}"),
    ("depth", "kappa", "kappa {:g}"),
)


def hardness_plots(result: Mapping[str, Any]) -> Iterator[tuple[str, Drawing]]:
    """A title and a plot for every attack whose candidates were judged at other settings."""
    for number, attack in enumerate(result["attacks"]):
        curve = _curve("", attack["hardness"], "kappa")
        if not curve.points:
            continue
        place, *scores = min(curve.points, key=lambda point: point[0])
        # The settings alone do not determine where the run itself stood: kappa has more than one convention.
        mark = (place, "this run") if scores == [attack["score"], attack["random_score"]] else None
        yield attack_title(attack), _plot(result, [curve], "kappa", mark, f"hardness-{number}")


def calibration_plots(result: Mapping[str, Any]) -> Iterator[tuple[str, Drawing]]:
    """A title and a plot for every attack and every axis along which its settings were varied."""
    calibration = result["calibration"] or {"chosen": None, "rows": ()}
    chosen = calibration["chosen"]
    for number, name in enumerate(dict.fromkeys(row["attack"] for row in calibration["rows"])):
        rows = [row for row in calibration["rows"] if row["attack"] == name]
        for axis, other, label in _AXES:
            curves = [
                _curve(label.format(value), [row for row in _along(axis, rows) if row[other] == value], axis)
                for value in sorted({row[other] for row in rows})
            ]
            # A curve of one point shows nothing along this axis; it is a point along the other, or in the table.
            title, curves = name, [curve for curve in curves if len(curve.points) > 1]
            if len(curves) == 1:
                # There is more room in the title than in the legend.
                title, curves = f"{name}, {curves[0].label}", [replace(curves[0], label="")]
            if curves:
                mark = None if chosen is None else (_position(chosen, axis), "chosen")
                yield title, _plot(result, curves, axis, mark, f"{axis.partition('_')[0]}-{number}")


def _along(axis: str, rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The rows of curves along an axis: deeper ones along the depth alone, with those at whose setting they begin."""
    deeper = [row for row in rows if row.get("depth", 1) > 1]
    if axis != "depth":
        return [row for row in rows if row not in deeper]
    begin = {(row["kappa"], row["inner_points"]) for row in deeper}
    return [row for row in rows if (row["kappa"], row["inner_points"]) in begin]


def _position(row: Mapping[str, Any], axis: str) -> float:
    position: float = 1 - row["kappa"] if axis == "kappa" else row.get(axis, 1)
    return position


def _curve(label: str, rows: Sequence[Mapping[str, Any]], axis: str) -> Curve:
    """Score and R-ASR along an axis; kappa of 1 is the planted point itself and has no place on a log axis."""
    kept = [row for row in rows if axis != "kappa" or row["kappa"] < 1]
    return Curve(label=label, points=[(_position(row, axis), row["score"], row["random_score"]) for row in kept])


def _plot(
    result: Mapping[str, Any], curves: Sequence[Curve], axis: str, mark: tuple[float, str] | None, prefix: str
) -> Drawing:
    words = "1 - kappa" if axis == "kappa" else axis.replace("_", " ")
    threshold = result["settings"]["threshold"]
    return curve_plot(curves, threshold, axis=words, mark=mark, prefix=prefix, rising=axis != "kappa")
