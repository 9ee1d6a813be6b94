"""The cost of an evaluation by phase: rows through the network, relative to the attacks', and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from robust_ext.core.cost import Cost
from robust_ext.core.errors import duration
from robust_ext.engine.estimate import Estimate
from robust_ext.reports.tabular import Line, paragraph, table
from robust_ext.reports.wording import count, plain, seconds

PHASES = {
    "calibration": "calibration",
    "training": "training",
    "accepted": "points the detector lets pass",
    "features": "planting",
    "readout": "readouts",
    "random": "random search",
    "witnesses": "witnesses",
    "attack": "attack",
    "verify": "verification",
    "scores": "scores",
    "rest": "the rest",
}
"""Phases in words, in the order of tables."""

_HEADER = ("phase", "rows forward", "rows back", "times the attacks' rows", "seconds")
# Attacks that have a row each; more are one row.
_ROWS = 12
# Phases that a sentence names.
_NAMED = 3


def sentence(result: Mapping[str, Any]) -> str:
    """The time in a sentence; empty for results that have none."""
    if "time" not in result:
        return ""
    total = result["time"]["total"]
    words = f"Time: {seconds(total['seconds'])} s"
    if _passed(total):
        ratio = _ratio(total, _needed(result))
        times = f", {ratio} times those of the attacks" if ratio != "-" else ""
        words += f" for {_rows(total)}{times}"
    longest = sorted(_phases(result), key=lambda row: -row["seconds"])[:_NAMED]
    shares = [f"{_label(row)} {100 * row['seconds'] / max(total['seconds'], 1e-9):.0f}%" for row in longest]
    resumed = result["time"].get("resumed")
    begun = f" An earlier call finished {count(resumed, 'block')}." if resumed else ""
    return f"{words}; {', '.join(shares)}.{begun}"


def table_rows(result: Mapping[str, Any]) -> list[Line]:
    """A header, a row a phase, and the total."""
    needed = _needed(result)
    lines = [(_label(row), *_cells(row, needed)) for row in _phases(result)]
    return [_HEADER, *lines, ("in all", *_cells(result["time"]["total"], needed))]


def estimate_text(estimate: Estimate) -> str:
    """Return the estimated cost of an evaluation: a row for each phase, and the total."""
    header: Line = ("phase", "rows forward", "rows back", "seconds")
    keys = sorted(estimate.costs, key=lambda key: list(PHASES).index(key[0]))
    rows = [_estimated(key, estimate.costs[key], estimate.seconds.get(key)) for key in keys if estimate.costs[key]]
    whole = sum(estimate.seconds.values())
    total = ("in all", *_estimated(("rest", None), estimate.total, whole or None)[1:])
    below = [f"{plain(estimate.title)}: {count(estimate.samples, 'sample')} in all runs, {estimate.done} of them done."]
    if whole:
        workers = estimate.workers
        shared = "" if workers == 1 else f", {duration(whole / workers)} with {workers} workers"
        below.append(f"As passes of the network alone on this machine: at most {duration(whole)}{shared}.")
    if estimate.total.unknown:
        names = ", ".join(map(plain, estimate.total.unknown))
        below.append(f"Not known before, and beside that: what {names} takes.")
    if estimate.size is not None:
        below.append(f"Run folder: about {_bytes(estimate.size)}.")
    lines = [line for words in below for line in paragraph(words)]
    return "\n".join([*table([header, *rows, total], words=(0,)), "", *lines, ""])


def _estimated(key: tuple[str, str | None], cost: Cost, taken: float | None) -> Line:
    return (
        _label({"phase": key[0], "of": key[1]}),
        f"{cost.forward:,.0f}" if cost.forward else "-",
        f"{cost.backward:,.0f}" if cost.backward else "-",
        "?" if cost.unknown and taken is None else "-" if taken is None else seconds(taken),
    )


def _bytes(size: float) -> str:
    """A size as text."""
    for unit in ("KiB", "MiB"):
        size /= 1024
        if size < 1000:
            return f"{size:,.0f} {unit}"
    return f"{size / 1024:,.1f} GiB"


def context(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cost table of every page, and this call's seconds where other calls added some."""
    if "time" not in result:
        return {"time_rows": [], "wall": None}
    time = result["time"]
    differs = time["wall"] is not None and time["wall"] < 0.99 * time["total"]["seconds"]
    return {"time_rows": table_rows(result), "wall": seconds(time["wall"]) if differs else None}


def _phases(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rows of phases, with many attacks as one."""
    rows: list[Mapping[str, Any]] = list(result["time"]["phases"])
    attacks = [row for row in rows if row["phase"] == "attack"]
    if len(attacks) <= _ROWS:
        return rows
    place = rows.index(attacks[0])
    whole = {key: sum(row[key] or 0 for row in attacks) for key in ("forward", "backward", "seconds")}
    merged = {**whole, "phase": "attack", "of": f"{len(attacks)} of them"}
    return [*rows[:place], merged, *(row for row in rows[place:] if row["phase"] != "attack")]


def _label(row: Mapping[str, Any]) -> str:
    words = PHASES.get(row["phase"], row["phase"])
    return words if row["of"] is None else f"{words}: {plain(row['of'])}"


def _cells(row: Mapping[str, Any], needed: int) -> Line:
    return (
        f"{row['forward']:,}" if row["forward"] else "-",
        f"{row['backward']:,}" if row["backward"] else "-",
        _ratio(row, needed),
        seconds(row["seconds"]),
    )


def _needed(result: Mapping[str, Any]) -> int:
    """The rows that the attacks sent forward and took back."""
    return sum(_passed(row) for row in result["time"]["phases"] if row["phase"] == "attack")


def _passed(row: Mapping[str, Any]) -> int:
    return int((row["forward"] or 0) + (row["backward"] or 0))


def _ratio(row: Mapping[str, Any], needed: int) -> str:
    return f"{_passed(row) / needed:.2f}" if needed and _passed(row) else "-"


def _rows(total: Mapping[str, Any]) -> str:
    back = f" and {total['backward']:,} back" if total["backward"] else ""
    return f"{total['forward']:,} rows forward{back}"
