"""The result of case studies: two rows a study, one for each recipe, with the figures of the paper."""

from __future__ import annotations

from typing import Any

from robust_ext.core.wording import count, interval, percent, plain, typed
from robust_ext.reports.blocks import Block, Cell, Plot, Report, Row, Section, Table, muted
from robust_ext.reports.hardness import hardness_plot, hardness_points
from robust_ext.reports.plots import DASHED, MUTED, RANDOM, SCORE, Bar, Drawing, bar_plot, ink, line_plot

# The score that passes, of the binarization test's default settings.
_THRESHOLD = 0.95
_KINDS = {"weak": ("claimed", "claimed", RANDOM), "right": ("true", "verified", SCORE)}


def report(result: Row) -> Report:
    """Return the report: a row a recipe, how many were judged correctly, and the figures of the paper.

    A row has the verdict, the evidence against the recipe, and the robust accuracy in per cent; of the binarization
    test the score, the random attack's success rate, the depth, and the canaries that the recipe repaired; and of the
    paper the robust accuracy and the score.
    """
    studies = result["studies"]
    recipes = [(study, kind, study["recipes"][kind]) for study in studies for kind in _KINDS]
    right = all(one["verdict"] == "passed" if kind == "right" else one["flagged_by"] for _, kind, one in recipes)
    verdict, number = "passed" if right else "inconclusive", len(studies)
    defenses = count(number, "published defense")
    summary = (
        f"{result['flagged']} of {count(number, 'recipe')} of the authors flagged, {result['passed']} of "
        f"{count(number, 'right recipe')} passed; {count(result['samples'], 'sample')} each."
    )
    missing = ", ".join(plain(study["title"]) for study in studies if not study["mechanism"]["present"])
    unseen = (
        f"The mechanism that misled the authors was not seen in: {missing}. What flags a recipe there is something "
        "else, and is not counted."
    )
    flagged = (
        "A recipe is flagged where it fails the binarization test, repairs canaries, shows a finding that names what "
        "is wrong with it, or runs on a model that cannot be evaluated as it is."
    )
    accuracies = (
        "Weak: the recipe of the authors. Robust accuracy in per cent: of it as they measure it, by candidates "
        "alone; of the right one with errors on clean samples as not robust. With a detector, score and R-ASR are "
        "those of the worse of both tests."
    )
    scores, table = _scores(studies), _table(recipes)
    first = Plot(scores, "", "After figure 2 of the paper. Thin lines: 95% intervals.")
    hardness = [
        Plot(drawing, f"{study['title']}, {kind} recipe")
        for study, kind, recipe in recipes
        if (drawing := _hardness(recipe)) is not None
    ]
    moved = muted(
        "After figure 3 of the paper: the same candidates judged with the boundary closer to the inner points."
    )
    return Report(
        title=f"Case studies: {defenses}",
        about=f"{defenses}, each under the attack recipe of its authors and under a right one",
        headline="All judged correctly" if right else "Not all judged correctly",
        verdict=verdict,
        first=[Block("words", summary), muted(flagged)],
        sections=[
            Section("Does the test tell them apart?", [Block("plots", [first])], open=True),
            Section("Every recipe", [table, muted(accuracies)]),
            Section("The figures of the paper", _figures(studies, recipes)),
            Section("Study by study", [block for study in studies for block in _study(study)]),
            *(
                [Section("Score and R-ASR where the boundary is moved", [moved, Block("plots", hardness, "grid")])]
                if hardness
                else []
            ),
        ],
        text=[[table], [summary, *([unseen] if missing else [])]],
        badge=("recipes judged correctly", f"{result['flagged'] + result['passed']} of {2 * number}", verdict),
        figure=scores,
    )


def _figures(studies: list[Row], recipes: list[tuple[Row, str, Row]]) -> list[Block]:
    better = (
        "After figure 4. From the authors' recipe (large) to a right one (small); hollow where the score alone passes; "
        "triangles have a detector."
    )
    guessed = "Orange: the authors' recipe. On the dotted line an attack is no better than random search."
    others = [
        Plot(_accuracies(studies), "Robust accuracy under a better attack", better),
        Plot(_random(recipes), "How hard the problems are", guessed),
    ]
    return [Block("plots", others, "grid")]


def _table(recipes: list[tuple[Row, str, Row]]) -> Table:
    rows = []
    for study, kind, recipe in recipes:
        canaries, stated = recipe["canaries"], study["published"][_KINDS[kind][0]]
        score, depth = study["published"][f"{kind}_score"], recipe["depth"]
        paper = [*([] if stated is None else [percent(stated)]), *([] if score is None else [f"score {score}"])]
        row = {
            "study": study["title"] if kind == "weak" else "",
            "recipe": kind,
            "verdict": recipe["verdict"],
            "flagged by": recipe["flagged_by"] or "-",
            "robust": _accuracy(kind, recipe),
            "score": Cell(_share(recipe["score"]), interval(recipe["score_interval"])),
            "R-ASR": _share(recipe["random_score"]),
            "depth": "-" if depth is None else f"{depth:g}",
            "canaries": "{repaired} of {planted}".format(**canaries) if canaries and canaries["planted"] else "-",
            "in the paper": ", ".join(paper) or "-",
        }
        rows.append(row)
    return Table(title="Every recipe", rows=rows, words=(0, 1, 2, 3, 9), terse=("score",))


