"""The result of the evaluation of a test-time defense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from robust_ext.reports import findings
from robust_ext.reports.drawing import RANDOM, SCORE, Drawing
from robust_ext.reports.plots import Bar, bar_plot
from robust_ext.reports.tabular import Line, paragraph, table
from robust_ext.reports.wording import accuracy, percent, plain, rests_on, seconds, typed

_SIDES = ("static", "defended")
_TITLES = {"static": "Worst case of the static model", "defended": "Worst case of the defense"}


def text(result: Mapping[str, Any]) -> str:
    """A row an attack, the worst cases, the gain, and warnings."""
    rows: list[Line] = [("attack", "category", "samples", "static", "defended", "left", "deviation", "seconds")]
    clean = [percent(result[one]["clean_accuracy"]) for one in _SIDES]
    rows.append(("none", "clean", str(result["samples"]), *clean, clean[1], "", ""))
    for pair in zip(*(result[one]["attacks"] for one in _SIDES), strict=True):
        defended = pair[1]
        accuracies = map(accuracy, pair)
        deviation = percent(defended["deviation"]) if result["random"] else ""
        left, count = percent(defended.get("left")), str(_samples(defended, result))
        words = (plain(defended["name"]), plain(defended["category"]))
        rows.append((*words, count, *accuracies, left, deviation, seconds(defended["seconds"])))
    worst = [accuracy(result[one]["worst_case"]) for one in _SIDES]
    rows.append(("worst case", "all", "", *worst, worst[1], "", ""))
    sentences = [
        _verdict(result),
        *_rests_on(result),
        _cost(result),
        *_of_part(result),
        *(sentence for row in result["categories"] for sentence in _category(row)),
        *_not_run(result),
        *(f"Warning: {plain(warning)}" for warning in result["warnings"]),
    ]
    below = [line for sentence in sentences for line in paragraph(sentence)]
    setup, others = findings.divided(result.get("findings", ()))
    below += findings.lines(others)
    above = [*paragraph(_opening(result)), *findings.lines(setup)]
    return "\n".join([*above, "", *table(rows, words=(0, 1)), "", *below]) + "\n"


def context(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the page's content."""
    return {
        "verdict": _verdict(result),
        "warned": [
            *_rests_on(result),
            *result["warnings"],
            *_not_run(result),
        ],
        "part": _of_part(result),
        "samples": [_samples(attack, result) for attack in result["defended"]["attacks"]],
        "opening": _opening(result),
        "cost": _cost(result),
        "bars": _bars(result),
        "rows": list(zip(*(result[one]["attacks"] for one in _SIDES), strict=True)),
        "colours": (RANDOM, SCORE),
    }


def _samples(attack: Mapping[str, Any], result: Mapping[str, Any]) -> int:
    """Return the number of samples of an attack."""
    return int(attack.get("samples", result["samples"]))


def _of_part(result: Mapping[str, Any]) -> list[str]:
    """Explain the numbers of attacks that ran on a part of the samples."""
    if all(attack["robust_accuracy"] is not None for attack in result["defended"]["attacks"]):
        return []
    return [
        "Attacks are in the order in which they were run, each on the samples that those before it left; of those that "
        "were run on a part, no robust accuracy of their own can be stated. What is left is that of the defense after "
        "each. The setting full runs every attack on every sample."
    ]


def _category(row: Mapping[str, Any]) -> list[str]:
    """Describe the accuracy under a category alone and without it, where it is known."""
    kind, parts = plain(row["category"]), []
    if row["alone"] is not None:
        parts.append(f"Under {kind} attacks alone {percent(row['alone'])} are left")
    if row["without"] is not None:
        who = "without them" if parts else f"Without {kind} attacks"
        parts.append(f"{who} the worst case would be {percent(row['without'])}")
    return [f"{'; '.join(parts)}."] if parts else []


def _not_run(result: Mapping[str, Any]) -> list[str]:
    """The attacks that were not run, or not on all samples, by the reason why."""
    names: dict[tuple[str, str], list[str]] = {}
    ran = {attack["name"] for attack in result["defended"]["attacks"] if _samples(attack, result)}
    for entry in (*result["refused"], *result.get("not_run", ())):
        which = "Run on a part of the samples" if entry["name"] in ran else "Not run"
        names.setdefault((which, plain(entry["reason"])), []).append(plain(entry["name"]))
    return [f"{which}: {'; '.join(several)}. {reason}" for (which, reason), several in names.items()]


def _verdict(result: Mapping[str, Any]) -> str:
    """Return whether the defense is more robust than its static model, in a sentence."""
    gain = result["gain"]
    low, high = gain["interval"]
    span = f"{100 * gain['robust_accuracy']:+.1f} points (95% interval {100 * low:+.1f} to {100 * high:+.1f})"
    if low > 0:
        return f"The defense improves on its static model by {span}."
    if high < 0:
        return f"The defense weakens its static model: {span}."
    return f"No difference between the defense and its static model can be shown: {span}."


def _rests_on(result: Mapping[str, Any]) -> list[str]:
    """Describe the basis of the worst cases, in sentences."""
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
    """The networks that passes go through, as text."""
    used = [one for one in cost.get("networks", ()) if one["forward"]]
    if len(used) < 2:
        return "it" if not used or used[0]["name"] == "classifier" else used[0]["name"]
    return ", ".join(f"{one['name']} ({one['forward']:.4g} and {one['backward']:.4g})" for one in used)


def _bars(result: Mapping[str, Any]) -> Drawing:
    """Robust accuracy under each attack and under all, of the static model and of the defense."""
    pairs = [
        pair
        for pair in zip(*(result[one]["attacks"] for one in _SIDES), strict=True)
        if all(attack["robust_accuracy"] is not None for attack in pair)
    ]
    names = ["clean", *(attack["name"] for attack, _ in pairs), "worst case"]
    static, defended = (
        [
            result[one]["clean_accuracy"],
            *(pair[place]["robust_accuracy"] for pair in pairs),
            result[one]["worst_case"]["robust_accuracy"],
        ]
        for place, one in enumerate(_SIDES)
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
