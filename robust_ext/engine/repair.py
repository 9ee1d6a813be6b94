"""Repair of a run folder: what is to be run again is dropped, so that opening it runs exactly those samples.

That is what does not verify, and samples that were not attacked because the attack's process was lost.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from robust_ext.core.errors import RunFolderError
from robust_ext.core.files import replace_file
from robust_ext.core.warning import warn
from robust_ext.engine.archive import read_arrays, read_value
from robust_ext.engine.chain import ChainedFile, chained, checksum, damaged, parted, to_text, unseal
from robust_ext.engine.outcomes import LOST
from robust_ext.engine.plan_file import PLAN

# After a damaged line, the next may follow any of so many checksums before it.
_ANCHORS = 8


def write_run(file: Path, run: Mapping[str, Any]) -> str:
    """Write ``run.json``, what the records of a folder depend on; returns the checksum that their chains begin with."""
    text = json.dumps({**run, "checksum": checksum(_canonical(run))}, indent=2, allow_nan=False)
    replace_file(file, text + "\n", error=RunFolderError)
    return _start(run)


def read_run(file: Path) -> tuple[dict[str, Any], str]:
    """What :func:`write_run` wrote, and the checksum that chains begin with; RunFolderError where it is damaged."""
    try:
        run = json.loads(file.read_text(encoding="utf-8"))
        stated = run.pop("checksum")
        fits = checksum(_canonical(run)) == stated
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(file, f"cannot be read as a run ({type(error).__name__}: {error})") from error
    if not fits:
        raise damaged(file, "cannot be read as a run (it does not match its checksum)")
    return run, _start(run)


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The records of a finished run that lies in a folder itself, in order; none where there is none."""
    if not (folder / "run.json").exists():
        return []
    entries = ChainedFile(folder / "records.jsonl", read_run(folder / "run.json")[1]).read()
    return sorted(entries, key=lambda entry: entry.get("index", 0))


def repair_files(folder: Path, run: Mapping[str, Any]) -> None:
    """Drop what is to be run again from a folder that no other process is writing; each is logged.

    Where ``run.json`` is lost, ``run`` takes its place, which the records have to follow from.
    """
    file = folder / "run.json"
    try:
        start = read_run(file)[1]
    except RunFolderError as error:
        if any(folder.glob("*.jsonl")):
            warn(f"written again: {error}", kept=False)
        start = write_run(file, run)
    for lines in folder.glob("*.jsonl"):
        _repair_lines(lines, start)
    for arrays in folder.glob("*.npz"):
        _set_aside(arrays, lambda path: read_arrays(path, start))
    for value in folder.glob("*.json"):
        if value.name not in ("run.json", "result.json", "judge.json", PLAN):
            _set_aside(value, lambda path: read_value(path, start))


def _repair_lines(path: Path, start: str) -> None:
    """Keep the lines of a file that follow from a line before them and were not lost, each once, chained anew."""
    content, kept, dropped, lost = path.read_bytes(), {}, [], []
    # Checksums that lines state stand for lines that are lost themselves.
    anchors = deque([checksum(start, path.name)], maxlen=_ANCHORS)
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].split(b"\n")[:-1], 1):
        found = next((entry for anchor in reversed(anchors) if (entry := unseal(line, anchor)) is not None), None)
        text, stated = parted(line)
        if found is None or stated in kept:
            dropped.append(number)
            anchors.append(checksum(anchors[-1], text))
        elif _was_lost(found[0]):
            lost.append(number)
        else:
            kept[stated] = found[0]
        anchors.append(stated)
    fixed = chained(path, start, map(to_text, kept.values()))
    if fixed != content:
        warn(f"{path}: dropped {len(dropped)} lines: {dropped[:20]}", kept=False)
        warn(f"{path}: {len(lost)} samples that were not attacked are run again", kept=False)
        replace_file(path, fixed, error=RunFolderError)


def _was_lost(entry: object) -> bool:
    """Whether a record, or a part of it, is of an attack that returned nothing."""
    if not isinstance(entry, Mapping):
        return False
    return (
        entry.get("outcome") in LOST or entry.get("canary") == "lost" or any(_was_lost(part) for part in entry.values())
    )


def _set_aside(path: Path, read: Callable[[Path], object]) -> None:
    try:
        read(path)
    except RunFolderError as error:
        warn(f"set aside as NAME.damaged: {error}", kept=False)
        path.replace(path.with_name(f"{path.name}.damaged"))


def _canonical(run: Mapping[str, Any]) -> str:
    return json.dumps(run, sort_keys=True, allow_nan=False)


def _start(run: Mapping[str, Any]) -> str:
    return checksum(_canonical({"kind": run["kind"], "settings": run["settings"]}))
