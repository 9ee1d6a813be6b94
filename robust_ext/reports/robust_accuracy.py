"""A robust-accuracy result: as text for a terminal, and as one page that needs nothing from outside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.reports.columns import layout
from robust_ext.reports.html import environment_of_templates
from robust_ext.reports.plots import INK, MUTED, draw
from robust_ext.reports.table import wrap
from robust_ext.reports.wording import plain, seconds

# After Okabe and Ito, for colour-blind readers.
_COLOURS = ("#0072b2", "#d98200", "#009e73", "#cc79a7", "#56b4e9", "#b2182b", "#7a5195", "#616e7c")
_MARKERS = "osD^v*PX"
_NORMS = {"linf": "linf", "l2": "l2", "l1": "l1"}


def robust_accuracy_table(result: Mapping[str, Any]) -> str:
    """Return a robust-accuracy result as text, without colour: a row an attack, a column a budget, in per cent.

    The last row is the worst case over all attacks, sample by sample. ``above best`` is how far an attack's robust
    accuracy lies above that of the best single attack: the mean over budgets, and the maximum.

    Args:
        result: The content of ``result.json``, of kind ``"robust_accuracy"``.

    Raises:
        InvalidArgumentError: The result is of another kind or has no attacks.
    """
    _check(result)
    epsilons = [row["epsilon"] for row in result["worst_case"]]
    rows = [("attack", *(f"{epsilon:.4g}" for epsilon in epsilons), "above best", "median", "seconds")]
    for attack in result["attacks"]:
        rows.append(
            (
                plain(attack["name"]),
                *(_percent(row["robust_accuracy"]) for row in attack["robust_accuracy"]),
                _above(attack["difference"]),
                _median(attack["distances"]),
                seconds(attack["seconds"]),
            )
        )
    rows.append(("worst case", *(_percent(row["robust_accuracy"]) for row in result["worst_case"]), "", "", ""))
    opening = (
        f"Robust accuracy in per cent, {result['norm']}, by epsilon; {result['samples']} samples, clean accuracy "
        f"{_percent(result['clean_accuracy'])}."
    )
    return "\n".join([*wrap(opening), "", *layout(rows, words=(0,))]) + "\n"


def render_robust_accuracy_html(result: Mapping[str, Any]) -> str:
    """Return the page of a robust-accuracy result: self-contained HTML, the same text for the same input.

    Args:
        result: The content of ``result.json``, of kind ``"robust_accuracy"``.

    Raises:
        InvalidArgumentError: The result is of another kind or has no attacks.
        MissingDependencyError: Matplotlib or jinja2 are not installed.
    """
    _check(result)
    environment = environment_of_templates()
    from markupsafe import Markup

    environment.filters.update(percent=_percent, median=_median)
    page = environment.get_template("robust_accuracy.html.jinja").render(
        result=result,
        curves=Markup(_curves(result)),
        styles=[(attack["name"], *_style(number)) for number, attack in enumerate(result["attacks"])],
        strongest=min(result["attacks"], key=lambda attack: attack["difference"]["mean"]),
    )
    return page.rstrip() + "\n"


def _check(result: Mapping[str, Any]) -> None:
    if result.get("kind") != "robust_accuracy":
        raise InvalidArgumentError("result['kind']", result.get("kind"), "'robust_accuracy'")
    if not result["attacks"]:
        raise InvalidArgumentError("result['attacks']", "none", "at least one attack")


def _style(number: int) -> tuple[str, str]:
    return _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)]


def _curves(result: Mapping[str, Any]) -> str:
    """Robust accuracy over epsilon of every attack, and the worst case with its intervals, as SVG."""
    names = [plain(attack["name"]) for attack in result["attacks"]]
    size = (6.6, 3.5)

    def paint(axes: Any) -> None:
        for number, attack in enumerate(result["attacks"]):
            colour, marker = _style(number)
            rows = [{"epsilon": 0.0, "robust_accuracy": result["clean_accuracy"]}, *attack["robust_accuracy"]]
            xs, ys = [row["epsilon"] for row in rows], [100 * row["robust_accuracy"] for row in rows]
            axes.plot(xs, ys, color=colour, marker=marker, markersize=4, linewidth=1.4)
        worst = result["worst_case"]
        xs = [row["epsilon"] for row in worst]
        axes.fill_between(
            xs,
            [100 * row["interval"][0] for row in worst],
            [100 * row["interval"][1] for row in worst],
            color=MUTED,
            alpha=0.16,
            linewidth=0,
        )
        axes.plot(xs, [100 * row["robust_accuracy"] for row in worst], color=INK, linewidth=2.2, linestyle=(0, (4, 2)))
        axes.set_ylim(0, 102)
        axes.set_xlim(0, max(xs) * 1.02)
        axes.set_xlabel(f"epsilon ({_NORMS[result['norm']]})")
        axes.set_ylabel("robust accuracy, per cent")
        axes.grid(visible=True)

    label = "Robust accuracy over epsilon of each attack, and the worst case over all of them"
    return draw("curves", size, (0.6, 0.5, 5.85, 2.85), paint, label, names)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _above(difference: Mapping[str, float | None]) -> str:
    return f"{_percent(difference['mean'])} / {_percent(difference['maximum'])}"


def _median(distances: list[float | None] | None) -> str:
    """The median of the smallest perturbations; without one where half of the samples have none."""
    if distances is None:
        return "-"
    ordered = sorted(float("inf") if value is None else value for value in distances)
    count = len(ordered)
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return "none" if middle == float("inf") else f"{middle:.4g}"
