"""A result and its page as files; each file appears whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from robust_ext.core.files import replace_file
from robust_ext.reports.adaptive import render_defense_html
from robust_ext.reports.examples import Example
from robust_ext.reports.html import render_html
from robust_ext.reports.mead_html import render_mead_html
from robust_ext.reports.robust_accuracy import render_robust_accuracy_html


def save(result: Mapping[str, Any], folder: str | os.PathLike[str], examples: Sequence[Example] = ()) -> None:
    """Write ``result.json`` and ``report.html`` to ``folder``, which is created when it is missing.

    Both texts are made before the first file is written, so a result that cannot be written leaves the folder as it
    was. A file that is already there is replaced in one step.

    Args:
        result: The content of ``result.json``, of kind ``"binarization"``, ``"mead"``,
            ``"robust_accuracy"`` or ``"test_time"``.
        folder: Where to write; nothing is written outside it.
        examples: Inputs and candidates to show as images.

    Raises:
        InvalidArgumentError: The result is of no kind that has a page, or has no attacks.
        MissingDependencyError: Matplotlib, jinja2 or Pillow are not installed.
        ValueError: The result holds NaN or infinity, which JSON does not know.
    """
    text = json.dumps(dict(result), indent=2, allow_nan=False) + "\n"
    page = _page(result, examples)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "result.json", text)
    replace_file(folder / "report.html", page)


def _page(result: Mapping[str, Any], examples: Sequence[Example]) -> str:
    kind = result.get("kind")
    if kind == "mead":
        return render_mead_html(result, examples)
    if kind == "robust_accuracy":
        return render_robust_accuracy_html(result)
    return render_defense_html(result) if kind == "test_time" else render_html(result, examples)
