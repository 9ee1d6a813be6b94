"""The result of case studies: two rows a study, one for each recipe, with the figures of the paper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from robust_ext.reports.drawing import INK, MUTED, RANDOM, SCORE, Drawing, draw
from robust_ext.reports.plots import Bar, Curve, bar_plot, curve_plot
from robust_ext.reports.tabular import Line, paragraph, table
from robust_ext.reports.wording import count, percent, plain

_HEADER = ("study", "recipe", "verdict", "flagged by", "robust", "score", "R-ASR", "depth", "canaries", "in the paper")
# The score that passes, of the binarization test's default settings.
_THRESHOLD = 0.95


def text(result: Mapping[str, Any]) -> str:
    """Return a table with two rows a study, and the number of recipes judged rightly.

    A row has the verdict, the evidence against the recipe, and the robust accuracy in per cent; of the binarization
    test the score, the random attack's success rate, the depth, and the canaries that the recipe repaired; and of the
    paper the robust accuracy and the score.
    """
    rows = [_HEADER, *(_row(*one) for one in _recipes(result))]
    missing = [study["title"] for study in result["studies"] if not study["mechanism"]["present"]]
    below = [_summary(result)]
    if missing:
        below.append(
            f"The mechanism that misled the authors was not seen in: {', '.join(map(plain, missing))}. What flags a "
            "recipe there is something else, and is not counted."
        )
    sentences = [line for words in below for line in paragraph(words)]
    return "\n".join([*table(rows, words=(0, 1, 2, 3, 9)), "", *sentences, ""])


def context(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the page's template."""
    return {
        "studies": result["studies"],
        "summary": _summary(result),
        "right": all(study["recipes"]["right"]["verdict"] == "passed" for study in result["studies"])
        and all(study["recipes"]["weak"]["flagged_by"] for study in result["studies"]),
        "score_plot": _score_plot(result),
        "accuracy_plot": _accuracy_plot(result),
        "random_plot": _random_plot(result),
        "hardness": [
            (f"{study['title']}, {kind} recipe", plot)
            for number, (study, kind) in enumerate(_recipes(result))
            if (plot := _hardness_plot(study["recipes"][kind], f"hardness-{number // 2}-{kind}"))
        ],
    }


def _summary(result: Mapping[str, Any]) -> str:
    number = len(result["studies"])
    return (
        f"{result['flagged']} of {count(number, 'recipe')} of the authors flagged, {result['passed']} of "
        f"{count(number, 'right recipe')} passed; {count(result['samples'], 'sample')} each."
    )


def _recipes(result: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], str]]:
    return ((study, kind) for study in result["studies"] for kind in ("weak", "right"))


def _accuracy(study: Mapping[str, Any], kind: str) -> float:
    """Return the authors' claim for their recipe, and robust accuracy with clean errors for the right one."""
    accuracy: float = study["recipes"][kind]["robust_accuracy"]["claimed" if kind == "weak" else "verified"]
    return accuracy


