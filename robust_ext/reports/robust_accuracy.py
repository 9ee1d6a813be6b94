"""The result of robust accuracy under several attacks."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from statistics import median
from typing import Any

from robust_ext.core import finding_texts as findings
from robust_ext.core.wording import accuracy, count, percent, plain, rests_on, seconds, typed
from robust_ext.reports import blocks
from robust_ext.reports.blocks import Block, Cell, Plot, Report, Row, Section, Table, muted
from robust_ext.reports.plots import COLOURS, DASHED, INK, MARKERS, MUTED, Drawing, Line, line_plot


def report(result: Row) -> Report:
    """Return the report: an attack a row, a budget a column, and the worst case sample by sample as the last row."""
    attacks, worst, samples = result["attacks"], result["worst_case"], result["samples"]
    clean, table, bound = percent(result["clean_accuracy"]), _numbers(result), worst[-1]
    meaning, drawing, number = _meaning(result), _curves(result), count(len(attacks), "attack")
    strongest = min(attacks, key=lambda attack: attack["difference"]["mean"])
    basis = [rests_on(row, samples, f"Worst case at epsilon {typed(row['epsilon'])}") for row in worst]
    warned = [sentence for sentence in basis if sentence]
    given = list(result.get("warnings", ()))
    lead = (
        f"{samples} samples, perturbations in {result['norm']}. At epsilon {typed(bound['epsilon'])}, "
        f"{accuracy(bound)}% are classified correctly and withstood the {number}: an upper bound, as others may find "
        "more. "
        f"The strongest single attack is {strongest['name']}, on average "
        f"{percent(strongest['difference']['mean'])} points above the best one at each epsilon."
    )
    numbers = (
        "Robust accuracy in per cent by epsilon; intervals are exact 95% intervals. Above best: how far an attack lies "
        "above the lowest robust accuracy of all attacks at the same epsilon, on average and at most."
    ) + _success(result)
    opening = f"Robust accuracy in per cent, {result['norm']}, by epsilon; {samples} samples, clean accuracy {clean}."
    run = [
        {
            "attack": one["name"],
            "settings": one["description"],
            "kind": one["kind"],
            "what became of the candidates": blocks.outcomes(one.get("outcomes", {})),
            "passes forward": one["passes"]["forward"],
            "backward": one["passes"]["backward"],
        }
        for one in attacks
    ]
    return Report(
        title=f"Robust accuracy: {number}, {samples} samples",
        about=f"Robust accuracy under {number}",
        headline=f"Robust accuracy at most {percent(bound['robust_accuracy'])}% at epsilon {typed(bound['epsilon'])} "
        f"(95% interval {' to '.join(map(percent, bound['interval']))})",
        first=[*(Block("words", words, "warn") for words in meaning), Block("words", lead, "lead")],
        sections=[
            Section("By epsilon", [Block("plots", [Plot(drawing)]), table, muted(numbers)], open=True),
            *blocks.evidence(result, [*warned, *given]),
            Section("What was run", [Table(title="What was run", rows=run, words=(0, 1, 2, 3))]),
        ],
        text=[
            [opening],
            [findings.lines(result.get("findings", ())), *meaning],
            [table, _success(result).strip()],
            *([words] for words in (*warned, *(f"Warning: {plain(words)}" for words in given))),
        ],
        badge=(
            f"robust accuracy, {result['norm']} {typed(bound['epsilon'])}",
            f"≤ {percent(bound['robust_accuracy'])}%",
            "number",
        ),
        figure=drawing,
    )


def _numbers(result: Row) -> Table:
    rows = []
    for one in [*result["attacks"], {"name": "worst case", "robust_accuracy": result["worst_case"]}]:
        row = {"attack": one["name"]}
        for left in one["robust_accuracy"]:
            row[typed(left["epsilon"])] = Cell(accuracy(left), " to ".join(map(percent, left["interval"])))
        if "difference" in one:
            row["above best"] = " / ".join(percent(one["difference"][key]) for key in ("mean", "maximum"))
            row |= {"median distance": _median(one["distances"]), "seconds": seconds(one["seconds"])}
        rows.append(row)
    return Table(title="Numbers", rows=rows, foot=True, terse=[typed(row["epsilon"]) for row in result["worst_case"]])


def _success(result: Row) -> str:
    """Return the attack success rate in a sentence; nothing where no sample is right to begin with."""
    clean, rows = result["clean_accuracy"], result["worst_case"]
    rates = [f"{percent(1 - row['robust_accuracy'] / clean)} at {typed(row['epsilon'])}" for row in rows if clean]
    return f" Attack success rate in the worst case: {', '.join(rates)} (of samples right to begin with)." * bool(rates)


def _meaning(result: Row) -> list[str]:
    """Explain the numbers of weakened attacks; nothing where none is weak or nothing is left."""
    setup, faults = findings.divided(result.get("findings", ()))
    if findings.weighty(setup):
        return ["These numbers are of another problem than yours: fix the setup first."]
    weak = findings.weighty(faults)
    if not weak or not result["worst_case"][-1]["robust_accuracy"]:
        return []
    names = [attack["name"] for attack in result["attacks"] if attack["name"] in {one["attack"] for one in weak}]
    number = len(result["attacks"])
    if len(names) < number:
        whose = findings.subject(names) if names else "attacks of such a model"
        return [f"Robust accuracy under {whose} is an upper bound that may lie far above the truth."]
    whom = "The one attack that was run is" if number == 1 else f"All {number} attacks that were run are"
    return [
        f"{whom} weakened by this: robust accuracy, the worst case too, is an upper bound that may lie far above the "
        "truth, and no evidence of robustness. Apply the remedies, and add an attack that needs no gradients "
        "(robust_ext:Square)."
    ]


def _curves(result: Row) -> Drawing:
    """Draw robust accuracy over epsilon of every attack, and the worst case with its intervals."""
    worst, clean = result["worst_case"], [(0.0, 100 * result["clean_accuracy"])]
    lines: list[Line] = []
    for number, attack in enumerate(result["attacks"]):
        points = [*clean, *((row["epsilon"], 100 * row["robust_accuracy"]) for row in attack["robust_accuracy"])]
        xs, ys = zip(*points, strict=True)
        style = {"marker": MARKERS[number % len(MARKERS)], "markersize": 4, "color": COLOURS[number % len(COLOURS)]}
        lines.append((attack["name"], xs, ys, style))
    epsilons = [row["epsilon"] for row in worst]
    style = {"color": INK, "linewidth": 2.2, "linestyle": DASHED}
    name = "worst case, with its 95% interval"
    lines.append((name, epsilons, [100 * row["robust_accuracy"] for row in worst], style))

    def extra(axes: Any) -> None:
        low, high = ([100 * row["interval"][end] for row in worst] for end in (0, 1))
        axes.fill_between(epsilons, low, high, color=MUTED, alpha=0.16, linewidth=0)

    ticks = [0.0]
    for epsilon in sorted(epsilons):
        # Labels of closer ones would touch.
        if epsilon - ticks[-1] >= max(epsilons) / 12:
            ticks.append(epsilon)
    return line_plot(
        lines,
        label="Robust accuracy over epsilon of each attack, and the worst case over all of them",
        size=(5.6, 3.2),
        ticks=(ticks, list(map(typed, ticks))),
        extra=extra,
        ylim=(0, 102),
        xlim=(0, max(epsilons) * 1.02),
        xlabel=f"epsilon ({result['norm']})",
        ylabel="robust accuracy, per cent",
    )


def _median(distances: Sequence[float | None] | None) -> str:
    """Return the median of the smallest perturbations; without one where half of the samples have none."""
    if distances is None:
        return "-"
    middle = median(inf if value is None else value for value in distances)
    return "none" if middle == inf else f"{middle:.4g}"
