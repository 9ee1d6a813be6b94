"""Readers of run folders: results, and the table of unfinished evaluations."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from robust_ext import reports
from robust_ext._version import __version__
from robust_ext.core.errors import DataError, InvalidArgumentError
from robust_ext.core.files import read_file
from robust_ext.engine.evaluation_file import FILE, read_evaluation
from robust_ext.engine.run_folder import RECORDS, SavedRun
from robust_ext.engine.verify import BROKEN, OUTCOMES
from robust_ext.evaluations.result import EvaluationResult
from robust_ext.reports.tabular import Line, paragraph, table
from robust_ext.reports.wording import percent, plain, seconds

_CLASSES = {
    "binarization": "robust_ext.evaluations.binarization.result:BinarizationResult",
    "mead": "robust_ext.evaluations.mead.settings:MeadResult",
    "robust_accuracy": "robust_ext.evaluations.robust_accuracy.settings:RobustAccuracyResult",
    "test_time": "robust_ext.evaluations.adaptive.settings:AdaptiveResult",
    "diagnosis": "robust_ext.evaluations.diagnosis.settings:DiagnosisResult",
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
        RunFolderError: The records next to it are damaged.

    Example:
        >>> load_result("no such folder")
        Traceback (most recent call last):
        ...
        robust_ext.core.errors.DataError: no such folder: no such folder or result.json; name a run folder (out)
    """
    given = Path(path)
    file = given / "result.json" if given.is_dir() else given
    content = dict(_read_loading(file))
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


def _read_loading(file: Path) -> Mapping[str, Any]:
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


Records = Sequence[Mapping[str, Any]]


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
        title = run["title"] or run["evaluation"]
        done, records, taken = _read(folder / run["key"])
        of = run["samples"]
        words = _parts(title, records) or [(title, "none were left" if done else "not begun")]
        for place, (name, so_far) in enumerate(words):
            numbers = (str(done), "?" if of is None else str(of)) if not place else ("", "")
            rows.append((plain(name), *numbers, so_far, "" if place else seconds(taken)))
        if of is not None and done < of:
            missing.append(f"{plain(title)} ({of - done})")
    return "\n".join([*_opening(folder, runs), "", *table(rows, words=(0, 3)), "", *_closing(missing)]) + "\n"


def _opening(folder: Path, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    names = ", ".join(dict.fromkeys(plain(run["evaluation"]) for run in runs))
    earlier = " Its result.json is that of an earlier call." if (folder / "result.json").exists() else ""
    return paragraph(f"Not finished ({names}): what the records of {plain(folder)} hold so far.{earlier}")


def _closing(missing: Sequence[str]) -> list[str]:
    what = f"Missing samples: {'; '.join(missing)}." if missing else "All samples are done; the result is missing."
    return paragraph(f"{what} The call that began it, with the same folder, goes on with it.")


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


def _read(folder: Path) -> tuple[int, Records, float]:
    """Return the number of finished samples, their records, and the seconds of their blocks."""
    saved = SavedRun(folder)
    return len(saved.done()), saved.records(), saved.earlier


def _parts(title: str, records: Records) -> list[tuple[str, str]]:
    """Describe records: one part for each run, or for each attack where records have several."""
    if not records:
        return []
    names = dict.fromkeys(name for record in records for name in record.get("attacks", ()))
    if names:
        return [
            (name, _words([record["attacks"][name] for record in records if name in record["attacks"]]))
            for name in names
        ]
    return [(title, _words(records))]


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
