"""The conformance matrix as plain text for a terminal and as a page of the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from robust_ext.registry.base import AttackListing
from robust_ext.reports.text import table

_HEADER = ("attack", "target", "outcome", "norm", "verified", "one by one", "seconds", "forward", "backward")


def matrix_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of a matrix as text: a line each, reasons below, and how many ran.

    Args:
        rows: As :meth:`robust_ext.testing.conformance.Row.to_dict` returns them.
    """
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
        f"{row['verified']}/{row['samples']}" if ran else "",
        row["one_by_one"],
        *(numbers if ran else ("", "", "")),
    )


def _totals(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each library and target: how many ran, were refused and failed."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for row in rows:
        counts.setdefault((row["library"], row["target"]), Counter())[row["outcome"]] += 1
    return [
        f"{library} on the {target} target: {count['ran']} ran, {count['refused']} refused, {count['failed']} failed"
        for (library, target), count in counts.items()
    ]


_PAGE = """\
# Which attacks run

`robust-ext attacks --matrix --markdown FILE` writes this page; `--json FILE` writes the same runs with what was found,
the seconds and the passes. Each attack is built with small settings and run on four digits: on a *binarized* target
(two classes, one readout a sample, see the README) and on an ordinary *classifier* with ten classes. *Ran* means that
it queried nothing but what its batching allows, and returned one candidate a sample, which were then verified.
*Refused* means that it is refused before any work, with the reason under *remark*. What an attack finds beyond epsilon
does not count, whatever it was made for.

- **kind**: *fixed epsilon* attacks are given epsilon; *minimum norm* attacks look for the smallest perturbation.
- **batching**: *full*: every query is the whole batch in order; *any*: it may query subsets, permutations or repeats
  of samples; *single*: samples are attacked one at a time on a binarized target. *Batch-dependent*: the samples of a
  batch influence one another's result. *Leaves the ball*: it queries points outside the ball.
- **needs**: targets with too few classes are padded with classes that can never win; starting points and references are
  searched for; the packages are to be installed.
- **fails with**: what the library returns for a sample where the attack fails: the *best* or *last* point tried, the
  *input*, its random *start* or *zeros* (these two are replaced by the input), or it *raises*.
- **remark**: a reason, or a known defect of the attack in its library.
"""


def matrix_page(listings: Mapping[str, Sequence[AttackListing]], outcomes: Mapping[tuple[str, str, str], str]) -> str:
    """The matrix as a page of documentation, in Markdown: what is known of each attack, and what became of it.

    Seconds and counts differ from machine to machine and are left out.

    Args:
        listings: By library.
        outcomes: By library, attack and target.
    """
    parts = [_PAGE]
    for library, listed in listings.items():
        rows = [
            _markdown(one, *(outcomes[library, one.name, target] for target in ("binarized", "classifier")))
            for one in listed
        ]
        parts.append("\n".join(["", f"## {library}", "", *_HEAD, *rows, ""]))
    return "".join(parts)


_HEAD = (
    "| attack | norms | kind | batching | needs | fails with | binarized | classifier | remark |",
    "|---|---|---|---|---|---|---|---|---|",
)


def _markdown(listing: AttackListing, binarized: str, classifier: str) -> str:
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
    treatment = (
        traits.batching
        + (", batch-dependent" if traits.batch_dependent else "")
        + (", leaves the ball" if traits.leaves_ball else "")
    )
    known = [
        " ".join(traits.norms),
        traits.kind,
        treatment,
        ", ".join(name for name, wanted in wants.items() if wanted),
        traits.failure,
    ]
    name = " / ".join((listing.name, *listing.aliases))
    remark = listing.reason or listing.defect
    if not listing.reason and "refused" in (binarized, classifier):
        absent = f"{' and '.join(traits.packages)} was not installed when this page was written"
        remark = "these targets have no detector" if traits.detector else absent
    cells = [name, *([""] * len(known) if listing.reason else known), binarized, classifier, remark]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
