"""What becomes of each kind of result: text, a page, files in a folder; each file appears whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.files import replace_file
from robust_ext.reports import adaptive, binarization, mead_page, mead_text, robust_accuracy
from robust_ext.reports.examples import Example
from robust_ext.reports.page import render

Result = Mapping[str, Any]


@dataclass(frozen=True)
class _Kind:
    """How the content of ``result.json`` of a kind becomes text and what its template shows; a list not to be empty."""

    text: Callable[[Result], str]
    context: Callable[[Result], Mapping[str, Any]]
    template: str
    rows: str = ""
    row: str = ""


_KINDS = {
    "binarization": _Kind(binarization.text, binarization.context, "binarization.html.jinja", "attacks", "attack"),
    "mead": _Kind(mead_text.text, mead_page.context, "mead.html.jinja", "detectors", "detector"),
    "robust_accuracy": _Kind(
        robust_accuracy.text, robust_accuracy.context, "robust_accuracy.html.jinja", "attacks", "attack"
    ),
    "test_time": _Kind(adaptive.text, adaptive.context, "adaptive.html.jinja"),
}


def report_text(result: Result) -> str:
    """A result as text of at most 110 columns, without colour.

    Args:
        result: The content of ``result.json``.

    Raises:
        InvalidArgumentError: The result is of no known kind, has no attacks or detectors, or no verdict that is one.
    """
    return _kind_of(result).text(result)


def report_page(result: Result, examples: Sequence[Example] = ()) -> str:
    """A result as one page: self-contained HTML, the same text for the same input.

    Args:
        result: The content of ``result.json``.
        examples: Inputs and candidates to show as images, in this order; those that are no images are counted in a
            note.

    Raises:
        InvalidArgumentError: As for :func:`report_text`.
        MissingDependencyError: Matplotlib, jinja2 or Pillow are not installed.
    """
    kind = _kind_of(result)
    return render(kind.template, {"result": result, **kind.context(result)}, examples)


def save(result: Result, folder: str | os.PathLike[str], examples: Sequence[Example] = ()) -> None:
    """Write ``result.json`` and ``report.html`` to ``folder``, which is created when it is missing.

    Both texts are made before the first file is written, so a result that cannot be written leaves the folder as it
    was. A file that is already there is replaced in one step.

    Args:
        result: The content of ``result.json``.
        folder: Where to write; nothing is written outside it.
        examples: Inputs and candidates to show as images.

    Raises:
        InvalidArgumentError: As for :func:`report_text`.
        MissingDependencyError: Matplotlib, jinja2 or Pillow are not installed.
        ValueError: The result holds NaN or infinity, which JSON does not have.
    """
    content = json.dumps(dict(result), indent=2, allow_nan=False) + "\n"
    page = report_page(result, examples)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "result.json", content)
    replace_file(folder / "report.html", page)


def _kind_of(result: Result) -> _Kind:
    name = result.get("kind")
    if name not in _KINDS:
        raise InvalidArgumentError("result['kind']", name, f"one of {', '.join(map(repr, _KINDS))}")
    kind = _KINDS[name]
    rows = result.get(kind.rows)
    if kind.rows and (not isinstance(rows, Sequence) or isinstance(rows, str) or not rows):
        raise InvalidArgumentError(f"result['{kind.rows}']", rows, f"a list with at least one {kind.row}")
    return kind
