"""The result of a diagnosis: what is wrong, by what evidence, what to do, and what that changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from robust_ext.core.errors import printable
from robust_ext.reports import findings
from robust_ext.reports.drawing import COLOURS, INK, MUTED, RANDOM, SCORE, Drawing, draw
from robust_ext.reports.tabular import Line, paragraph, table
from robust_ext.reports.wording import accuracy, count, interval, percent, plain, rests_on, seconds, shorten, typed

# Key of a point of a curve, title and axis.
_CURVES = (
    ("margin", "Margin of the queries", "margin, above 0: adversarial"),
    ("distance", "Distance of the queries", "distance / epsilon"),
)
_SHOWN, _LAYERS = len(COLOURS) - 1, 24


def plots(result: Mapping[str, Any]) -> dict[str, Any]:
    """Titles, SVGs and what their colours mean; parts that there is nothing to show of are empty."""
    curves = [one for one in [*result["attacks"], *result["references"]] if len(one["curve"]) > 1][:_SHOWN]
    return {
        "curves": [(title, _curves(curves, key, title, axis)) for key, title, axis in _CURVES if curves],
        "colours": [(one["name"], COLOURS[number]) for number, one in enumerate(curves)],
        "reach": _reach(result["attacks"]),
        "layers": _layers(result["model"]["probe"].get("layers", ())),
    }


def _curves(shown: Sequence[Mapping[str, Any]], key: str, title: str, axis: str) -> Drawing:
    """Means over the samples at their n-th query, of each attack, over the share of its queries."""

    def paint(axes: Any) -> None:
        for number, attack in enumerate(shown):
            points = [(point["query"], point[key]) for point in attack["curve"] if point[key] is not None]
            last = max(max(point["query"] for point in attack["curve"]), 1)
            axes.plot(
                [100 * query / last for query, _ in points],
                [value for _, value in points],
                color=COLOURS[number],
                linewidth=1.6,
                label=f"name-{number}",
            )
        axes.axhline(0 if key == "margin" else 1, color=MUTED, linewidth=1.0, linestyle=(0, (4, 2)))
        axes.set(xlabel="queries, per cent", ylabel=axis, xlim=(0, 100))
        axes.grid(axis="y")

    names = [plain(attack["name"]) for attack in shown]
    return draw(f"curve-{key}", (3.9, 2.6), (0.6, 0.45, 3.15, 2.05), paint, f"{title} over an attack's queries", names)


def _reach(attacks: Sequence[Mapping[str, Any]]) -> Drawing | None:
    """Draw the distances of the farthest queries of each sample from the input, for all attacks."""
    shown = [attack for attack in attacks if attack["reach"]][:_SHOWN]
    if not shown:
        return None
    most = max(1.2, *(min(value, 3.0) for attack in shown for value in attack["reach"]))

    def paint(axes: Any) -> None:
        values = [[min(value, 3.0) for value in attack["reach"]] for attack in shown]
        axes.hist(values, bins=24, range=(0, most), color=COLOURS[: len(shown)], rwidth=0.9)
        axes.axvline(1, color=MUTED, linewidth=1.0, linestyle=(0, (4, 2)))
        axes.set(xlabel="farthest query / epsilon", ylabel="samples", xlim=(0, most))
        axes.grid(axis="y")

    return draw("reach", (3.9, 2.6), (0.6, 0.45, 3.15, 2.05), paint, "How far each sample's farthest query lies")


def _layers(layers: Sequence[Mapping[str, Any]]) -> Drawing | None:
    """The norm of the gradient that each layer passes on, from the input on; a cross where that is nothing."""
    known = [one for one in layers if one["fault"] or (one["gradient_norm"] is not None and one["leaf"])]
    every = -(-len(known) // _LAYERS)
    known = [one for place, one in enumerate(known) if one["fault"] or place % every == 0]
    # Results of earlier versions have what arrives at each layer alone.
    values = [one.get("passed_norm", one["gradient_norm"]) or 0.0 for one in known]
    positive = [value for value in values if value > 0]
    if not positive:
        return None
    low, high = min(positive) / 10, max(positive) * 3
    names = [shorten(plain(one["name"] or "the model"), 20) for one in known]

    def paint(axes: Any) -> None:
        axes.set_xscale("log")
        axes.set(xlim=(low, high), ylim=(len(known) - 0.4, -0.6), yticks=[], xlabel="gradient norm passed on, per row")
        for place, (one, value) in enumerate(zip(known, values, strict=True)):
            colour = RANDOM if one["fault"] else SCORE
            if value > 0:
                axes.barh(place, value - low, left=low, height=0.7, color=colour)
            else:
                axes.plot([low * 1.25], [place], marker="x", color=colour, markersize=6, markeredgewidth=1.8)
            where = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "center"}
            axes.text(-0.02, place, f"name-{place}", color=INK, **where)
        axes.minorticks_off()
        axes.grid(axis="x")

    height = 0.2 * len(known) + 0.15
    return draw(
        "layers",
        (3.9, height + 0.6),
        (1.5, 0.45, 2.25, height),
        paint,
        "Gradient norm that each layer passes on",
        names,
    )


# What a finding about a model says of it in a word or two, and what is so without it.
_BEHAVIOUR = (
    ("random_output", "random", "the same logits each time"),
    ("batch_dependent", "batch dependent", "each row on its own"),
    ("changes_input", "changes its input in place", ""),
    ("probabilities", "returns probabilities", ""),
    ("non_finite_logits", "returns NaN or infinity", ""),
)
_LARGER = {"larger": "2 x epsilon", "unbounded": "whole range"}


def text(result: Mapping[str, Any]) -> str:
    """The likely cause, the model in a line, a row an attack, findings, remedies that were tried, and what is next.

    Robust accuracy is that of the samples at the budget. Test score and R-ASR are those of a short binarization test.
    """
    lines = [*paragraph(plain(result["reason"])), "", *paragraph(model_line(result))]
    if result["not_run"] is not None:
        lines += ["", *paragraph(f"No attack was run: {plain(result['not_run'])}")]
    if result["attacks"]:
        lines += ["", *table([_HEADER, *rows(result)], words=(0,)), ""]
    lines += [line for note in notes(result) for line in paragraph(note)]
    lines += findings.numbered(result["findings"])
    if result["tried"]:
        header = ("for", "remedy that was tried", "test score", "robust accuracy", "")
        lines += ["", *table([header, *tried_rows(result)], words=(0, 1, 4))]
    for step in result["next"]:
        lines += ["", *paragraph(f"Next: {plain(step['words'])}"), f"    {printable(step['command'])}"]
    return "\n".join(lines) + "\n"


def context(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the page's content."""
    weights = [finding["weight"] for finding in result["findings"] if finding["weight"] != "low"]
    drawn = plots(result)
    return {
        "verdict": "failed" if weights else "passed",
        "model_line": model_line(result),
        "header": _HEADER,
        "rows": rows(result),
        "notes": notes(result),
        "tried": tried_rows(result),
        "plots": drawn,
        "figure": next((drawing for _, drawing in drawn["curves"]), drawn["layers"]),
    }


