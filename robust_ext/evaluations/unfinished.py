"""Readers of run folders: results, and the table of unfinished evaluations."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from robust_ext._version import __version__
from robust_ext.core.errors import DataError
from robust_ext.core.files import read_file
from robust_ext.core.tabular import Line, paragraph, table
from robust_ext.core.wording import percent, plain, seconds
from robust_ext.engine.evaluation_file import FILE, read_evaluation
from robust_ext.engine.run_folder import RECORDS, SavedRun
from robust_ext.engine.verify import BROKEN, OUTCOMES
from robust_ext.evaluations.result import EvaluationResult

_CLASSES = {
    "binarization": "robust_ext.evaluations.binarization.result:BinarizationResult",
    "mead": "robust_ext.evaluations.mead.settings:MeadResult",
    "robust_accuracy": "robust_ext.evaluations.robust_accuracy.settings:RobustAccuracyResult",
    "test_time": "robust_ext.evaluations.adaptive.settings:AdaptiveResult",
    "diagnosis": "robust_ext.evaluations.diagnosis.settings:DiagnosisResult",
    "evaluation": "robust_ext.evaluations.evaluate.settings:EvaluateResult",
    "case_studies": "robust_ext.casestudies.result:CaseStudyResult",
    "reproduction": "robust_ext.casestudies.reproduction:ReproductionResult",
}
# What a content that is not what its kind promises makes a reader raise; InvalidArgumentError is a ValueError.
_MISFITS = (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError)

Records = Sequence[Mapping[str, Any]]


def load_result(path: str | os.PathLike[str]) -> EvaluationResult:
    """The result that a run folder, or a ``result.json``, holds, as an object of its kind.

    It equals the one that was saved. The records come from the run folder, where they lie there and are verified;
    examples are left out.

    Args:
        path: A folder with a ``result.json``, or such a file.

    Raises:
        DataError: There is none, it is damaged, or of a newer version of this package or of an unknown kind.
        RunFolderError: The records next to it are damaged.

    Example:
        >>> load_result("no such folder")
        Traceback (most recent call last):
        ...
        robust_ext.core.errors.DataError: no such folder: no such folder or result.json; name a run folder (out)
    """
    from robust_ext.reports import FORMAT

    given = Path(path)
    file = given / "result.json" if given.is_dir() else given
    content = _read_content(file)
    number, kind = content.pop("format", 1), content.get("kind")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise DataError(f"{file}: format {number!r} is no number; the file is damaged, or no result of robust_ext")
    if number > FORMAT:
        raise DataError(
            f"{file}: written by a newer version of robust_ext (format {number}; this is {__version__}, which reads up "
            f"to {FORMAT}): pip install --upgrade robust-ext"
        )
    if not isinstance(kind, str) or kind not in _CLASSES:
        known = ", ".join(map(repr, _CLASSES))
        raise DataError(f"{file}: holds a result of kind {kind!r}, which is none of {known}")
    module, _, name = _CLASSES[kind].partition(":")
    found: EvaluationResult = getattr(import_module(module), name)(content)
    try:
        # Everything that is made of its content.
        _ = str(found), repr(found), found.rows(), found.findings
    except _MISFITS as error:
        words = f"{type(error).__name__}: {error}"
        raise DataError(f"{file}: does not hold what a result of kind {kind!r} holds ({words})") from error
    return replace(found, records=SavedRun(file.parent).records()) if kind == "binarization" else found


def _read_content(file: Path) -> dict[str, Any]:
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


def show_run(path: str | os.PathLike[str]) -> str:
    """The result of a run folder as text, or what there is of it so far where it is not finished.

    Raises:
        DataError: It holds neither, or a result that cannot be read.
        RunFolderError: Its records are damaged.
    """
    folder = Path(path)
    runs = _runs(folder) if folder.is_dir() else []
    if not runs:
        return str(load_result(folder))
    rows: list[Line] = [("run", "samples", "of", "so far", "seconds")]
    missing = []
    for run in runs:
        title, of, saved = run["title"] or run["evaluation"], run["samples"], SavedRun(folder / run["key"])
        done, records = len(saved.done()), saved.records()
        numbers, taken = (str(done), "?" if of is None else str(of)), seconds(saved.earlier)
        for name, so_far in _parts(title, records) or [(title, "none were left" if done else "not begun")]:
            rows.append((plain(name), *numbers, so_far, taken))
            # A run's own numbers stand in its first row alone.
            numbers, taken = ("", ""), ""
        if of is not None and done < of:
            missing.append(f"{plain(title)} ({of - done})")
    names = ", ".join(dict.fromkeys(plain(run["evaluation"]) for run in runs))
    earlier = " Its result.json is that of an earlier call." if (folder / "result.json").exists() else ""
    begun = paragraph(f"Not finished ({names}): what the records of {plain(folder)} hold so far.{earlier}")
    what = f"Missing samples: {'; '.join(missing)}." if missing else "All samples are done; the result is missing."
    rest = paragraph(f"{what} The same call with the same folder resumes it.")
    return "\n".join([*begun, "", *table(rows, words=(0, 3)), "", *rest]) + "\n"


def _runs(folder: Path) -> list[dict[str, Any]]:
    """The runs that are planned, with those in folders of their own; those that are there, where nothing is stated."""
    stated = {file.parent: read_evaluation(file.parent) for file in sorted(folder.rglob(FILE))}
    planned = [
        {**run, "key": str((place / run["key"]).relative_to(folder))}
        for place, found in stated.items()
        for run in found["planned"]
    ]
    if planned or (folder / "result.json").exists():
        return planned
    read_evaluation(folder)
    keys = sorted(str(file.parent.relative_to(folder)) for file in folder.rglob(RECORDS))
    return [{"key": key, "title": key, "samples": None, "evaluation": "without a plan"} for key in keys]


def _parts(title: str, records: Records) -> list[tuple[str, str]]:
    """Describe records: one part for each run, or for each attack where records have several."""
    by_attack: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        for name, entry in record.get("attacks", {}).items():
            by_attack.setdefault(name, []).append(entry)
    return [(name, _words(found)) for name, found in (by_attack or ({title: [*records]} if records else {})).items()]


def _words(records: Records) -> str:
    """Describe the samples broken so far; for a test-time defense, the accuracy of both models on them."""
    if all("right" in record for record in records):
        static = sum(record["static"] for record in records) / len(records)
        right = [answer for record in records for answer in record["right"]]
        return f"left of these {len(records)}: static {percent(static)}, defense {percent(sum(right) / len(right))}"
    known = [record["outcome"] for record in records if record.get("outcome") in OUTCOMES]
    if not known:
        return f"{len(records)} records"
    broken = sum(outcome in BROKEN for outcome in known)
    return f"found {broken} of {len(known)} ({percent(broken / len(known))})"
