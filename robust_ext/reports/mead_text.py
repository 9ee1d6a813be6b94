"""The result of a MEAD run as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from robust_ext.reports import findings
from robust_ext.reports import mead_views as views
from robust_ext.reports.mead_views import Averages, Row, averages_of, groups_of, objective_title
from robust_ext.reports.tabular import Line, paragraph, table
from robust_ext.reports.wording import count, percent, plain, shorten

_TITLE = 15


def text(result: Mapping[str, Any]) -> str:
    """Numbers in per cent: first a row a detector, averaged over the groups of attacks (the paper's table 3).

    Then for each detector the averages by norm of all arms and of each objective (tables 1 and 2), and a row a group
    of arms. Then what makes numbers rough.
    """
    setup, others = findings.divided(result.get("findings", ()))
    lines = [*paragraph(_opening(result)), *findings.lines(setup), "", *_summary(result)]
    for detector in result["detectors"]:
        lines += ["", *paragraph(f"{plain(detector['name'])}: averages by norm"), *_averages(result, detector)]
        if rows := _groups(detector):
            lines += ["", *rows]
    for note in views.notes(result):
        lines += ["", *paragraph(note)]
    if found := findings.lines(others):
        lines += ["", *found]
    return "\n".join(lines) + "\n"


def _opening(result: Mapping[str, Any]) -> str:
    arms = result["arms"]
    naturals = "all natural samples count" if result["naturals"] == "kept" else "misclassified samples are left out"
    return (
        f"MEAD, suite {plain(result['suite'])}: {result['samples']} samples, clean accuracy "
        f"{percent(result['clean_accuracy'])}%, {count(len(arms), 'arm')} in "
        f"{count(len({arm['group'] for arm in arms}), 'group')}; {naturals}. All numbers are per cent."
    )


def _summary(result: Mapping[str, Any]) -> list[str]:
    rows: list[Line] = [
        ("detector", "AUROC", "FPR95", "TPR5", "lowest AUROC", "of group", "with white-box", "of group")
    ]
    for detector in result["detectors"]:
        mean = averages_of(result, detector["name"]).get(("all", None), {})
        groups = groups_of(detector)
        numbers = (percent(mean.get(key)) for key in ("auroc", "fpr_at_95_tpr", "tpr_at_5_fpr"))
        lowest = (
            views.lowest_row(group.blind for group in groups),
            views.lowest_row(group.with_white_box for group in groups),
        )
        places = (cell for row in lowest for cell in (("-", "-") if row is None else _place(row)))
        rows.append((plain(detector["name"]), *numbers, *places))
    shown = 8 if any(detector["white_box"] for detector in result["detectors"]) else 6
    return table([row[:shown] for row in rows], words=(0, 5, 7))


def _place(row: Row) -> tuple[str, str]:
    return views.auroc(row), plain(row["group"])


def _averages(result: Mapping[str, Any], detector: Row) -> list[str]:
    """The paper's form: norms by objectives; objectives that do not fit beside the others go on below."""
    averages = averages_of(result, detector["name"])
    columns = [None, *views.objectives(result)]
    titles = [shorten(objective_title(objective), _TITLE) for objective in columns]
    beside = 5 if max(map(len, titles)) <= 10 else 4
    starts = range(0, len(columns), beside)
    return [line for start in starts for line in _averages_block(averages, columns[start : start + beside])]


def _averages_block(averages: Averages, columns: Sequence[str | None]) -> list[str]:
    titles = (shorten(objective_title(objective), _TITLE) for objective in columns)
    rows: list[Line] = [("\n", *(words for title in titles for words in (f"{title}\nAUROC", "\nFPR95")))]
    for norm in views.norms_of(averages):
        found = [averages.get((norm, objective), {}) for objective in columns]
        numbers = [percent(row.get(key)) for row in found for key in ("auroc", "fpr_at_95_tpr")]
        rows.append((shorten(views.norm_title(norm), _TITLE), *numbers))
    return table(rows, words=(0,))


def _groups(detector: Row) -> list[str]:
    """A row a group and scenario: AUROC, the lowest objective, and the arm with the largest attribution."""
    public = ("auroc", "fpr_at_95_tpr")
    head = ("group", "positives", "coverage", "AUROC", "FPR95", "lowest single", "published", "attribution")
    rows: list[Line] = [head]
    for group in groups_of(detector):
        for place, (words, row) in enumerate(group.scenarios):
            title = plain(group.name) if words == "blind" else f"{plain(group.name)}, {words}"
            attributed = views.largest_attribution(row)
            rows.append(
                (
                    title if place == 0 else f"  {words}",
                    str(row["positives"]),
                    percent(row["coverage"]),
                    f"{views.auroc(row)} {views.percent_interval(row['auroc_interval'])}".rstrip(),
                    percent(row["fpr_at_95_tpr"]),
                    _objective(group.lowest) if words == "blind" else "",
                    " / ".join(percent(numbers[key]) for key in public) if (numbers := row.get("published")) else "-",
                    f"{percent(attributed[1])} {views.short_arm(attributed[0], group.name, detector['name'])}"
                    if attributed
                    else "-",
                )
            )
    if not any("published" in row for row in detector["results"]):
        rows = [row[:-2] + row[-1:] for row in rows]
    return table(rows, words=(0, len(rows[0]) - 1)) if len(rows) > 1 else []


def _objective(lowest: tuple[str, float] | None) -> str:
    return "-" if lowest is None else f"{shorten(objective_title(lowest[0]), _TITLE)} {percent(lowest[1])}"