_HEADER = ("attack", "robust accuracy", "2 x epsilon", "whole range", "test score", "R-ASR", "planted", "seconds")


def model_line(result: Mapping[str, Any]) -> str:
    """The model in a sentence: mode, what its logits depend on, ranges, clean accuracy."""
    model, found = result["model"], {finding["code"] for finding in result["findings"]}
    words = [f"{model['mode']} mode"]
    # Where the model was refused, not all of it was looked at.
    whole = result["not_run"] is None
    words += [bad if code in found else good for code, bad, good in _BEHAVIOUR if code in found or (good and whole)]
    words += [f"inputs in {_range(model['inputs'])}"]
    if model["logits"] is not None:
        words += [f"logits in {_range(model['logits'])}"]
    if result["clean_accuracy"] is not None:
        words += [
            f"clean accuracy {percent(result['clean_accuracy'])} per cent of {count(result['samples'], 'sample')}"
        ]
    return f"Model {plain(model['name'])}: {', '.join(words)}."


def rows(result: Mapping[str, Any]) -> list[Line]:
    """The cells of each attack, and of those it is compared with."""
    found = []
    for attack in [*result["attacks"], *result["references"]]:
        larger = attack.get("larger", {})
        score = attack.get("score")
        bounds = interval(attack.get("score_interval"), decimals=2)
        found.append(
            (
                plain(attack["name"]),
                "raised" if attack["error"] else accuracy(attack),
                *(accuracy(larger[role]) if role in larger else "-" for role in _LARGER),
                "-" if score is None else f"{score:.2f} {bounds}".rstrip(),
                "-" if attack.get("random_score") is None else f"{attack['random_score']:.2f}",
                str(attack["planted"]) if attack.get("planted") else "-",
                seconds(attack["seconds"]),
            )
        )
    return found


