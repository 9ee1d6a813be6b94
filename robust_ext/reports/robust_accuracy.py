"""The result of robust accuracy under several attacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from statistics import median
from typing import Any

from robust_ext.reports import findings
from robust_ext.reports.drawing import COLOURS, INK, MARKERS, MUTED, Drawing, draw
from robust_ext.reports.tabular import Line, paragraph, table
from robust_ext.reports.wording import accuracy, percent, plain, rests_on, seconds, typed


def text(result: Mapping[str, Any]) -> str:
    """A row an attack, a column a budget, in per cent.

    Above are the findings of the diagnosis. The last row is the worst case over all attacks, sample by sample. ``above
    best`` is how far an attack's robust accuracy lies above that of the best single attack: the mean over budgets, and
    the maximum. Below is what the worst case rests on, and warnings.
    """
    epsilons = [typed(row["epsilon"]) for row in result["worst_case"]]
    rows: list[Line] = [("attack", *epsilons, "above best", "median", "seconds")]
    for attack in result["attacks"]:
        rows.append(
            (
                plain(attack["name"]),
                *map(accuracy, attack["robust_accuracy"]),
                f"{percent(attack['difference']['mean'])} / {percent(attack['difference']['maximum'])}",
                _median(attack["distances"]),
                seconds(attack["seconds"]),
            )
        )
    rows.append(("worst case", *map(accuracy, result["worst_case"]), "", "", ""))
    opening = (
        f"Robust accuracy in per cent, {result['norm']}, by epsilon; {result['samples']} samples, clean accuracy "
        f"{percent(result['clean_accuracy'])}."
    )
    above = findings.lines(result.get("findings", ()))
    above += [line for words in _meaning(result) for line in paragraph(words)]
    head = [*paragraph(opening), "", *above, *([""] if above else [])]
    sentences = [*_rests_on(result), *(f"Warning: {plain(warning)}" for warning in result.get("warnings", ()))]
    below = [line for sentence in sentences for line in ("", *paragraph(sentence))]
    return "\n".join([*head, *table(rows, words=(0,)), *below]) + "\n"


def context(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the page's content."""
    return {
        "curves": _curves(result),
        "colours": [(attack["name"], _style(number)[0]) for number, attack in enumerate(result["attacks"])],
        "medians": [_median(attack["distances"]) for attack in result["attacks"]],
        "rests_on": _rests_on(result),
        "above": findings.sentences(result.get("findings", ())),
        "meaning": _meaning(result),
        "strongest": min(result["attacks"], key=lambda attack: attack["difference"]["mean"]),
    }


def _meaning(result: Mapping[str, Any]) -> list[str]:
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
        return [f"Robust accuracy under {whose} is an upper bound that may lie far above what is left."]
    whom = "The one attack that was run is" if number == 1 else f"All {number} attacks that were run are"
    return [
        f"{whom} weakened by this: robust accuracy, the worst case too, is an upper bound that may lie far above what "
        "is left, and no evidence of robustness. Apply the remedies, and add an attack that needs no gradients "
        "(robust_ext:Square)."
    ]


def _rests_on(result: Mapping[str, Any]) -> list[str]:
    """Describe the basis of the worst case at each budget, in sentences."""
    found = (
        rests_on(row, result["samples"], f"Worst case at epsilon {typed(row['epsilon'])}")
        for row in result["worst_case"]
    )
    return [sentence for sentence in found if sentence]


def _style(number: int) -> tuple[str, str]:
    return COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]


def _curves(result: Mapping[str, Any]) -> Drawing:
    """Robust accuracy over epsilon of every attack, and the worst case with its intervals, as SVG."""

    def paint(axes: Any) -> None:
        for number, attack in enumerate(result["attacks"]):
            colour, marker = _style(number)
            rows = [{"epsilon": 0.0, "robust_accuracy": result["clean_accuracy"]}, *attack["robust_accuracy"]]
            xs, ys = [row["epsilon"] for row in rows], [100 * row["robust_accuracy"] for row in rows]
            axes.plot(xs, ys, color=colour, marker=marker, markersize=4, linewidth=1.4, label=f"name-{number}")
        worst = result["worst_case"]
        xs = [row["epsilon"] for row in worst]
        low, high = ([100 * row["interval"][end] for row in worst] for end in (0, 1))
        axes.fill_between(xs, low, high, color=MUTED, alpha=0.16, linewidth=0)
        axes.plot(
            xs,
            [100 * row["robust_accuracy"] for row in worst],
            color=INK,
            linewidth=2.2,
            linestyle=(0, (4, 2)),
            label="worst case",
        )
        axes.set(ylim=(0, 102), xlim=(0, max(xs) * 1.02))
        ticks = _ticks(xs)
        axes.set_xticks(ticks, list(map(typed, ticks)))
        axes.set(xlabel=f"epsilon ({result['norm']})", ylabel="robust accuracy, per cent")
        axes.grid(visible=True)

    label = "Robust accuracy over epsilon of each attack, and the worst case over all of them"
    names = [plain(attack["name"]) for attack in result["attacks"]]
    return draw("curves", (5.0, 3.2), (0.6, 0.5, 4.25, 2.55), paint, label, names)


def _ticks(epsilons: Sequence[float]) -> list[float]:
    """0 and those of the budgets whose labels do not touch."""
    ticks = [0.0]
    for epsilon in sorted(epsilons):
        if epsilon - ticks[-1] >= max(epsilons) / 12:
            ticks.append(epsilon)
    return ticks


def _median(distances: Sequence[float | None] | None) -> str:
    """The median of the smallest perturbations; without one where half of the samples have none."""
    if distances is None:
        return "-"
    middle = median(inf if value is None else value for value in distances)
    return "none" if middle == inf else f"{middle:.4g}"
