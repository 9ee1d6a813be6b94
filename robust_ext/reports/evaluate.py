"""The result of a whole evaluation: the number, its certificate, and texts to publish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from robust_ext.core import finding_texts as findings
from robust_ext.core.wording import count, percent, plain, rests_on, typed
from robust_ext.evaluations.evaluate.publish import claim_sentence, latex_row, markdown_row, publishable
from robust_ext.reports import blocks
from robust_ext.reports.blocks import Block, Cell, Plot, Report, Row, Section, Table, muted
from robust_ext.reports.plots import COLOURS, Drawing, ink, line_plot

_CERTIFIED = (
    "This takes away one reason to doubt the number. It does not prove that no stronger attack exists, and does "
    "not cover the layers that the test replaces."
)
_UNCERTIFIED = "The number is an upper bound, and the true robust accuracy may be far lower."


def report(result: Row) -> Report:
    """Return the report: the number and the certificate first, then the attacks in order, then texts to paste."""
    worst = result["worst_case"]
    claim, table = claim_sentence(result), _steps(result)
    paragraph, shown = publishable(result), result["findings"]
    opening = _headline(result)
    number, _, certified = opening.partition("; ")
    in_order: list[Block | Table] = [table, _recipes(result["steps"], "name")]
    refuted = (result["claim"] or {}).get("outcome") == "refuted"
    mixed = result["verdict"] == "passed" and bool(refuted or findings.weighty(shown))
    tail = [f"Warning: {plain(words)}" for words in _caveats(result)]
    recipe = result.get("recipe") or {}
    run = [f"attack: {recipe['text']}"] if recipe else []
    return Report(
        title=f"Evaluation: {result['norm']} {typed(result['epsilon'])}, {count(result['samples'], 'sample')}",
        about=f"{result['norm']} perturbations of at most {typed(result['epsilon'])}, "
        f"{count(result['samples'], 'sample')}, clean accuracy {percent(result['clean_accuracy'])}%",
        headline=number,
        verdict="mixed" if mixed else result["verdict"],
        first=[
            *([Block("words", _sentence(certified))] if certified else []),
            *([Block("words", claim, "lead")] if claim else []),
            *([] if worst is None else [_certificate_block(result["certificate"])]),
        ],
        sections=[
            *([Section("Attacks in order", in_order, open=True)] if result["steps"] else []),
            *_pasted(result, paragraph),
            *_searched(result),
            *blocks.evidence(result, _caveats(result)),
            *_curve_section(result),
            *_left_out(result),
        ],
        text=[
            [f"{opening}."],
            [findings.lines(shown)],
            [table] if result["steps"] else [],
            *([[_search_table(result), result["search"]["reason"]]] if result["search"] else []),
            *([[claim]] if claim else []),
            *([[paragraph]] if worst is not None else []),
            run,
            tail,
        ],
        badge=(
            f"robust accuracy, {result['norm']} {typed(result['epsilon'])}",
            "stopped" if worst is None else f"≤ {percent(worst['robust_accuracy'])}%",
            result["verdict"],
        ),
        figure=_curve(result),
    )


def _headline(result: Row) -> str:
    worst = result["worst_case"]
    if worst is None:
        return f"No attack was run: {_lower(result['stopped'])}".rstrip(".")
    certified = _certified_attack(result) if result["certificate"]["certified"] else "no attack is certified"
    low, high = map(percent, worst["interval"])
    return f"Robust accuracy at most {percent(worst['robust_accuracy'])}% (95% CI {low} to {high}); {certified}"


def _certified_attack(result: Row) -> str:
    """Name the certified attack with what it broke itself: others may have broken more, and broken them first."""
    certificate, total = result["certificate"], result["worst_case"]["broken"]
    own = (one for one in result["steps"] if certificate["attack"] == one["name"] or certificate["text"] == one["text"])
    broke = sum(one["broken"] for one in own)
    return f"the certified attack ({certificate['attack']}) broke {broke} of the {count(total, 'broken sample')}"


def _certificate_block(certificate: Row) -> Block:
    words = certificate["words"].replace("it finds", f"{certificate['attack']} finds", 1)
    if certificate["certified"]:
        return Block("words", f"{_sentence(words)} {_CERTIFIED}", "lead")
    # What settles an open test is in its reason; the causes of a failed one are shown as findings.
    if certificate["verdict"] == "inconclusive":
        words = f"not certified, by {certificate['attack']}: {certificate['reason'].rstrip('.')}"
    return Block("words", f"{_sentence(words)} {_UNCERTIFIED}", "warn")


def _steps(result: Row) -> Table:
    """The attacks in order, and the worst case as the last row."""
    rows: list[dict[str, Any]] = []
    for one in result["steps"]:
        rows.append(
            {
                "attack": one["name"],
                "samples": one["samples"],
                "broken": one["broken"],
                "still robust": Cell(percent(one["robust_accuracy"])),
                "passes a sample": f"{sum(one['passes'].values()) / max(one['samples'], 1):,.0f}",
            }
        )
    return Table(title="Attacks in order", rows=rows)


def _recipes(rows: Sequence[Row], title: str) -> Block:
    """The attacks as texts that run again, folded: they are long."""
    return Block("fold", [Block("code", "\n".join(f"{one[title]}: {one['text']}" for one in rows))], "Their settings")


def _pasted(result: Row, paragraph: str) -> list[Section]:
    if result["worst_case"] is None:
        return []
    recipe = result.get("recipe") or {}
    code = [
        Block("fold", [Block("code", recipe[key])], f"The attack in {title}")
        for key, title in (("foolbox", "Foolbox"), ("art", "ART"))
        if key in recipe
    ]
    return [
        Section(
            "To publish",
            [
                Block("words", paragraph),
                Block("code", markdown_row(result)),
                Block("fold", [Block("code", latex_row(result))], "The row in LaTeX"),
                *([Block("code", recipe["text"])] if recipe else []),
                *code,
            ],
        )
    ]


def _search_table(result: Row) -> Table:
    rows = [
        {
            "recipe": one["words"],
            "planted found": "-" if not one["scores"] else "{found} of {problems}".format(**one["scores"][-1]),
            "outcome": one["outcome"],
        }
        for one in result["search"]["tried"]
    ]
    return Table(title="Attack search", rows=rows, words=(0, 2))


def _searched(result: Row) -> list[Section]:
    if not result["search"]:
        return []
    words = "Recipes that were tried on planted problems; others than these judged the best."
    return [
        Section(
            "The search for an attack that works",
            [
                Block("words", result["search"]["reason"]),
                muted(words),
                _search_table(result),
                _recipes(result["search"]["tried"], "words"),
            ],
        )
    ]


def _caveats(result: Row) -> list[str]:
    worst = result["worst_case"]
    found = [] if worst is None else [rests_on(worst | {"without_non_finite": None}, result["samples"], "Worst case")]
    return [
        words for words in dict.fromkeys([*found, *result["certificate"]["warnings"], *result["warnings"]]) if words
    ]


def _left_out(result: Row) -> list[Section]:
    rows = [{"attack": one["name"], "reason": one["reason"]} for one in result["not_tried"]]
    return [Section("What was not tried", [Table(title="What was not tried", rows=rows, words=(0, 1))])] if rows else []


def _curve(result: Row) -> Drawing | None:
    """Draw robust accuracy over the budgets, epsilon marked; None where no attack looked for small perturbations."""
    curve = result["curve"]
    if len(curve) < 2:
        return None
    xs, ys = zip(*((row["epsilon"], 100 * row["robust_accuracy"]) for row in curve), strict=True)
    return line_plot(
        [("robust accuracy", xs, ys, {"color": COLOURS[0], "drawstyle": "steps-post"})],
        label="Robust accuracy over budgets",
        size=(5.6, 3.0),
        ylim=(0, 102),
        xlim=(0, max(xs) * 1.02),
        extra=lambda axes: axes.axvline(result["epsilon"], color=ink(), linewidth=1.0, linestyle=":"),
        xlabel=f"epsilon ({result['norm']})",
        ylabel="robust accuracy, per cent",
    )


def _curve_section(result: Row) -> list[Section]:
    drawing = _curve(result)
    words = (
        "Upper bounds, by the smallest verified perturbation of each sample; the dotted line is epsilon. Below it they "
        "are loose: attacks at epsilon do not look for smaller perturbations of what they break."
    )
    return [] if drawing is None else [Section("Other budgets", [muted(words), Block("plots", [Plot(drawing)])])]


def _lower(words: str) -> str:
    return f"{words[0].lower()}{words[1:]}"


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."