def notes(result: Mapping[str, Any]) -> list[str]:
    """Explain the numbers and their basis, in sentences."""
    warnings = [f"Warning: {plain(warning)}" for warning in result["warnings"]]
    if not result["attacks"]:
        return warnings
    found = [
        f"Robust accuracy in per cent at epsilon {typed(result['epsilon'])} in {result['norm']}; test score and R-ASR "
        "of a short binarization test: the shares of planted examples that the attack and random search find."
    ]
    for attack in result["attacks"]:
        if attack["not_planted"] is not None:
            found.append(f"{plain(attack['name'])}: no binarization test: {plain(attack['not_planted'])}")
        # Results of earlier versions say nothing of what was left out.
        left_out = f"{attack['name']} with larger budgets" in result.get("left_out", ())
        others = attack["error"] or attack["kind"] == "minimum norm" or not result["references"]
        if not (attack["larger"] or left_out or others):
            words = "was not run with larger budgets: it takes more passes a sample than are affordable."
            found.append(f"{plain(attack['name'])} {words}")
        found.append(rests_on(attack, result["samples"], plain(attack["name"])))
    named = {finding["code"] for finding in result["findings"]}
    for finding in result["model"]["probe"]["findings"]:
        if finding["code"] not in named:
            found.append(f"The attacks got past what a probe of the model shows: {plain(findings.sentence(finding))}")
    return [note for note in [*found, *warnings] if note]


def tried_rows(result: Mapping[str, Any]) -> list[Line]:
    """The cells of each remedy that was tried: what was, what became of it, and whether it is confirmed."""
    found = []
    for entry in result["tried"] or ():
        before, after = entry["before"], entry["after"]
        cells = [
            "-" if after is None else f"{show((before or {}).get(key))} > {show(after[key])}"
            for key, show in (("score", _score), ("robust_accuracy", percent))
        ]
        # Results of earlier versions have no outcome.
        words = entry["error"] or entry.get("outcome") or ("confirmed" if entry["confirmed"] else "changes nothing")
        lines = [line for line in findings.to_paste(entry["remedy"]) if not line.startswith(("import", "from", "#"))]
        remedy = lines[0] if lines else entry["remedy"]["words"]
        found.append((plain(entry["code"]), plain(remedy), *cells, plain(words)))
        for one in entry.get("beside", ()):
            share = f"{percent((before or {}).get('robust_accuracy'))} > {percent(one['robust_accuracy'])}"
            found.append(("", f"  beside it: {plain(one['name'])}", "-", share, ""))
    return found


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _range(values: Sequence[float] | None) -> str:
    return "no finite number" if values is None else f"[{values[0]:.3g}, {values[1]:.3g}]"