def _accuracy(kind: str, recipe: Row) -> float:
    """Return the authors' claim for their recipe, and robust accuracy with clean errors for the right one."""
    accuracy: float = recipe["robust_accuracy"][_KINDS[kind][1]]
    return accuracy


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _study(study: Row) -> list[Block]:
    """Return the mechanism, and both recipes with their verdicts."""
    mechanism = study["mechanism"]
    values = "; ".join(f"{name} {value:.3g}" for name, value in mechanism["values"].items())
    seen = (
        f"Mechanism {'seen' if mechanism['present'] else 'not seen'}: {mechanism['words']} {values}. Clean accuracy "
        f"{percent(study['clean_accuracy'])} per cent, epsilon {typed(study['epsilon'])}."
    )
    found = [Block("heading", f"{study['title']} ({study['source']})"), Block("words", seen)]
    for kind, recipe in study["recipes"].items():
        whose = "Authors' recipe" if kind == "weak" else "Right recipe"
        found.append(Block("words", f"{whose}: {recipe['words']} {recipe['refused'] or recipe['reason']}"))
        found.append(Block("code", recipe["attack"]))
    return [*found, *([muted(study["notes"])] if study["notes"] else [])]


def _scores(studies: list[Row]) -> Drawing:
    """Draw test scores of both recipes of every study, as in figure 2 of the paper."""

    def bar(recipe: Row, colour: str) -> Bar:
        score = recipe["score"]
        words = recipe["verdict"] if score is None else f"{score:.2f}"
        return Bar(parts=[] if score is None else [(score, colour)], words=words, interval=recipe["score_interval"])

    rows = [(study["title"], [bar(study["recipes"][kind], _KINDS[kind][2]) for kind in _KINDS]) for study in studies]
    label = "Test score of the recipe of the authors and of a right one, for each study"
    line, key = (_THRESHOLD, f"pass from {_THRESHOLD:g}"), {RANDOM: "the authors' recipe", SCORE: "a right one"}
    return bar_plot(rows, axis="test score", label=label, line=line, key=key)


def _accuracies(studies: list[Row]) -> Drawing:
    """Draw robust accuracy against the test score, both recipes of a study joined, as in figure 4 of the paper."""

    def extra(axes: Any) -> None:
        axes.axvline(_THRESHOLD, color=ink(), linewidth=0.9, linestyle=DASHED)
        for study in studies:
            ends = []
            for kind, (_, _, colour) in _KINDS.items():
                recipe = study["recipes"][kind]
                if recipe["score"] is None:
                    continue
                ends.append((recipe["score"], 100 * _accuracy(kind, recipe)))
                # A hollow marker for a recipe that is flagged by other evidence than its score.
                face = "none" if kind == "weak" and recipe["verdict"] == "passed" else colour
                style = {"markersize": 7 if kind == "weak" else 4.5, "clip_on": False, "zorder": 3}
                axes.plot(*ends[-1], "^" if recipe["tests"] else "o", color=colour, markerfacecolor=face, **style)
            if len(ends) == 2:
                axes.annotate("", ends[1], ends[0], arrowprops={"arrowstyle": "->", "color": MUTED, "linewidth": 0.8})

    label = "Robust accuracy against the test score, from the recipe of the authors to a right one"
    settings: dict[str, Any] = {"xlim": (0, 1.02), "ylim": (0, 102)}
    settings |= {"xlabel": "test score", "ylabel": "robust accuracy, per cent"}
    return line_plot([], label=label, size=(4.2, 3.1), extra=extra, **settings)


def _random(recipes: list[tuple[Row, str, Row]]) -> Drawing:
    """Draw the test score against R-ASR of all recipes."""

    def extra(axes: Any) -> None:
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8, linestyle=":")
        axes.axhline(_THRESHOLD, color=ink(), linewidth=0.9, linestyle=DASHED)
        for _, kind, recipe in recipes:
            if recipe["score"] is not None and recipe["random_score"] is not None:
                place, style = (recipe["random_score"], recipe["score"]), {"alpha": 0.75, "clip_on": False}
                axes.plot(*place, "o", color=_KINDS[kind][2], markersize=5, **style)

    label = "Test score against the success rate of the random attack, for every recipe"
    settings: dict[str, Any] = {"xlim": (0, 1.02), "ylim": (0, 1.02), "xlabel": "R-ASR", "ylabel": "test score"}
    return line_plot([], label=label, size=(4.2, 3.1), extra=extra, **settings)


def _hardness(recipe: Row) -> Drawing | None:
    """Draw score and R-ASR against kappa, as in figure 3 of the paper; None if there are no two values of kappa."""
    points = hardness_points(recipe.get("hardness") or ())
    if len(points) < 2:
        return None
    return hardness_plot(points, _THRESHOLD)
