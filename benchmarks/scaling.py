"""What a run far beyond one machine would take, from unit costs and stated assumptions: the tables of docs/scaling.md.

    python benchmarks/scaling.py [--costs docs/unit_costs.json] [--write docs/scaling.md]

Unit costs are those of benchmarks/unit_costs.py, measured on one machine. What GPUs compute is assumed, see
:class:`Plan`. Nothing is run here.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
MEBI, SYNCED = 2**20, 5.0
BEGIN, END = "<!-- computed by benchmarks/scaling.py -->", "<!-- end -->"


@dataclass(frozen=True)
class Plan:
    """A run; assumed is what is marked so."""

    title: str
    attacks: int = 1000
    samples: int = 50_000
    block: int = 64  # Samples of a call
    values: int = 3 * 224 * 224  # Of an input, 4 bytes each
    steps: int = 100  # Assumed, of each attack: passes forward and back
    planting: int = 0  # Passes forward that all attacks of a sample share
    parameters: int = 25_557_032  # Of a ResNet-50
    workers: int = 64  # GPUs, one process each
    forward_rate: float = 7500.0  # Assumed, rows a second of a GPU
    both_rate: float = 2500.0  # Assumed, rows a second forward and back
    together: bool = False  # Whether a record is of a sample with all attacks, or of a sample and an attack
    candidates: bool = True  # Whether candidates are kept

    @property
    def pairs(self) -> int:
        """Samples times attacks."""
        return self.attacks * self.samples

    @property
    def calls(self) -> float:
        """Blocks that workers are sent; where a record is of all attacks, they run on the same block."""
        return self.samples / self.block * (1 if self.together else self.attacks)


def passes(plan: Plan) -> tuple[int, int]:
    """Rows that only go forward (planting, and a verification for each pair), and rows that go forward and back."""
    return plan.samples * plan.planting + plan.pairs, plan.pairs * plan.steps


def worker_seconds(plan: Plan) -> float:
    """What the GPUs compute, where they share it evenly."""
    forward, both = passes(plan)
    return (forward / plan.forward_rate + both / plan.both_rate) / plan.workers


def traffic(plan: Plan, unit: Mapping[str, float]) -> dict[str, float]:
    """Bytes between the parent and its workers, in all."""
    inputs = plan.calls * plan.block * plan.values * 4
    return {
        "network": plan.workers * plan.parameters * unit["bytes_parameter"],
        "inputs": inputs,
        "candidates": inputs if plan.candidates else 0.0,
        "records": records(plan, unit)[1],
    }


def records(plan: Plan, unit: Mapping[str, float]) -> tuple[float, float]:
    """How many there are, and their bytes."""
    if plan.together:
        return plan.samples, plan.samples * (unit["planted_sample_bytes"] + plan.attacks * unit["planted_attack_bytes"])
    return plan.pairs, plan.pairs * unit["record_bytes"]


def files(plan: Plan, unit: Mapping[str, float]) -> dict[str, float]:
    """What the run folder holds."""
    count, size = records(plan, unit)
    arrays = plan.pairs * plan.values * 4 * unit["kept_share"] if plan.candidates else 0.0
    return {
        "records": count,
        "record bytes": size,
        "arrays": plan.calls if plan.candidates else 0.0,
        "array bytes": arrays,
    }


def parent_seconds(plan: Plan, unit: Mapping[str, float]) -> dict[str, float]:
    """The parent's own time on a core, by what it goes into; the longer the run, the oftener it waits for the disk."""
    sent, (_, size) = traffic(plan, unit), records(plan, unit)
    parts = {
        "records": size / unit["record_bytes"] * unit["append_seconds"],
        "candidates": sent["candidates"] / MEBI * unit["write_seconds_mib"],
        "calls": plan.calls * unit["call_seconds"],
        "travel": sum(sent.values()) / MEBI * unit["travel_seconds_mib"],
        "network": sent["network"] / MEBI * unit["pickle_seconds_mib"] / plan.workers,
    }
    own = sum(parts.values())
    return {**parts, "disk": max(own, worker_seconds(plan)) / SYNCED * unit["sync_seconds"]}


def saturation(plan: Plan, unit: Mapping[str, float]) -> float:
    """How many GPUs keep the parent busy: more of them wait."""
    alone = worker_seconds(replace(plan, workers=1))
    return alone / sum(parent_seconds(plan, unit).values())


PLANS = (
    Plan("robust accuracy"),
    Plan("robust accuracy, no candidates kept", candidates=False),
    Plan("binarization test", planting=1400, together=True, candidates=False),
)


