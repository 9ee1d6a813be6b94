"""A result as one page that needs nothing from outside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from robust_ext.core.errors import MissingDependencyError
from robust_ext.reports import plots, wording
from robust_ext.reports.examples import Example, panels
from robust_ext.reports.pairs import is_pair, spread_out
from robust_ext.reports.plots import Curve

if TYPE_CHECKING:
    from jinja2 import Environment


def render_html(result: Mapping[str, Any], examples: Sequence[Example] = ()) -> str:
    """Return the page of a binarization test: self-contained HTML, the same text for the same input.

    Args:
        result: The content of ``result.json``, of kind ``"binarization"``.
        examples: Inputs and candidates to show as images, in this order; those that are no images are counted in a
            note.

    Raises:
        InvalidArgumentError: The result is of another kind or has no attacks.
        MissingDependencyError: Matplotlib, jinja2 or Pillow are not installed.
    """
    wording.check_result(result)
    environment = environment_of_templates()
    from markupsafe import Markup

    pairs = result["attacks"] if is_pair(result) else []
    whole, result = result, spread_out(result)
    outcomes = {key: words for key, words in wording.OUTCOMES.items() if pairs or key != "rejected"}
    threshold = result["settings"]["threshold"]
    images = [example for example in examples if example.is_image]
    page = environment.get_template("binarization.html.jinja").render(
        result=result,
        whole=whole,
        tested_twice=pairs,
        OUTCOMES=outcomes,
        threshold=threshold,
        score_plot=Markup(plots.score_plot(result)),
        seconds_plot=Markup(plots.seconds_plot(result)),
        hardness=[(title, Markup(svg)) for title, svg in _hardness(result)],
        calibration=[(title, Markup(svg)) for title, svg in _calibration(result)],
        examples=[(example, panels(example)) for example in images],
        left_out=len(examples) - len(images),
        phase_colours=plots.PHASE_COLOURS,
    )
    return page.rstrip() + "\n"


def environment_of_templates() -> Environment:
    """Return the templates beside this file, with everything escaped that is not marked as markup."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise MissingDependencyError('A report page needs jinja2: pip install "robust-ext[cli]"') from error
    environment = Environment(
        loader=PackageLoader("robust_ext", "reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Markup is a subclass of str and passes; a name with a control character or half a surrogate is made printable.
        finalize=lambda value: wording.plain(value) if type(value) is str else value,
    )
    environment.globals.update(
        VERDICTS=wording.VERDICTS, OUTCOMES=wording.OUTCOMES, SKIPPED=wording.SKIPPED, PHASES=wording.PHASES
    )
    environment.filters.update(
        share=wording.share,
        interval=wording.interval,
        seconds=wording.seconds,
        title_of=wording.attack_title,
        setting=_setting,
    )
    return environment


def _setting(value: object) -> str:
    """Return a setting in words; numbers in full, so that a run can be repeated from its page."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_setting, value)) or "none"
    return str(value)


def _hardness(result: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Return a title and a plot for every attack whose candidates were judged at other settings."""
    for number, attack in enumerate(result["attacks"]):
        curve = _closeness_curve("", attack["hardness"])
        if not curve.points:
            continue
        place, *scores = min(curve.points, key=lambda point: point[0])
        # The settings alone cannot tell where the run itself stood: kappa has more than one convention.
        mark = (place, "this run") if scores == [attack["score"], attack["random_score"]] else None
        threshold, prefix = result["settings"]["threshold"], f"hardness-{number}"
        yield wording.attack_title(attack), plots.closeness_plot([curve], threshold, mark=mark, prefix=prefix)


def _calibration(result: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Return a title and a plot for every attack and every axis along which its settings were varied."""
    calibration = result["calibration"]
    if calibration is None:
        return
    threshold, chosen = result["settings"]["threshold"], calibration["chosen"]
    for number, name in enumerate(dict.fromkeys(row["attack"] for row in calibration["rows"])):
        rows = [row for row in calibration["rows"] if row["attack"] == name]
        along_kappa = [
            _closeness_curve(f"{count} inner points", [row for row in rows if row["inner_points"] == count])
            for count in sorted({row["inner_points"] for row in rows})
        ]
        along_count = [
            Curve(
                label=f"kappa {kappa:g}",
                points=[
                    (row["inner_points"], row["score"], row["random_score"]) for row in rows if row["kappa"] == kappa
                ],
            )
            for kappa in sorted({row["kappa"] for row in rows})
        ]
        # A curve of one point shows nothing along this axis; it is one of the points along the other, or in the table.
        if curves := [curve for curve in along_kappa if len(curve.points) > 1]:
            mark = None if chosen is None else (1 - chosen["kappa"], "chosen")
            title, curves = _titled(name, curves)
            yield title, plots.closeness_plot(curves, threshold, mark=mark, prefix=f"kappa-{number}")
        if curves := [curve for curve in along_count if len(curve.points) > 1]:
            mark = None if chosen is None else (chosen["inner_points"], "chosen")
            title, curves = _titled(name, curves)
            yield title, plots.inner_points_plot(curves, threshold, mark=mark, prefix=f"inner-{number}")


def _titled(name: str, curves: list[Curve]) -> tuple[str, list[Curve]]:
    """Move the label of an only curve into the title, where there is more room than in the legend."""
    if len(curves) > 1:
        return name, curves
    return f"{name}, {curves[0].label}", [Curve(label="", points=curves[0].points)]


def _closeness_curve(label: str, rows: Sequence[Mapping[str, Any]]) -> Curve:
    """Return score and R-ASR over 1 - kappa; kappa of 1 is the planted point itself and has no place on a log axis."""
    return Curve(
        label=label,
        points=[(1 - row["kappa"], row["score"], row["random_score"]) for row in rows if row["kappa"] < 1],
    )
