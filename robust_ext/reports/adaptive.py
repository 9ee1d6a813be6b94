"""The result of the evaluation of a test-time defense."""

from __future__ import annotations

from typing import Any

from robust_ext.core import finding_texts as findings
from robust_ext.core.wording import accuracy, percent, plain, rests_on, seconds, typed
from robust_ext.reports import blocks
from robust_ext.reports.blocks import Block, Cell, Plot, Report, Row, Section, Table
from robust_ext.reports.plots import RANDOM, SCORE, Bar, Drawing, bar_plot

_SIDES = ("static", "defended")
_TITLES = {"static": "Worst case of the static model", "defended": "Worst case of the defense"}
_PART = (
    "Attacks are in the order in which they were run, each on the samples that those before it did not break; those "
    "that were run on a part have no robust accuracy of their own. Still robust: the accuracy of the defense after "
    "each. The setting full runs every attack on every sample."
)


def report(result: Row) -> Report:
    """Return the report: an attack a row, the worst cases, the gain, and warnings."""
    worst = [accuracy(result[one]["worst_case"]) for one in _SIDES]
    verdict, cost, drawing, table = _verdict(result), _cost(result), _bars(result), _attacks(result)
    basis = [rests_on(result[one]["worst_case"], result["samples"], title) for one, title in _TITLES.items()]
    warned, missing = [sentence for sentence in basis if sentence], _not_run(result)
    whole = all(attack["robust_accuracy"] is not None for attack in result["defended"]["attacks"])
    part = [] if whole else [_PART]
    kinds = [kind for flag, kind in (("random", "random"), ("batch_level", "batch-level")) if result[flag]]
    random = f" ({', '.join(kinds)})" if kinds else ""
    opening = (
        f"Robust accuracy in per cent of the static model and of the defense {plain(result['defense'])}"
        f"{random}: {result['samples']} samples, {result['norm']}, epsilon "
        f"{typed(result['epsilon'])}."
    )
    numbers = " ".join(
        [
            "Robust accuracy in per cent; intervals are exact 95% intervals of the majority of its predictions. The "
            "worst case is that of each sample: for random defenses the attack is chosen by some predictions and "
            "judged by fresh ones. A sample that is wrong without an attack counts as broken by every attack.",
            *part,
        ]
    )
    kinds_table = Table(
        title="Categories",
        rows=[
            {
                "category": row["category"],
                "robust accuracy under it alone": row["alone"],
                "robust accuracy without it": row["without"],
            }
            for row in result["categories"]
        ],
    )
    setup, others = findings.divided(result.get("findings", ()))
    return Report(
        title=f"Test-time defense {result['defense']}: {result['samples']} samples",
        about="An adaptive test-time defense against its static model",
        headline=f"Robust accuracy {worst[1]}% with the defense, {worst[0]}% without it",
        first=[Block("words", verdict, "lead"), Block("words", f"{opening} {cost}")],
        sections=[
            Section("Under which attacks", [Block("plots", [Plot(drawing)]), table], open=True),
            Section("How to read the numbers", [Block("words", numbers)]),
            Section("Which kind of attack mattered", [kinds_table]),
            *blocks.evidence(result, [*warned, *result["warnings"], *missing]),
        ],
        text=[
            [opening, findings.lines(setup)],
            [table],
            [verdict, *warned, cost, *part, *(one for row in result["categories"] for one in _category(row)), *missing]
            + [f"Warning: {plain(warning)}" for warning in result["warnings"]]
            + [findings.lines(others)],
        ],
        badge=(
            f"robust accuracy, {result['norm']} {typed(result['epsilon'])}",
            f"≤ {percent(result['defended']['worst_case']['robust_accuracy'])}%",
            "number",
        ),
        figure=drawing,
    )