def _row(study: Mapping[str, Any], kind: str) -> Line:
    recipe, published = study["recipes"][kind], study["published"]
    canaries, score = recipe["canaries"], published[f"{kind}_score"]
    stated = published["claimed" if kind == "weak" else "true"]
    paper = [] if stated is None else [percent(stated)]
    paper += [] if score is None else [f"score {score}"]
    return (
        plain(study["title"]) if kind == "weak" else "",
        kind,
        recipe["verdict"],
        recipe["flagged_by"] or "-",
        percent(_accuracy(study, kind)),
        _share(recipe["score"]),
        _share(recipe["random_score"]),
        "-" if recipe["depth"] is None else f"{recipe['depth']:g}",
        f"{canaries['repaired']} of {canaries['planted']}" if canaries and canaries["planted"] else "-",
        ", ".join(paper) or "-",
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _score_plot(result: Mapping[str, Any]) -> Drawing:
    """Draw test scores of both recipes of every study, as in figure 2 of the paper."""

    def bar(recipe: Mapping[str, Any], colour: str, words: str) -> Bar:
        score = recipe["score"]
        parts = [] if score is None else [(score, colour)]
        shown = recipe["verdict"] if score is None else f"{score:.2f} {words}"
        return Bar(parts=parts, words=shown, hatched=colour == RANDOM, interval=recipe["score_interval"])

    rows = [
        (
            study["title"],
            [bar(study["recipes"]["weak"], RANDOM, "authors'"), bar(study["recipes"]["right"], SCORE, "right")],
        )
        for study in result["studies"]
    ]
    label = "Test score of the recipe of the authors and of a right one, for each study"
    line = (_THRESHOLD, f"pass from {_THRESHOLD:g}")
    return bar_plot(rows, axis="test score", label=label, prefix="scores", line=line)


def _accuracy_plot(result: Mapping[str, Any]) -> Drawing:
    """Draw robust accuracy against the test score, both recipes of a study joined, as in figure 4 of the paper."""

    def paint(axes: Any) -> None:
        for study in result["studies"]:
            ends = []
            for kind, colour, size in (("weak", RANDOM, 7), ("right", SCORE, 4.5)):
                recipe = study["recipes"][kind]
                if recipe["score"] is None:
                    continue
                ends.append((recipe["score"], 100 * _accuracy(study, kind)))
                # A hollow marker for a recipe that is flagged by other evidence than its score.
                face = "#ffffff" if kind == "weak" and recipe["verdict"] == "passed" else colour
                marker = "^" if recipe["tests"] else "o"
                axes.plot(
                    *ends[-1], marker, color=colour, markerfacecolor=face, markersize=size, clip_on=False, zorder=3
                )
            if len(ends) == 2:
                axes.annotate("", ends[1], ends[0], arrowprops={"arrowstyle": "->", "color": MUTED, "linewidth": 0.8})
        axes.axvline(_THRESHOLD, color=INK, linewidth=0.9, linestyle=(0, (3, 2)))
        axes.set(xlim=(0, 1.02), ylim=(0, 102), xlabel="test score", ylabel="robust accuracy, per cent")
        axes.grid(visible=True)

    label = "Robust accuracy against the test score, from the recipe of the authors to a right one"
    return draw("accuracies", (4.2, 3.1), (0.6, 0.5, 3.4, 2.45), paint, label)


def _random_plot(result: Mapping[str, Any]) -> Drawing:
    """Draw the test score against R-ASR of all recipes."""

    def paint(axes: Any) -> None:
        for study, kind in _recipes(result):
            recipe, colour = study["recipes"][kind], RANDOM if kind == "weak" else SCORE
            if recipe["score"] is not None and recipe["random_score"] is not None:
                place = recipe["random_score"], recipe["score"]
                axes.plot(*place, "o", color=colour, markersize=5, alpha=0.75, clip_on=False)
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8, linestyle=":")
        axes.axhline(_THRESHOLD, color=INK, linewidth=0.9, linestyle=(0, (3, 2)))
        axes.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel="R-ASR", ylabel="test score")
        axes.grid(visible=True)

    label = "Test score against the success rate of the random attack, for every recipe"
    return draw("random", (4.2, 3.1), (0.6, 0.5, 3.4, 2.45), paint, label)


def _hardness_plot(recipe: Mapping[str, Any], prefix: str) -> Drawing | None:
    """Draw score and R-ASR against kappa, as in figure 3 of the paper; None if there are no two values of kappa."""
    points = [
        (1 - row["kappa"], row["score"], row["random_score"])
        for row in recipe.get("hardness") or ()
        if row["kappa"] < 1
    ]
    if len(points) < 2:
        return None
    curve = Curve(label="", points=points)
    return curve_plot([curve], _THRESHOLD, axis="1 - kappa", mark=None, prefix=prefix, rising=False)
