"""The evaluation of a test-time defense: as text for a terminal, and as one page that needs nothing from outside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.reports.columns import Line, layout
from robust_ext.reports.html import environment_of_templates
from robust_ext.reports.plots import INK, RANDOM, SCORE, draw
from robust_ext.reports.table import wrap
from robust_ext.reports.wording import plain, seconds


def defense_table(result: Mapping[str, Any]) -> str:
    """Return a test-time result as text, without colour: a row an attack, the worst cases, the gain, and warnings.

    Args:
        result: The content of ``result.json``, of kind ``"test_time"``.

    Raises:
        InvalidArgumentError: The result is of another kind.
    """
    _check(result)
    rows: list[Line] = [("attack", "category", "static", "defended", "deviation", "seconds")]
    rows.append(("none", "clean", *(_percent(result[one]["clean_accuracy"]) for one in ("static", "defended")), "", ""))
    for static, defended in zip(result["static"]["attacks"], result["defended"]["attacks"], strict=True):
        rows.append(
            (
                plain(defended["name"]),
                defended["category"],
                _percent(static["robust_accuracy"]),
                _percent(defended["robust_accuracy"]),
                _percent(defended["deviation"]) if result["random"] else "",
                seconds(defended["seconds"]),
            )
        )
    worst = [_percent(result[one]["worst_case"]["robust_accuracy"]) for one in ("static", "defended")]
    rows.append(("worst case", "all", *worst, "", ""))
    lines = [*wrap(_opening(result)), "", *layout(rows, words=(0, 1)), "", *wrap(verdict(result)), *wrap(_cost(result))]
    for row in result["categories"]:
        lines += wrap(
            f"Under {row['category']} attacks alone {_percent(row['alone'])} are left; without them the worst case "
            f"would be {_percent(row['without'])}."
        )
    for entry in result["refused"]:
        lines += wrap(f"Not run: {plain(entry['name'])}. {plain(entry['reason'])}")
    for warning in result["warnings"]:
        lines += wrap(f"Warning: {plain(warning)}")
    return "\n".join(lines) + "\n"


def verdict(result: Mapping[str, Any]) -> str:
    """Whether the defense is more robust than its static model, in a sentence.

    Args:
        result: The content of ``result.json``.
    """
    gain = result["gain"]
    low, high = gain["interval"]
    span = f"{100 * gain['robust_accuracy']:+.1f} points (95% interval {100 * low:+.1f} to {100 * high:+.1f})"
    if low > 0:
        return f"The defense improves on its static model by {span}."
    if high < 0:
        return f"The defense weakens its static model: {span}."
    return f"No difference between the defense and its static model can be told: {span}."


def render_defense_html(result: Mapping[str, Any]) -> str:
    """Return the page of a test-time result: self-contained HTML, the same text for the same input.

    Args:
        result: The content of ``result.json``, of kind ``"test_time"``.

    Raises:
        InvalidArgumentError: The result is of another kind.
        MissingDependencyError: Matplotlib or jinja2 are not installed.
    """
    _check(result)
    environment = environment_of_templates()
    from markupsafe import Markup

    environment.filters.update(percent=_percent)
    page = environment.get_template("adaptive.html.jinja").render(
        result=result,
        verdict=verdict(result),
        opening=_opening(result),
        cost=_cost(result),
        bars=Markup(_bars(result)),
        rows=list(zip(result["static"]["attacks"], result["defended"]["attacks"], strict=True)),
        colours=(RANDOM, SCORE),
    )
    return page.rstrip() + "\n"


def _check(result: Mapping[str, Any]) -> None:
    if result.get("kind") != "test_time":
        raise InvalidArgumentError("result['kind']", result.get("kind"), "'test_time'")


def _opening(result: Mapping[str, Any]) -> str:
    kinds = [words for flag, words in ((result["random"], "random"), (result["batch_level"], "batch-level")) if flag]
    about = f" ({', '.join(kinds)})" if kinds else ""
    return (
        f"Robust accuracy in per cent of the static model and of the defense {plain(result['defense'])}{about}: "
        f"{result['samples']} samples, {result['norm']}, epsilon {result['epsilon']:.4g}."
    )


def _cost(result: Mapping[str, Any]) -> str:
    cost = result["cost"]
    return (
        f"An answer of the defense takes {cost['seconds_ratio']:.1f} times as long as one of the static model, and "
        f"{cost['forward']:.4g} forward and {cost['backward']:.4g} backward passes through it."
    )


def _bars(result: Mapping[str, Any]) -> str:
    """Robust accuracy under each attack and under all, of the static model and of the defense, as SVG."""
    names = ["clean", *(plain(attack["name"]) for attack in result["defended"]["attacks"]), "worst case"]
    pairs = [
        [
            result[one]["clean_accuracy"],
            *(attack["robust_accuracy"] for attack in result[one]["attacks"]),
            result[one]["worst_case"]["robust_accuracy"],
        ]
        for one in ("static", "defended")
    ]
    height = 0.3 * len(names)

    def paint(axes: Any) -> None:
        for offset, values, colour, hatch in ((-0.18, pairs[0], RANDOM, "////"), (0.18, pairs[1], SCORE, "")):
            places = [row + offset for row in range(len(names))]
            axes.barh(places, [100 * value for value in values], height=0.34, color=colour, hatch=hatch, linewidth=0)
        axes.axhline(len(names) - 1.5, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(names)), [f"name-{row}" for row in range(len(names))])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlim(0, 100)
        axes.set_xlabel("robust accuracy, per cent")
        axes.grid(visible=True, axis="x")

    label = "Robust accuracy of the static model and of the defense under each attack and under all of them"
    return draw("bars", (6.6, height + 0.6), (2.5, 0.5, 3.95, height), paint, label, names)


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"
