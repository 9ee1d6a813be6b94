"""Results read back from run folders: JSON, of which nothing is run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from robust_ext import reports
from robust_ext._version import __version__
from robust_ext.core.errors import DataError, InvalidArgumentError
from robust_ext.core.files import read_file
from robust_ext.engine.run_folder import SavedRun
from robust_ext.evaluations.result import EvaluationResult

_CLASSES = {
    "binarization": "robust_ext.evaluations.binarization.result:BinarizationResult",
    "mead": "robust_ext.evaluations.mead.result:MeadResult",
    "robust_accuracy": "robust_ext.evaluations.robust_accuracy.result:RobustAccuracyResult",
    "test_time": "robust_ext.evaluations.adaptive.result:AdaptiveResult",
    "diagnosis": "robust_ext.evaluations.diagnosis.result:DiagnosisResult",
    "case_studies": "robust_ext.casestudies.result:CaseStudyResult",
}
# What a content that is not what its kind promises makes a reader raise.
_MISFITS = (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError)


def load_result(path: str | os.PathLike[str]) -> EvaluationResult:
    """The result that a run folder, or a ``result.json``, holds, as an object of its kind.

    It equals the one that was saved. The records come from the run folder, where they lie there and are verified;
    examples are left out.

    Args:
        path: A folder with a ``result.json``, or such a file.

    Raises:
        DataError: There is none, it is damaged, or of a newer version of this package or of an unknown kind.
        RunFolderError: The records beside it are damaged.

    Example:
        >>> load_result("no such folder")
        Traceback (most recent call last):
        ...
        robust_ext.core.errors.DataError: no such folder: no such folder or result.json; name a run folder (out)
    """
    given = Path(path)
    file = given / "result.json" if given.is_dir() else given
    content = dict(_read(file))
    number, kind = content.pop("format", 1), content.get("kind")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise DataError(f"{file}: format {number!r} is no number; the file is damaged, or no result of robust_ext")
    if number > reports.FORMAT:
        raise DataError(
            f"{file}: written by a newer version of robust_ext (format {number}; this is {__version__}, which reads up "
            f"to {reports.FORMAT}): pip install --upgrade robust-ext"
        )
    if not isinstance(kind, str) or kind not in _CLASSES:
        known = ", ".join(map(repr, _CLASSES))
        raise DataError(f"{file}: holds a result of kind {kind!r}, which is none of {known}")
    module, _, name = _CLASSES[kind].partition(":")
    cls: type[EvaluationResult] = getattr(import_module(module), name)
    found = cls(content)
    _check(found, file)
    return cls(content, records=SavedRun(file.parent).records()) if kind == "binarization" else found


def _read(file: Path) -> Mapping[str, Any]:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    read = read_file(file)
    if read is None:
        raise DataError(f"{file}: no such folder or result.json; name a run folder (out)")
    try:
        content = json.loads(read.decode(), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: cannot be read as JSON ({error}): the file is damaged") from error
    if not isinstance(content, dict):
        raise DataError(f"{file}: holds a {type(content).__name__}, not the content of a result")
    return content


def _check(result: EvaluationResult, file: Path) -> None:
    """Make everything of the result that is made of its content; DataError where something lacks or does not fit."""
    try:
        str(result)
        repr(result)
        result.rows()
        result.findings  # noqa: B018
    except (*_MISFITS, InvalidArgumentError) as error:
        words = f"{type(error).__name__}: {error}"
        raise DataError(f"{file}: does not hold what a result of kind {result.kind!r} holds ({words})") from error
