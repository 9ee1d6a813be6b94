"""The result of a MEAD run as a page, with heat maps of every arm's AUROC against each detector."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from robust_ext.reports import findings, mead_plots, mead_views
from robust_ext.reports.mead_views import Group, Row
from robust_ext.reports.wording import percent, plain, typed


class Cell(NamedTuple):
    """One arm: its AUROC in per cent, a colour (None with too few positives), its full name and positives."""

    words: str
    colour: str | None
    title: str


class HeatMap(NamedTuple):
    """The arms of one norm: epsilons as text (``"-"``: without one), and rows with a name and a cell a column."""

    norm: str | None
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]


def context(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the page's content."""
    styles = mead_plots.objective_styles(result)
    detectors = [_detector(result, number, detector, styles) for number, detector in enumerate(result["detectors"])]
    norms = list(dict.fromkeys(norm for one in detectors for norm in one["norms"] if norm != "all"))
    return {
        "group_count": len({arm["group"] for arm in result["arms"]}),
        "detectors": detectors,
        "norms": norms,
        "of_norms": [f"AUROC, {'no norm' if norm is None else norm}" for norm in norms],
        "best": max((one for one in detectors if one["mean"]), key=lambda one: one["mean"]["auroc"], default=None),
        "any_white_box": any(one["white_box"] for one in detectors),
        "columns": [None, *mead_views.objectives(result)],
        "styles": styles,
        "heat_scale": [colour(share / 100) for share in range(0, 101, 10)],
        "notes": [*mead_views.notes(result), *findings.sentences(result.get("findings", ()))],
        "summary_plot": mead_plots.summary_plot(result),
        "cost_plot": mead_plots.cost_plot(result),
        "FEW": mead_views.FEW,
        "percent_interval": mead_views.percent_interval,
        "objective_title": mead_views.objective_title,
        "norm_title": mead_views.norm_title,
        "short_arm": mead_views.short_arm,
    }


def _detector(result: Mapping[str, Any], number: int, detector: Row, styles: mead_plots.Styles) -> dict[str, Any]:
    """Everything that the page shows of one detector."""
    averages = mead_views.averages_of(result, detector["name"])
    groups = mead_views.groups_of(detector)
    mean = averages.get(("all", None))
    attributed = [group for group in groups if group.blind is not None and mead_views.largest_attribution(group.blind)]
    known = [group for group in groups if group.with_white_box is not None]
    arms = {arm["name"]: arm for arm in result["arms"]}
    name = plain(detector["name"])
    return {
        "entry": detector,
        "averages": averages,
        "norms": mead_views.norms_of(averages),
        "mean": mean if mean is not None and mean["auroc"] is not None else None,
        "lowest": mead_views.lowest_row(group.blind for group in groups),
        "worst": mead_views.lowest_row(row for group in groups for _, row in group.scenarios),
        "lowest_known": mead_views.lowest_row(group.with_white_box for group in groups),
        "groups": [
            (group, words, row, mead_views.largest_attribution(row))
            for group in groups
            for words, row in group.scenarios
        ],
        "published": any(row.get("published") for row in detector["results"]),
        "white_box": known,
        "roc": [
            (group, mead_plots.roc_plot(rows, styles, label=_roc_label(name, rows), prefix=f"roc-{number}-{place}"))
            for place, (group, rows) in enumerate(_panels(groups))
        ],
        "heat": heat_maps(result, detector),
        "attribution_plot": attributed and mead_plots.attribution_plot(attributed, arms, styles, name, number),
        "white_box_plot": known and mead_plots.white_box_plot(known, name, number),
    }


def _panels(groups: Sequence[Group]) -> Iterable[tuple[Row, list[tuple[str | None, Row]]]]:
    """For every norm the entry with the lowest AUROC, of those with an epsilon if any, and the curves next to it."""
    drawn = {group.name: group.blind for group in groups if group.blind is not None and _has_curve(group.blind)}
    singles = {group.name: group.objectives for group in groups}
    for norm in dict.fromkeys(row["norm"] for row in drawn.values()):
        rows = [row for row in drawn.values() if row["norm"] == norm]
        lowest = mead_views.lowest_row([row for row in rows if row["epsilon"] is not None] or rows)
        if lowest is not None:
            others = [(name, row) for name, row in singles[lowest["group"]].items() if _has_curve(row)]
            yield lowest, [*others, (None, lowest)]


def _has_curve(row: Row) -> bool:
    return row["auroc"] is not None and bool((row.get("curve") or {}).get("fpr"))


def _roc_label(name: str, rows: Sequence[tuple[str | None, Row]]) -> str:
    numbers = ", ".join(f"{mead_views.objective_title(objective)} {percent(row['auroc'])}" for objective, row in rows)
    return f"ROC curves of detector {name}, group {plain(rows[-1][1]['group'])}; AUROC: {numbers}"


def heat_maps(result: Mapping[str, Any], detector: Row) -> list[HeatMap]:
    """The heat maps of a detector, one a norm, in the order of the result's arms."""
    known = {arm["name"]: arm for arm in result["arms"]}
    norms: dict[str | None, list[tuple[Row, Row]]] = {}
    for numbers in detector["arms"]:
        arm = known.get(numbers["arm"])
        if arm is not None:
            norms.setdefault(arm["norm"], []).append((arm, numbers))
    return [_heat_map(norm, pairs) for norm, pairs in norms.items()]


def _heat_map(norm: str | None, pairs: list[tuple[Row, Row]]) -> HeatMap:
    epsilons = sorted({arm["epsilon"] for arm, _ in pairs if arm["epsilon"] is not None})
    columns = [*epsilons, *([None] if any(arm["epsilon"] is None for arm, _ in pairs) else [])]
    rows: dict[str, dict[float | None, Cell]] = {}
    # Arms adaptive to the detector, and those without an objective, come after the others.
    for arm, numbers in sorted(
        pairs, key=lambda pair: (pair[0]["adaptive_to"] is not None, pair[0]["objective"] is None)
    ):
        name = mead_views.short_arm(arm["name"], arm["group"], arm["adaptive_to"])
        name += "" if arm["adaptive_to"] is None else " (white-box)"
        place = arm["epsilon"]
        if place in rows.get(name, {}):
            name = f"{name} ({arm['name']})"
        rows.setdefault(name, {})[place] = _cell(arm, numbers)
    return HeatMap(
        norm=norm,
        columns=tuple("-" if epsilon is None else typed(epsilon) for epsilon in columns),
        rows=tuple((name, tuple(cells.get(epsilon) for epsilon in columns)) for name, cells in rows.items()),
    )


def _cell(arm: Row, numbers: Row) -> Cell:
    positives, auroc = numbers["positives"], numbers["auroc"]
    return Cell(
        words=percent(auroc),
        colour=None if auroc is None or positives < mead_views.FEW else colour(auroc),
        title=f"{arm['name']}: AUROC {percent(auroc)}, {positives} positives",
    )


def colour(share: float) -> str:
    """The colour of an AUROC in [0, 1], as a style sheet writes it, from those that the page has for 0, 0.5 and 1."""
    return (
        f"color-mix(in srgb, var(--{'high' if share >= 0.5 else 'low'}) {abs(200 * share - 100):.3g}%, var(--middle))"
    )
