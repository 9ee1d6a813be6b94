"""The cost of an evaluation by phase: rows through the network, relative to the attacks', and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from robust_ext.core.cost import Cost
from robust_ext.core.errors import duration
from robust_ext.core.tabular import Line, paragraph, table
from robust_ext.core.wording import count, plain, seconds
from robust_ext.engine.estimate import Estimate
from robust_ext.engine.progress import PHASES
from robust_ext.reports.blocks import Section, Table, muted

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
        back = f" and {total['backward']:,} back" if total["backward"] else ""
        words += f" for {total['forward']:,} rows forward{back}{times}"
    longest = sorted(_phases(result), key=lambda row: -row["seconds"])[:_NAMED]
    shares = [f"{_label(row)} {100 * row['seconds'] / max(total['seconds'], 1e-9):.0f}%" for row in longest]
    resumed = result["time"].get("resumed")
    begun = f" An earlier call finished {count(resumed, 'block')}." if resumed else ""
    return f"{words}; {', '.join(shares)}.{begun}"


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
    if search := estimate.seconds.get(("search", None)):
        below.append(
            f"Of that, {duration(whole - search)} without the search, which starts only if the standard attack fails "
            "its test, and ends at the first recipe that passes; its bound counts every recipe at the highest cost."
        )
    if estimate.total.unknown:
        names = ", ".join(map(plain, estimate.total.unknown))
        below.append(f"Not included, as unknown in advance: what {names} takes.")
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


def sections(result: Mapping[str, Any]) -> list[Section]:
    """Return the section of the cost: a row a phase, the total, and this call's seconds where others added some."""
    if "time" not in result:
        return []
    time, needed = result["time"], _needed(result)
    rows = [
        {
            "phase": "in all" if row is time["total"] else _label(row),
            "rows forward": f"{row['forward']:,}" if row["forward"] else "-",
            "rows back": f"{row['backward']:,}" if row["backward"] else "-",
            "times the attacks' rows": _ratio(row, needed),
            "seconds": seconds(row["seconds"]),
        }
        for row in (*_phases(result), time["total"])
    ]
    words = (
        "Rows are samples sent forward through the network, and those that a gradient came back through. The attacks' "
        "rows are those of the phases of attacks."
    )
    if time["wall"] is not None and time["wall"] < 0.99 * time["total"]["seconds"]:
        words += (
            " Seconds are those of all processes and of earlier calls in the same folder; this call took "
            f"{seconds(time['wall'])} s."
        )
    table = Table(title="What it took", rows=rows, foot=True)
    return [Section("What it took", [table, muted(words)])]


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


def _needed(result: Mapping[str, Any]) -> int:
    """The rows that the attacks sent forward and took back."""
    return sum(_passed(row) for row in result["time"]["phases"] if row["phase"] == "attack")


def _passed(row: Mapping[str, Any]) -> int:
    return int((row["forward"] or 0) + (row["backward"] or 0))


def _ratio(row: Mapping[str, Any], needed: int) -> str:
    return f"{_passed(row) / needed:.2f}" if needed and _passed(row) else "-"
