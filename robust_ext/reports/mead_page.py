"""The result of a MEAD run as a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from robust_ext.reports import mead_plots, mead_views
from robust_ext.reports.mead_heat import colour, heat_maps
from robust_ext.reports.mead_views import Group, Row
from robust_ext.reports.wording import OUTCOMES, percent, plain


def context(result: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows."""
    styles = mead_plots.objective_styles(result)
    detectors = [_detector(result, number, detector, styles) for number, detector in enumerate(result["detectors"])]
    return {
        "group_count": len({arm["group"] for arm in result["arms"]}),
        "detectors": detectors,
        "norms": list(dict.fromkeys(norm for one in detectors for norm in one["norms"] if norm != "all")),
        "best": max((one for one in detectors if one["mean"]), key=lambda one: one["mean"]["auroc"], default=None),
        "any_white_box": any(one["white_box"] for one in detectors),
        "columns": [None, *mead_views.objectives(result)],
        "styles": styles,
        "heat_scale": [colour(share / 100) for share in range(0, 101, 10)],
        "notes": mead_views.notes(result),
        "summary_plot": mead_plots.summary_plot(result),
        "cost_plot": mead_plots.cost_plot(result),
        "FEW": mead_views.FEW,
        "outcomes": _outcomes,
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
    """For every norm the entry with the lowest AUROC, of those with an epsilon if any, and the curves beside it."""
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


def _outcomes(outcomes: Mapping[str, int]) -> str:
    """Return counts of outcomes in words, those that did not occur left out."""
    parts = [
        f"{count} {OUTCOMES[key][0].lower() if key in OUTCOMES else key}" for key, count in outcomes.items() if count
    ]
    return ", ".join(parts) or "none"