def quantity(value: float) -> str:
    """A number with a prefix.

    Example:
        >>> [quantity(value) for value in (0, 12.3, 4_560, 7.8e10)]
        ['0', '12', '4.6 k', '78 G']
    """
    for prefix in ("", " k", " M", " G", " T"):
        if value < 1000 or prefix == " T":
            break
        value /= 1000
    return f"{value:.1f}{prefix}" if prefix and value < 10 else f"{value:.0f}{prefix}"


def duration(seconds: float) -> str:
    """Hours, or what is shorter."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:,.0f} h"


def table(plans: tuple[Plan, ...], unit: Mapping[str, float]) -> str:
    """All of it in Markdown, a column a plan."""
    rows: dict[str, list[str]] = {}

    def add(name: str, *values: str) -> None:
        rows.setdefault(name, []).append(" / ".join(values))

    for plan in plans:
        (forward, both), sent = passes(plan), traffic(plan, unit)
        kept, own = files(plan, unit), parent_seconds(plan, unit)
        computed, parent = worker_seconds(plan), sum(own.values())
        add("rows forward only / forward and back", quantity(forward), quantity(both))
        add("GPUs, each", duration(computed))
        add("to the workers: network / inputs", *(quantity(sent[part]) + "B" for part in ("network", "inputs")))
        add(
            "from the workers: candidates / records",
            *(quantity(sent[part]) + "B" for part in ("candidates", "records")),
        )
        add("records / their bytes", quantity(kept["records"]), quantity(kept["record bytes"]) + "B")
        add("files of arrays / their bytes", quantity(kept["arrays"]), quantity(kept["array bytes"]) + "B")
        for part in ("records", "candidates", "calls", "travel", "disk"):
            add(f"parent: {part}", duration(own[part]))
        add("parent, in all", duration(parent))
        add("parent busy", f"{min(1.0, parent / max(computed, parent)):.0%}")
        add("it takes", duration(max(computed, parent)))
        add("GPUs that one parent keeps busy", quantity(saturation(plan, unit)))
        add(
            "memory of the parent, records",
            quantity(kept["record bytes"] / (1 if plan.together else plan.attacks)) + "B",
        )
        add(
            "to resume: records read",
            duration(kept["record bytes"] / unit["record_bytes"] * unit["read_seconds"]),
        )
    lines = [f"| | {' | '.join(plan.title for plan in plans)} |", "|---|" + "---|" * len(plans)]
    return "\n".join(lines + [f"| {name} | {' | '.join(values)} |" for name, values in rows.items()])


def costs_table(unit: Mapping[str, float]) -> str:
    """The unit costs in Markdown."""
    micro, milli = 1e6, 1e3
    rows = {
        "a record of robust accuracy": f"{unit['record_bytes']:.0f} bytes",
        "a record of the binarization test, and each attack in it": (
            f"{unit['planted_sample_bytes']:.0f} and {unit['planted_attack_bytes']:.0f} bytes"
        ),
        "to append a record: JSON, checksum, write": f"{unit['append_seconds'] * micro:.0f} µs",
        f"to wait for the disk, every {SYNCED:.0f} s at most": f"{unit['sync_seconds'] * milli:.1f} ms",
        "to read a record again": f"{unit['read_seconds'] * micro:.0f} µs",
        "to compress and write a MiB of candidates": f"{unit['write_seconds_mib'] * milli:.0f} ms",
        "what is left of it, of noise with 256 levels": f"{unit['kept_share']:.0%}",
        "a parameter of a pickled network": f"{unit['bytes_parameter']:.1f} bytes",
        "to pickle a MiB of network": f"{unit['pickle_seconds_mib'] * milli:.1f} ms",
        "a call to another process": f"{unit['call_seconds'] * milli:.2f} ms",
        "a MiB on its way there or back": f"{unit['travel_seconds_mib'] * milli:.1f} ms",
    }
    return "\n".join(["| what | measured |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def filled(page: str, unit: Mapping[str, float]) -> str:
    """The page with both tables, each between its marks."""
    tables = iter((costs_table(unit), table(PLANS, unit)))
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{next(tables)}\n{END}", page, flags=re.DOTALL)


def main() -> None:
    """Print the tables, or write them into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, default=DOCS / "unit_costs.json")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    unit = json.loads(arguments.costs.read_text(encoding="utf-8"))
    if arguments.write is not None:
        arguments.write.write_text(filled(arguments.write.read_text(encoding="utf-8"), unit), encoding="utf-8")
    sys.stdout.write(f"{costs_table(unit)}\n\n{table(PLANS, unit)}\n")


if __name__ == "__main__":
    main()
