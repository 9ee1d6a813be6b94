"""Outputs for each kind of result: text, a page, files in a folder; each file appears whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.files import make_folder, remove_drafts, replace_file
from robust_ext.reports import (
    adaptive,
    badges,
    binarization,
    casestudies,
    diagnosis,
    findings,
    mead_page,
    mead_text,
    robust_accuracy,
    timing,
)
from robust_ext.reports.drawing import Drawing
from robust_ext.reports.page import Example, render
from robust_ext.reports.tabular import paragraph

Result = Mapping[str, Any]

FORMAT = 2
"""Of ``result.json``; grows where a reader of an older one would go wrong. Files without it are of format 1."""


class _Kind(NamedTuple):
    """A kind of result: its text, template and content, main figure, badge and rows."""

    text: Callable[[Result], str]
    context: Callable[[Result], Mapping[str, Any]]
    template: str
    figure: str
    badge: Callable[[Result], badges.Words]
    row: str = ""


_KINDS = {
    "binarization": _Kind(
        binarization.text,
        binarization.context,
        "binarization.html.jinja",
        "score_plot",
        badges.binarization,
        "attack",
    ),
    "mead": _Kind(mead_text.text, mead_page.context, "mead.html.jinja", "summary_plot", badges.mead, "detector"),
    "robust_accuracy": _Kind(
        robust_accuracy.text,
        robust_accuracy.context,
        "robust_accuracy.html.jinja",
        "curves",
        badges.robust_accuracy,
        "attack",
    ),
    "case_studies": _Kind(
        casestudies.text, casestudies.context, "casestudies.html.jinja", "score_plot", badges.case_studies
    ),
    "diagnosis": _Kind(diagnosis.text, diagnosis.context, "diagnosis.html.jinja", "figure", badges.diagnosis),
    "test_time": _Kind(adaptive.text, adaptive.context, "adaptive.html.jinja", "bars", badges.adaptive),
}


def report_text(result: Result) -> str:
    """The content of ``result.json`` as text of at most 110 columns, without colour.

    It is refused where its kind or verdict is none, or where it has no attacks or detectors.
    """
    words = paragraph(timing.sentence(result)) if "time" in result else []
    return "\n".join([_kind_of(result).text(result), *words, ""]) if words else _kind_of(result).text(result)


def report_page(result: Result, examples: Sequence[Example] = ()) -> str:
    """The content of ``result.json`` as one page: self-contained HTML, the same text for the same input.

    Examples are shown in their order; those that are no images are counted in a note.
    """
    kind = _kind_of(result)
    return render(kind.template, {"result": result, **timing.context(result), **kind.context(result)}, examples)


def badge(result: Result) -> str:
    """A small SVG for a README: the verdict, or the main number without one; escaped, and of no other file."""
    return badges.draw_badge(_kind_of(result).badge(result))


def figure(result: Result) -> Drawing:
    """The main figure of the page; InvalidArgumentError where there is nothing to draw."""
    kind = _kind_of(result)
    found = kind.context(result)[kind.figure]
    if not isinstance(found, Drawing):
        raise InvalidArgumentError("result", "no attack that was run", "at least one attack that made queries, to plot")
    return found


def leading_sentences(result: Result) -> list[str]:
    """Return a sentence on the model and on each attack for what is wrong; none where nothing is."""
    return findings.sentences(result.get("findings", ()))


def save(result: Result, folder: str | os.PathLike[str], examples: Sequence[Example] = ()) -> None:
    """Write ``result.json``, ``report.html`` and ``badge.svg`` to ``folder``, which is created when it is missing.

    All texts are made before the first file is written, so a result that cannot be written (NaN and infinity are not
    part of JSON) leaves the folder as it was. A file that is already there is replaced in one step. DataError where
    the operating system refuses.
    """
    content = json.dumps({"format": FORMAT, **result}, indent=2, allow_nan=False) + "\n"
    page, small = report_page(result, examples), badge(result)
    folder = Path(folder)
    make_folder(folder)
    remove_drafts(folder)
    replace_file(folder / "result.json", content)
    replace_file(folder / "report.html", page)
    replace_file(folder / "badge.svg", small)


def _kind_of(result: Result) -> _Kind:
    name = result.get("kind")
    if name not in _KINDS:
        raise InvalidArgumentError("result['kind']", name, f"one of {', '.join(map(repr, _KINDS))}")
    kind = _KINDS[name]
    rows = result.get(f"{kind.row}s")
    if kind.row and (not isinstance(rows, Sequence) or isinstance(rows, str) or not rows):
        raise InvalidArgumentError(f"result['{kind.row}s']", rows, f"a list with at least one {kind.row}")
    return kind
