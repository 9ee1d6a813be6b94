"""The plots of a diagnosis: where queries went, where budgets end, and how much gradient each layer passes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from robust_ext.reports.drawing import COLOURS, INK, MUTED, RANDOM, SCORE, Drawing, draw
from robust_ext.reports.wording import plain, shorten

# Key of a point of a curve, title and axis.
_CURVES = (
    ("margin", "Margin of the queries", "margin, above 0: adversarial"),
    ("distance", "Distance of the queries", "distance / epsilon"),
)
_SHOWN, _LAYERS = len(COLOURS) - 1, 24


def plots(result: Mapping[str, Any]) -> dict[str, Any]:
    """Titles, SVGs and what their colours mean; parts that there is nothing to show of are empty."""
    curves = [one for one in [*result["attacks"], *result["references"]] if len(one["curve"]) > 1][:_SHOWN]
    return {
        "curves": [(title, _curves(curves, key, title, axis)) for key, title, axis in _CURVES if curves],
        "colours": [(one["name"], COLOURS[number]) for number, one in enumerate(curves)],
        "reach": _reach(result["attacks"]),
        "layers": _layers(result["model"]["probe"].get("layers", ())),
    }


def _curves(shown: Sequence[Mapping[str, Any]], key: str, title: str, axis: str) -> Drawing:
    """Means over the samples at their n-th query, of each attack, over the share of its queries."""

    def paint(axes: Any) -> None:
        for number, attack in enumerate(shown):
            points = [(point["query"], point[key]) for point in attack["curve"] if point[key] is not None]
            last = max(max(point["query"] for point in attack["curve"]), 1)
            axes.plot(
                [100 * query / last for query, _ in points],
                [value for _, value in points],
                color=COLOURS[number],
                linewidth=1.6,
                label=f"name-{number}",
            )
        axes.axhline(0 if key == "margin" else 1, color=MUTED, linewidth=1.0, linestyle=(0, (4, 2)))
        axes.set(xlabel="queries, per cent", ylabel=axis, xlim=(0, 100))
        axes.grid(axis="y")

    names = [plain(attack["name"]) for attack in shown]
    return draw(f"curve-{key}", (3.9, 2.6), (0.6, 0.45, 3.15, 2.05), paint, f"{title} over an attack's queries", names)


def _reach(attacks: Sequence[Mapping[str, Any]]) -> Drawing | None:
    """How far the farthest query of each sample lies from the input, a histogram of all attacks."""
    shown = [attack for attack in attacks if attack["reach"]][:_SHOWN]
    if not shown:
        return None
    most = max(1.2, *(min(value, 3.0) for attack in shown for value in attack["reach"]))

    def paint(axes: Any) -> None:
        values = [[min(value, 3.0) for value in attack["reach"]] for attack in shown]
        axes.hist(values, bins=24, range=(0, most), color=COLOURS[: len(shown)], rwidth=0.9)
        axes.axvline(1, color=MUTED, linewidth=1.0, linestyle=(0, (4, 2)))
        axes.set(xlabel="farthest query / epsilon", ylabel="samples", xlim=(0, most))
        axes.grid(axis="y")

    return draw("reach", (3.9, 2.6), (0.6, 0.45, 3.15, 2.05), paint, "How far each sample's farthest query lies")


def _layers(layers: Sequence[Mapping[str, Any]]) -> Drawing | None:
    """The norm of the gradient that each layer passes on, from the input on; a cross where that is nothing."""
    known = [one for one in layers if one["fault"] or (one["gradient_norm"] is not None and one["leaf"])]
    every = -(-len(known) // _LAYERS)
    known = [one for place, one in enumerate(known) if one["fault"] or place % every == 0]
    # Results of earlier versions have what arrives at each layer alone.
    values = [one.get("passed_norm", one["gradient_norm"]) or 0.0 for one in known]
    positive = [value for value in values if value > 0]
    if not positive:
        return None
    low, high = min(positive) / 10, max(positive) * 3
    names = [shorten(plain(one["name"] or "the model"), 20) for one in known]

    def paint(axes: Any) -> None:
        axes.set_xscale("log")
        axes.set(xlim=(low, high), ylim=(len(known) - 0.4, -0.6), yticks=[], xlabel="gradient norm passed on, per row")
        for place, (one, value) in enumerate(zip(known, values, strict=True)):
            colour = RANDOM if one["fault"] else SCORE
            if value > 0:
                axes.barh(place, value - low, left=low, height=0.7, color=colour)
            else:
                axes.plot([low * 1.25], [place], marker="x", color=colour, markersize=6, markeredgewidth=1.8)
            where = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "center"}
            axes.text(-0.02, place, f"name-{place}", color=INK, **where)
        axes.minorticks_off()
        axes.grid(axis="x")

    height = 0.2 * len(known) + 0.15
    return draw(
        "layers",
        (3.9, height + 0.6),
        (1.5, 0.45, 2.25, height),
        paint,
        "Gradient norm that each layer passes on",
        names,
    )
