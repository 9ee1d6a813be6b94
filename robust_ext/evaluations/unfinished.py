"""What an evaluation that is not finished has left in its run folder so far; the folder is only read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from robust_ext.engine.evaluation_file import FILE, read_evaluation
from robust_ext.engine.outcomes import BROKEN, OUTCOMES
from robust_ext.engine.run_folder import RECORDS, SavedRun
from robust_ext.evaluations.loading import load_result
from robust_ext.reports.text import Line, paragraph, table
from robust_ext.reports.wording import percent, plain, seconds

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
    """How many samples a run is done with, its records, and the seconds that its blocks took."""
    saved = SavedRun(folder)
    return len(saved.done()), saved.records(), saved.earlier


def _parts(title: str, records: Records) -> list[tuple[str, str]]:
    """What records say, in words: one part a run, or one an attack where each record has those of several."""
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
    """How many samples are broken so far; of a test-time defense, what is left of both models on these samples."""
    if all("right" in record for record in records):
        static = sum(record["static"] for record in records) / len(records)
        right = [answer for record in records for answer in record["right"]]
        return f"left of these {len(records)}: static {percent(static)}, defense {percent(sum(right) / len(right))}"
    known = [record["outcome"] for record in records if record.get("outcome") in OUTCOMES]
    if not known:
        return f"{len(records)} records"
    broken = sum(outcome in BROKEN for outcome in known)
    return f"found {broken} of {len(known)} ({percent(broken / len(known))})"
