"""The result of the evaluation of a test-time defense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from robust_ext.reports import findings
from robust_ext.reports.drawing import RANDOM, SCORE, Drawing
from robust_ext.reports.plots import Bar, bar_plot
from robust_ext.reports.text import Line, paragraph, table
from robust_ext.reports.wording import accuracy, percent, plain, rests_on, seconds, typed

_SIDES = ("static", "defended")
_TITLES = {"static": "Worst case of the static model", "defended": "Worst case of the defense"}


def text(result: Mapping[str, Any]) -> str:
    """A row an attack, the worst cases, the gain, and warnings."""
    rows: list[Line] = [("attack", "category", "static", "defended", "deviation", "seconds")]
    rows.append(("none", "clean", *(percent(result[one]["clean_accuracy"]) for one in _SIDES), "", ""))
    for pair in zip(*(result[one]["attacks"] for one in _SIDES), strict=True):
        defended = pair[1]
        accuracies = map(accuracy, pair)
        deviation = percent(defended["deviation"]) if result["random"] else ""
        words = (plain(defended["name"]), plain(defended["category"]))
        rows.append((*words, *accuracies, deviation, seconds(defended["seconds"])))
    worst = [accuracy(result[one]["worst_case"]) for one in _SIDES]
    rows.append(("worst case", "all", *worst, "", ""))
    sentences = [
        _verdict(result),
        *_rests_on(result),
        _cost(result),
        *(
            f"Under {plain(row['category'])} attacks alone {percent(row['alone'])} are left; without them the worst "
            f"case would be {percent(row['without'])}."
            for row in result["categories"]
        ),
        *(f"Not run: {plain(entry['name'])}. {plain(entry['reason'])}" for entry in result["refused"]),
        *(f"Warning: {plain(warning)}" for warning in result["warnings"]),
    ]
    below = [line for sentence in sentences for line in paragraph(sentence)]
    below += findings.lines(result.get("findings", ()))
    return "\n".join([*paragraph(_opening(result)), "", *table(rows, words=(0, 1)), "", *below]) + "\n"


def context(result: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows."""
    return {
        "verdict": _verdict(result),
        "warned": [
            *_rests_on(result),
            *result["warnings"],
            *(f"Not run: {entry['name']}. {entry['reason']}" for entry in result["refused"]),
        ],
        "opening": _opening(result),
        "cost": _cost(result),
        "bars": _bars(result),
        "rows": list(zip(*(result[one]["attacks"] for one in _SIDES), strict=True)),
        "colours": (RANDOM, SCORE),
    }


def _verdict(result: Mapping[str, Any]) -> str:
    """Whether the defense is more robust than its static model, in a sentence."""
    gain = result["gain"]
    low, high = gain["interval"]
    span = f"{100 * gain['robust_accuracy']:+.1f} points (95% interval {100 * low:+.1f} to {100 * high:+.1f})"
    if low > 0:
        return f"The defense improves on its static model by {span}."
    if high < 0:
        return f"The defense weakens its static model: {span}."
    return f"No difference between the defense and its static model can be shown: {span}."


def _rests_on(result: Mapping[str, Any]) -> list[str]:
    """What the worst cases rest on, in sentences."""
    found = (rests_on(result[one]["worst_case"], result["samples"], title) for one, title in _TITLES.items())
    return [sentence for sentence in found if sentence]


def _opening(result: Mapping[str, Any]) -> str:
    kinds = [words for flag, words in ((result["random"], "random"), (result["batch_level"], "batch-level")) if flag]
    about = f" ({', '.join(kinds)})" if kinds else ""
    return (
        f"Robust accuracy in per cent of the static model and of the defense {plain(result['defense'])}{about}: "
        f"{result['samples']} samples, {result['norm']}, epsilon {typed(result['epsilon'])}."
    )


def _cost(result: Mapping[str, Any]) -> str:
    cost = result["cost"]
    return (
        f"A prediction of the defense takes {cost['seconds_ratio']:.1f} times as long as one of the static model, and "
        f"{cost['forward']:.4g} forward and {cost['backward']:.4g} backward passes through {plain(_held(cost))}."
    )


def _held(cost: Mapping[str, Any]) -> str:
    """The networks that passes go through, in words."""
    used = [one for one in cost.get("networks", ()) if one["forward"]]
    if len(used) < 2:
        return "it" if not used or used[0]["name"] == "classifier" else used[0]["name"]
    return ", ".join(f"{one['name']} ({one['forward']:.4g} and {one['backward']:.4g})" for one in used)


def _bars(result: Mapping[str, Any]) -> Drawing:
    """Robust accuracy under each attack and under all, of the static model and of the defense."""
    names = ["clean", *(attack["name"] for attack in result["defended"]["attacks"]), "worst case"]
    static, defended = (
        [
            result[one]["clean_accuracy"],
            *(attack["robust_accuracy"] for attack in result[one]["attacks"]),
            result[one]["worst_case"]["robust_accuracy"],
        ]
        for one in _SIDES
    )
    rows = [
        (
            name,
            [
                Bar(parts=[(first, RANDOM)], words=f"{percent(first)} static", hatched=True),
                Bar(parts=[(second, SCORE)], words=f"{percent(second)} defense"),
            ],
        )
        for name, first, second in zip(names, static, defended, strict=True)
    ]
    label = "Robust accuracy of the static model and of the defense under each attack and under all of them"
    return bar_plot(rows, axis="robust accuracy, per cent", label=label, prefix="bars")
