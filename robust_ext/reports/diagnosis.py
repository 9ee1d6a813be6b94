"""The result of a diagnosis: what is wrong, by what evidence, what to do, and what that changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from robust_ext.core import finding_texts as findings
from robust_ext.core.errors import printable
from robust_ext.core.wording import accuracy, count, interval, percent, plain, rests_on, seconds, typed
from robust_ext.reports import blocks
from robust_ext.reports.blocks import Block, Part, Plot, Report, Row, Section, Table, muted
from robust_ext.reports.plots import (
    COLOURS,
    DASHED,
    MUTED,
    RANDOM,
    REST,
    Drawing,
    Line,
    line_plot,
    name_rows,
    name_width,
    write,
)

# Attacks of a plot, and layers of one.
_SHOWN, _LAYERS = len(COLOURS) - 1, 24
# Words for a fault next to its layer in the plot.
_FAULTS = {"zero_gradient": "stops the gradient", "no_gradient": "stops the gradient"}
# Words for a finding about a model, and for its absence.
_BEHAVIOUR = (
    ("random_output", "random", "deterministic"),
    ("batch_dependent", "batch-dependent", "rows independent"),
    ("changes_input", "changes its input in place", ""),
    ("probabilities", "returns probabilities", ""),
    ("non_finite_logits", "returns NaN or infinity", ""),
)


def report(result: Row) -> Report:
    """Return the report: the likely cause, findings, remedies that were tried, what is next, and an attack a row.

    Robust accuracy is that of the samples at the budget. Test score and R-ASR are those of a short binarization test.
    """
    attacks, model, found, notes = result["attacks"], _model_line(result), result["findings"], _notes(result)
    weak, drawn = findings.weighty(found), _plots(result)
    verdict = "failed" if weak else "passed"
    refused = [] if result["not_run"] is None else [f"No attack was run: {plain(result['not_run'])}"]
    under = f" under {count(len(attacks), 'attack')}" if attacks else ""
    table, tried = _attacks(result), _tried(result)
    headline, _, more = result["reason"].partition(". ")
    layers, queries = ([plot for plot in drawn if (plot.title == _BY_LAYER) is own] for own in (True, False))
    confirmed = (
        "On the same samples and seeds. A cause is confirmed where, with its remedy, the same attack solves more "
        "samples or planted problems, beyond noise."
    )
    following: list[list[Part]] = [
        [f"Next: {plain(one['words'])}", [f"    {printable(one['command'])}"]] for one in result["next"]
    ]
    return Report(
        title=f"Diagnosis of {result['model']['name']}",
        about=f"Diagnosis of {result['model']['name']}{under} in {result['norm']}, epsilon {typed(result['epsilon'])}",
        headline=headline.rstrip("."),
        verdict=verdict,
        first=[*(Block("words", words) for words in (more, *refused) if words), muted(model)],
        sections=[
            *([Section("Attacks", [table], open=True)] if attacks else []),
            *([Section("Which layer", [Block("plots", layers)], open=weak != [])] if layers else []),
            *([Section("Remedies that were tried", [muted(confirmed), tried])] if tried.rows else []),
            *blocks.evidence(result),
            *([Section("How to read the numbers", [*map(muted, notes)])] if notes else []),
            *([Section("Where the queries went", [Block("plots", queries, "grid")])] if queries else []),
        ],
        text=[
            [plain(result["reason"])],
            [model],
            refused,
            [table] if attacks else [],
            [*notes, findings.numbered(found)],
            [tried],
            *following,
        ],
        badge=("attack diagnosis", count(len(weak), "finding"), verdict),
        figure=next((plot.drawing for plot in drawn if plot.title != _REACH), None),
    )


def _model_line(result: Row) -> str:
    """Return the model in a sentence: mode, what its logits depend on, ranges, clean accuracy."""
    model, found = result["model"], {finding["code"] for finding in result["findings"]}
    words = [f"{model['mode']} mode"]
    # Where the model was refused, not all of it was looked at.
    whole = result["not_run"] is None
    words += [bad if code in found else good for code, bad, good in _BEHAVIOUR if code in found or (good and whole)]
    words += [f"inputs in {_range(model['inputs'])}"]
    if model["logits"] is not None:
        words += [f"logits in {_range(model['logits'])}"]
    if result["clean_accuracy"] is not None:
        clean = percent(result["clean_accuracy"])
        words += [f"clean accuracy {clean}% ({count(result['samples'], 'sample')})"]
    return f"Model {plain(model['name'])}: {', '.join(words)}."


def _range(values: Sequence[float] | None) -> str:
    return "no finite number" if values is None else f"[{values[0]:.3g}, {values[1]:.3g}]"


def _attacks(result: Row) -> Table:
    """Return a row an attack, and one for each that they are compared with."""
    rows = []
    for one in [*result["attacks"], *result["references"]]:
        larger = {role: accuracy(found) for role, found in one.get("larger", {}).items()}
        row = {
            "attack": one["name"],
            "robust": "raised" if one["error"] else accuracy(one),
            "2 x epsilon": larger.get("larger", "-"),
            "whole range": larger.get("unbounded", "-"),
            "test score": f"{_share(one.get('score'))} {interval(one.get('score_interval'))}".strip(),
            "R-ASR": _share(one.get("random_score")),
            "planted": one.get("planted") or "-",
            "seconds": seconds(one["seconds"]),
        }
        rows.append(row)
    return Table(title="Attacks", rows=rows)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _notes(result: Row) -> list[str]:
    """Explain the numbers and their basis, in sentences."""
    warnings = [f"Warning: {plain(warning)}" for warning in result["warnings"]]
    if not result["attacks"]:
        return warnings
    found = [
        f"Robust: robust accuracy in per cent at epsilon {typed(result['epsilon'])} in {result['norm']}; test score "
        "and R-ASR of a short binarization test: the shares of planted examples that the attack and random search find."
    ]
    if result["references"]:
        names = ", ".join(plain(one["name"]) for one in result["references"])
        found.append(f"On the same samples, to compare with: {names}.")
    for attack in result["attacks"]:
        name = plain(attack["name"])
        if attack["not_planted"] is not None:
            found.append(f"{name}: no binarization test: {plain(attack['not_planted'])}")
        # Results of earlier versions say nothing of what was left out.
        left_out = f"{attack['name']} with larger budgets" in result.get("left_out", ())
        others = attack["error"] or attack["kind"] == "minimum norm" or not result["references"]
        if not (attack["larger"] or left_out or others):
            found.append(
                f"{name} was not run with larger budgets: that would take more passes a sample than "
                "--affordable allows."
            )
        found.append(rests_on(attack, result["samples"], name))
    named = {finding["code"] for finding in result["findings"]}
    for finding in result["model"]["probe"]["findings"]:
        if finding["code"] not in named:
            found.append(f"The attacks overcame what a probe of the model found: {plain(findings.sentence(finding))}")
    return [note for note in [*found, *warnings] if note]


def _tried(result: Row) -> Table:
    """Return a row for each remedy that was tried: what was, what became of it, and whether it is confirmed."""
    rows, titles = [], ("for", "remedy that was tried", "test score", "robust accuracy", "")
    for entry in result["tried"] or ():
        before, after = entry["before"] or {}, entry["after"]
        changes = [
            "-" if after is None else f"{show(before.get(key))} > {show(after[key])}"
            for key, show in (("score", _share), ("robust_accuracy", percent))
        ]
        # Results of earlier versions have no outcome.
        words = entry["error"] or entry.get("outcome") or ("confirmed" if entry["confirmed"] else "changes nothing")
        lines = [line for line in findings.to_paste(entry["remedy"]) if not line.startswith(("import", "from", "#"))]
        cells = (entry["code"], lines[0] if lines else entry["remedy"]["words"], *changes, words)
        rows.append(dict(zip(titles, cells, strict=True)))
        for one in entry.get("beside", ()):
            share = f"{percent(before.get('robust_accuracy'))} > {percent(one['robust_accuracy'])}"
            rows.append(
                {"remedy that was tried": f"  next to it: {one['name']}", "test score": "-"} | {titles[3]: share}
            )
    return Table(title="Remedies", rows=rows, words=(0, 1, 4))


_REACH, _BY_LAYER = "How far from the input the attack looked", "Gradient by layer"


def _plots(result: Row) -> list[Plot]:
    """Return plots of the queries and of the gradient by layer; nothing of what there is nothing to show of."""
    curves = [one for one in [*result["attacks"], *result["references"]] if len(one["curve"]) > 1][:_SHOWN]
    found = []
    if curves:
        means = "Means over the samples at each one's n-th query."
        for key, title, axis, line in (
            ("margin", "Margin of the queries", "margin, above 0: adversarial", 0),
            ("distance", "Distance of the queries", "distance / epsilon", 1),
        ):
            found.append(Plot(_curves(curves, key, title, axis, line), title, means))
    if reached := [attack for attack in result["attacks"] if attack["reach"]][:_SHOWN]:
        caption = "The farthest query of each sample; the dashed line is epsilon."
        found.append(Plot(_reach(reached), _REACH, caption))
    if (layers := _layers(result["model"]["probe"].get("layers", ()))) is not None:
        caption = "From the input on, on clean samples. Orange: the layer at fault; a cross: no gradient gets through."
        found.append(Plot(layers, _BY_LAYER, caption))
    return found


def _curves(shown: Sequence[Row], key: str, title: str, axis: str, line: float) -> Drawing:
    """Draw means over the samples at their n-th query, of each attack, over the share of its queries."""
    lines: list[Line] = []
    for attack in shown:
        last = max(*(point["query"] for point in attack["curve"]), 1)
        points = [(100 * one["query"] / last, one[key]) for one in attack["curve"] if one[key] is not None]
        lines.append((attack["name"], [x for x, _ in points], [y for _, y in points], {}))
    label, words = f"{title} over an attack's queries", "queries, per cent"

    def extra(axes: Any) -> None:
        axes.axhline(line, color=MUTED, linewidth=1.0, linestyle=DASHED)

    return line_plot(lines, label=label, extra=extra, xlabel=words, ylabel=axis, xlim=(0, 100))


def _reach(shown: Sequence[Row]) -> Drawing:
    """Draw the distances of the farthest queries of each sample from the input, for all attacks."""
    values = [[min(value, 3.0) for value in attack["reach"]] for attack in shown]
    most = max(1.2, *map(max, values))

    def extra(axes: Any) -> None:
        axes.hist(values, bins=24, range=(0, most), color=COLOURS[: len(shown)], rwidth=0.9)
        axes.axvline(1, color=MUTED, linewidth=1.0, linestyle=DASHED)

    names: list[Line] = [(attack["name"], [], [], {"linewidth": 5}) for attack in shown]
    label = "How far each sample's farthest query lies"
    return line_plot(
        names, label=label, extra=extra, xlabel="farthest query / epsilon", ylabel="samples", xlim=(0, most)
    )


def _layers(layers: Sequence[Row]) -> Drawing | None:
    """Draw the norm of the gradient that each layer passes on, from the input on; a cross where that is nothing."""
    known = [one for one in layers if one["fault"] or (one["gradient_norm"] is not None and one["leaf"])]
    every = -(-len(known) // _LAYERS)
    known = [one for place, one in enumerate(known) if one["fault"] or place % every == 0]
    # Results of earlier versions have what arrives at each layer alone.
    values = [one.get("passed_norm", one["gradient_norm"]) or 0.0 for one in known]
    positive = [value for value in values if value > 0]
    if not positive:
        return None
    low, high = min(positive) / 10, max(positive) * 3

    def paint(axes: Any) -> None:
        axes.set(
            xscale="log", xlim=(low, high), ylim=(len(known) - 0.4, -0.6), xlabel="gradient norm passed on, per row"
        )
        for place, (one, value) in enumerate(zip(known, values, strict=True)):
            colour = RANDOM if one["fault"] else REST
            if value > 0:
                axes.barh(place, value - low, left=low, height=0.7, color=colour)
            else:
                axes.plot([low * 1.4], [place], "x", color=colour, markersize=7, markeredgewidth=2.2)
            if one["fault"]:
                axes.axhspan(place - 0.5, place + 0.5, color=RANDOM, alpha=0.2, linewidth=0, zorder=0)
                words = axes.text(high, place, "x", color=RANDOM, ha="right", va="center", weight="bold")
                write(words, _FAULTS.get(one["fault"], one["fault"].replace("_", " ")))
        name_rows(axes, range(len(known)), [one["name"] or "the model" for one in known])
        for one, label in zip(known, axes.get_yticklabels(), strict=True):
            if one["fault"]:
                label.set(color=RANDOM, weight="bold")
        axes.minorticks_off()
        axes.grid(axis="x")

    margins = (name_width(one["name"] or "the model" for one in known), 0.45, 0.1, 0.05)
    size = (4.2 + margins[0], 0.2 * len(known) + 0.5)
    return Drawing(size=size, margins=margins, paint=paint, label="Gradient norm that each layer passes on")