def _attacks(result: Row) -> Table:
    """Return the clean accuracy, a row an attack, and the worst case."""
    static, defense = (result[one] for one in _SIDES)
    worst, by = (static["worst_case"], defense["worst_case"]), defense["worst_case"]["by"]
    clean = defense["clean_accuracy"]

    def deviation(row: Row) -> dict[str, Any]:
        return {"deviation": row.get("deviation", "")} if result["random"] else {}

    rows: list[dict[str, Any]] = [
        {
            "attack": "none",
            "category": "clean",
            "samples": result["samples"],
            "static": static["clean_accuracy"],
            "defended": clean,
            "still robust": clean,
            **deviation({}),
            "broken by it": by["clean"],
        }
    ]
    for before, one in zip(static["attacks"], defense["attacks"], strict=True):
        bounds = " to ".join(map(percent, one["interval"])) if one.get("interval") else ""
        rows.append(
            {
                "attack": one["name"],
                "category": one["category"],
                "samples": _samples(one, result),
                "static": accuracy(before),
                "defended": Cell(accuracy(one), bounds),
                "still robust": one.get("still_robust"),
                **deviation(one),
                "broken by it": by[one["name"]],
                "passes": f"{sum(one['passes'].values()):,}",
                "seconds": seconds(one["seconds"]),
            }
        )
    left = {"static": accuracy(worst[0]), "defended": accuracy(worst[1]), "still robust": accuracy(worst[1])}
    rows.append({"attack": "worst case", "category": "all", **left, **deviation(worst[1])})
    hidden = (7, 8) if result["random"] else (6, 7)
    return Table(title="Attacks", rows=rows, words=(0, 1), hidden=hidden, foot=True, terse=("defended",))


def _samples(attack: Row, result: Row) -> int:
    return int(attack.get("samples", result["samples"]))


def _category(row: Row) -> list[str]:
    """Describe the accuracy under a category alone and without it, where it is known."""
    kind, parts = plain(row["category"]), []
    if row["alone"] is not None:
        parts.append(f"Under {kind} attacks alone robust accuracy is {percent(row['alone'])}")
    if row["without"] is not None:
        who = "without them" if parts else f"Without {kind} attacks"
        parts.append(f"{who} the worst case would be {percent(row['without'])}")
    return [f"{'; '.join(parts)}."] if parts else []


def _not_run(result: Row) -> list[str]:
    """Return the attacks that were not run, or not on all samples, by the reason why."""
    names: dict[tuple[str, str], list[str]] = {}
    ran = {attack["name"] for attack in result["defended"]["attacks"] if _samples(attack, result)}
    for entry in (*result["refused"], *result.get("not_run", ())):
        which = "Run on a part of the samples" if entry["name"] in ran else "Not run"
        # Attacks share a reason but for how many samples were taken.
        reason, _, part = plain(entry["reason"]).partition("; it was run on the nearest ")
        taken = f" ({part.removesuffix(' samples.')})" if part else ""
        names.setdefault((which, reason.rstrip(".")), []).append(f"{plain(entry['name'])}{taken}")
    return [f"{which}: {'; '.join(several)}. {reason}." for (which, reason), several in names.items()]


def _verdict(result: Row) -> str:
    """Return whether the defense is more robust than its static model, in a sentence."""
    gain = result["gain"]
    low, high = gain["interval"]
    span = f"{100 * gain['robust_accuracy']:+.1f} points (95% interval {100 * low:+.1f} to {100 * high:+.1f})"
    if low > 0:
        return f"The defense improves on its static model by {span}."
    if high < 0:
        return f"The defense weakens its static model: {span}."
    return f"No difference between the defense and its static model can be shown: {span}."


def _cost(result: Row) -> str:
    cost = result["cost"]
    used = [one for one in cost.get("networks", ()) if one["forward"]]
    held = ", ".join(f"{one['name']} ({one['forward']:.4g} and {one['backward']:.4g})" for one in used)
    if len(used) < 2:
        held = "it" if not used or used[0]["name"] == "classifier" else used[0]["name"]
    return (
        f"A prediction of the defense takes {cost['seconds_ratio']:.1f} times as long as one of the static model, and "
        f"{cost['forward']:.4g} forward and {cost['backward']:.4g} backward passes through {plain(held)}."
    )


def _bars(result: Row) -> Drawing:
    """Draw robust accuracy under each attack and under all, of the static model and of the defense."""
    rows = [("clean", [result[one]["clean_accuracy"] for one in _SIDES])]
    for pair in zip(*(result[one]["attacks"] for one in _SIDES), strict=True):
        rows.append((pair[0]["name"], [attack["robust_accuracy"] for attack in pair]))
    rows.append(("worst case", [result[one]["worst_case"]["robust_accuracy"] for one in _SIDES]))
    kinds = ((RANDOM, "static"), (SCORE, "defense"))
    bars = [
        (
            name,
            [
                Bar(parts=[(value, colour)], words=f"{percent(value)} {words}")
                for value, (colour, words) in zip(values, kinds, strict=True)
            ],
        )
        for name, values in rows
        if None not in values
    ]
    label = "Robust accuracy of the static model and of the defense under each attack and under all of them"
    return bar_plot(bars, axis="robust accuracy, per cent", label=label)
