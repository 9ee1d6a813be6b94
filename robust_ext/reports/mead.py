"""The result of a MEAD run: a row a detector, then each detector by itself, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence

from robust_ext.core import finding_texts as findings
from robust_ext.core.wording import count, percent, plain, seconds
from robust_ext.reports import blocks
from robust_ext.reports.blocks import Block, Cell, Plot, Report, Row, Section, Table, muted
from robust_ext.reports.mead_detector import DetectorReport
from robust_ext.reports.mead_rows import (
    METRICS,
    auroc,
    averages_of,
    groups_of,
    lowest_row,
    norms_of,
    notes,
    worst_row,
)
from robust_ext.reports.plots import SCORE, Bar, Drawing, bar_plot

_DONE = (
    "The same samples were attacked in many ways, called arms. The arms of a group share a norm and an epsilon. What "
    "each arm returned was checked again: only valid inputs that are misclassified, or at which the logits are not "
    "finite, within epsilon where there is one, count as successes.",
    "An attacker who can choose among the arms needs one that goes unnoticed. So a sample counts as caught only when "
    "every arm that succeeds on it is caught: of the scores of these arms, the lowest one counts. Samples on which "
    "no arm succeeds are left out. Where all natural samples count, as in the paper, an arm succeeds on a "
    "misclassified one if it leaves it so.",
)
_TERMS = {
    "MEAD and single objectives": "MEAD takes all arms of a group together. A single objective takes those that "
    "maximise one loss, such as the cross-entropy (ACE), and those without a choice of loss.",
    "AUROC": "How often an attacked sample scores higher than a natural one. 100 is perfect, 50 is guessing. Higher is "
    "better.",
    "FPR95": "The share of natural samples flagged when 95 per cent of the attacked ones are caught. Lower is better.",
    "TPR5": "The share of attacked samples caught when at most 5 per cent of the natural ones are flagged. Higher is "
    "better.",
    "Coverage": "The share of samples on which at least one arm succeeds: the positives.",
    "Attribution": "The share of positives on which an arm scored lowest, and so decided.",
}


_MEANS = (
    "Per cent. Means over the rows of each norm, then over the norms; all arms together. White-box arms, which are "
    "adaptive to the detector, are not part of the means."
)
_DIAMONDS = (
    "Bars: all arms together. Diamonds: the lowest mean of a single objective. The distance between them is what is "
    "missed when only one objective is tried."
)


def report(result: Row) -> Report:
    """Return the report: a row a detector, averaged over the groups of attacks (the paper's table 3).

    Then for each detector the averages by norm of all arms and of each objective (tables 1 and 2), and a row a group
    of arms. All numbers are in per cent.
    """
    detectors, arms, opening = result["detectors"], result["arms"], _opening(result)
    drawing, summary, noted = _mean_plot(result), _summary(result), notes(result)
    shown = Plot(drawing, "", _DIAMONDS)
    parts = [DetectorReport(result, detector) for detector in detectors]
    links = [(f"detector-{number}", detector["name"]) for number, detector in enumerate(detectors)]
    remember = [Block("heading", "To keep in mind"), Block("list", noted)] if noted else []
    setup, others = findings.divided(result.get("findings", ()))
    worst = {one["name"]: row for one in detectors if (row := worst_row(one))}
    best = max(worst, key=lambda name: float(worst[name]["auroc"]), default="")
    named = [one for one in detectors if one["name"] in (worst if len(worst) < 5 else {best})]
    lowest = [f"{plain(one['name'])} {auroc(worst[one['name']])}" for one in named]
    means = ", ".join(
        f"{plain(one['name'])} {percent(averages_of(result, one).get(('all', None), {}).get('auroc'))}" for one in named
    )
    return Report(
        title=f"MEAD: {count(len(detectors), 'detector')}, {result['samples']} samples",
        about="MEAD, a multi-armed evaluation of adversarial example detectors",
        headline=f"Worst-case AUROC, per cent: {', '.join(lowest)}"
        if best
        else "No attack succeeded often enough to judge a detector",
        first=[
            *([Block("words", f"Mean AUROC: {means}; guessing gives 50.", "lead")] if best else []),
            Block("words", opening),
            *([Block("links", links)] if len(links) > 1 else []),
        ],
        sections=[
            Section("All detectors", [summary, Block("plots", [shown]), *remember, muted(_MEANS)], open=True),
            *(part.section(f"detector-{number}") for number, part in enumerate(parts)),
            Section("What was done", [*(Block("words", words) for words in _DONE), Block("terms", _TERMS.items())]),
            Section("Examples that slipped through", [Block("pictures", None)]),
            Section("Every attack", [_every_attack(arms)]),
            *blocks.evidence(result),
        ],
        text=[
            [opening, findings.lines(setup)],
            [summary],
            *(group for part in parts for group in part.text()),
            *([note] for note in noted),
            [findings.lines(others)],
        ],
        badge=(
            f"worst-case AUROC{f', {plain(best)}' if best else ''}",
            f"{percent(worst[best]['auroc'])}%" if best else "none",
            "number",
        ),
        figure=drawing,
    )


def _opening(result: Row) -> str:
    arms = result["arms"]
    naturals = "all natural samples count" if result["naturals"] == "kept" else "misclassified samples are left out"
    return (
        f"MEAD, suite {plain(result['suite'])}: {result['samples']} samples, clean accuracy "
        f"{percent(result['clean_accuracy'])}%, {count(len(arms), 'arm')} in "
        f"{count(len({arm['group'] for arm in arms}), 'group')}; {naturals}. All numbers are per cent."
    )


def _summary(result: Row) -> Table:
    every = {one["name"]: averages_of(result, one) for one in result["detectors"]}
    norms = dict.fromkeys(norm for averages in every.values() for norm in norms_of(averages) if norm != "all")
    lowest = {"lowest AUROC, of group": "blind", "with white-box, of group": "with_white_box"}
    if not any(detector["white_box"] for detector in result["detectors"]):
        del lowest["with white-box, of group"]
    rows = []
    for detector in result["detectors"]:
        averages = every[detector["name"]]
        row = {"detector": detector["name"]}
        row |= {title: averages.get(("all", None), {}).get(key) for title, key in METRICS.items()}
        for norm in norms:
            row[f"AUROC, {'no norm' if norm is None else norm}"] = averages.get((norm, None), {}).get("auroc")
        for title, kind in lowest.items():
            found = lowest_row(getattr(group, kind) for group in groups_of(detector))
            row[title] = None if found is None else Cell(auroc(found), plain(found["group"]))
        rows.append(row)
    hidden, last = range(4, 4 + len(norms)), range(4 + len(norms), len(rows[0]))
    return Table(title="All detectors", rows=rows, words=(0, *last), hidden=hidden)


def _mean_plot(result: Row) -> Drawing:
    """Draw every detector's mean AUROC, with that of its worst single objective as a diamond."""
    rows = []
    for detector in result["detectors"]:
        averages = averages_of(result, detector)
        means = {objective: row["auroc"] for (norm, objective), row in averages.items() if norm == "all"}
        value = means.pop(None, None)
        lowest = min((one for one in means.values() if one is not None), default=None)
        words = "no AUROC" if value is None else percent(value)
        rows.append(
            (detector["name"], [Bar(parts=[(value, SCORE)] if value is not None else [], words=words, mark=lowest)])
        )
    label = "Mean AUROC of each detector, in per cent"
    return bar_plot(rows, axis="AUROC, per cent", label=label, line=(0.5, "guessing"))


def _every_attack(arms: Sequence[Row]) -> Table:
    rows = [
        {
            "arm": Cell(arm["name"], f"adaptive to {arm['adaptive_to']}" if arm["adaptive_to"] else ""),
            "attack": f"{arm['attack']}, {arm['kind']}",
            "succeeded": f"{arm['successes']} of {arm['samples']}",
            "what became of the candidates": blocks.outcomes(arm["outcomes"]),
            "seconds": f"{seconds(arm['seconds'])} s",
            **{f"{way} passes": f"{arm['passes'][way]:,.0f}" for way in ("forward", "backward")},
        }
        for arm in arms
    ]
    return Table(title="Attacks", rows=rows, words=(0, 1, 3))
