"""The result of a diagnosis: what is wrong, by what evidence, what to do, and what that changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from robust_ext.core.printable import printable
from robust_ext.reports import findings
from robust_ext.reports.diagnosis_plots import plots
from robust_ext.reports.text import Line, paragraph, table
from robust_ext.reports.wording import accuracy, count, interval, percent, plain, rests_on, seconds, typed

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
    """What the page shows."""
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
    """What the numbers mean and rest on, in sentences."""
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
