"""The conformance matrix as plain text for a terminal and as a page of the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from robust_ext.core.tabular import table
from robust_ext.registry.base import AttackListing
from robust_ext.reports.kinds import template

_HEADER = ("attack", "target", "outcome", "norm", "verified", "one by one", "seconds", "forward", "backward")


def matrix_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of :meth:`robust_ext.testing.conformance.Row.to_dict`: a line each, reasons below, and how many ran."""
    text = table([_HEADER, *map(_cells, rows)], words=range(6), width=1000)
    reasons = dict.fromkeys(
        f"{row['outcome']}: {row['library']}:{row['attack']}: {row['reason']}" for row in rows if row["reason"]
    )
    return "\n".join([*text, *([""] if reasons else []), *reasons, "", *_totals(rows)]) + "\n"


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    ran = row["outcome"] == "ran"
    numbers = (f"{row['seconds']:.2f}", str(row["passes"]["forward"]), str(row["passes"]["backward"]))
    return (
        f"{row['library']}:{row['attack']}",
        row["target"],
        row["outcome"],
        row["norm"],
        matrix_cell(row) if ran else "",
        row["one_by_one"],
        *(numbers if ran else ("", "", "")),
    )


def _totals(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each library and target: how many ran, were refused and failed."""
    counts = Counter((f"{row['library']} on the {row['target']} target", row["outcome"]) for row in rows)
    kinds = ("ran", "refused", "failed")
    return [
        f"{place}: {', '.join(f'{counts[place, kind]} {kind}' for kind in kinds)}"
        for place in dict.fromkeys(place for place, _ in counts)
    ]


def matrix_cell(row: Mapping[str, Any]) -> str:
    """Describe an attack's outcome briefly: verified / tried where it ran, else its outcome."""
    return f"{row['verified']}/{row['samples']}" if row["outcome"] == "ran" else str(row["outcome"])


def matrix_page(listings: Mapping[str, Sequence[AttackListing]], cells: Mapping[tuple[str, str, str], str]) -> str:
    """The matrix as a page of documentation, in Markdown: what is known of each attack, and what became of it.

    Listings are by library, cells (of :func:`matrix_cell`) by library, attack and target. Seconds and
    passes differ from machine to machine and are left out.
    """
    libraries = {
        library: [
            _cells_of(one, *(cells[library, one.name, target] for target in ("binarized", "classifier")))
            for one in listed
        ]
        for library, listed in listings.items()
    }
    return template("attacks.md.jinja").render(libraries=libraries).rstrip() + "\n"


def _cells_of(listing: AttackListing, *outcomes: str) -> list[str]:
    """The cells of one attack in the columns of the page."""
    traits = listing.traits
    wants = {
        "gradients": traits.gradients,
        "starting points": traits.starting_points,
        "references": traits.references,
        "a detector": traits.detector,
        f"{traits.minimum_classes} classes": traits.minimum_classes > 2,
        f"{listing.channels} channels": listing.channels > 1,
        **dict.fromkeys(traits.packages, True),
    }
    treatment = {
        traits.batching: True,
        "batch-dependent": traits.batch_dependent,
        "leaves the ball": traits.leaves_ball,
    }
    batching, needs = (", ".join(word for word, holds in words.items() if holds) for words in (treatment, wants))
    known = [" ".join(traits.norms), traits.kind, batching, needs, traits.failure]
    name = " / ".join((listing.name, *listing.aliases))
    why = "no norm limits what it changes" if traits.normless else listing.misses
    missed = any(cell.startswith("0/") for cell in outcomes)
    remark = listing.reason or "; ".join(filter(None, [listing.defect.rstrip("."), why if missed else ""]))
    if not listing.reason and "refused" in outcomes:
        absent = f"{' and '.join(traits.packages)} was not installed when this page was written"
        remark = "these targets have no detector" if traits.detector else absent
    return [name, *([""] * len(known) if listing.reason else known), *outcomes, remark]
