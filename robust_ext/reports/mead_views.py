"""Views shared by table and page of a MEAD result: groups, averages, texts and notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from robust_ext.reports.wording import count, percent, plain

FEW = 20
"""With fewer positives than this, the numbers of a row are called rough."""

_OBJECTIVES = {"ace": "ACE", "kl": "KL", "gini": "Gini", "fisher-rao": "FR"}
_NORMS = ("l1", "l2", "linf", None, "all")

Row = Mapping[str, Any]
Averages = dict[tuple[str | None, str | None], Row]


@dataclass(frozen=True, kw_only=True)
class Group:
    """One group of arms, such as ``"linf 0.25"``, against one detector.

    It holds the entries of the arms that are not adaptive to the detector (``blind``), of those that are
    (``white_box``) and of both together, each None without any; and of each objective alone.
    """

    name: str
    blind: Row | None
    white_box: Row | None
    both: Row | None
    objectives: Mapping[str, Row]

    @property
    def lowest(self) -> tuple[str, float] | None:
        """The objective with the lowest AUROC, and that AUROC; None where no objective has one."""
        found = [(name, row["auroc"]) for name, row in self.objectives.items() if row["auroc"] is not None]
        return min(found, key=lambda pair: pair[1]) if found else None

    @property
    def with_white_box(self) -> Row | None:
        """The entry of all arms there are, where some are adaptive to the detector."""
        return self.white_box if self.blind is None else self.both

    @property
    def scenarios(self) -> list[tuple[str, Row]]:
        """The entries there are, each with its words."""
        rows = (("blind", self.blind), ("white-box", self.white_box), ("blind and white-box", self.both))
        return [(words, row) for words, row in rows if row is not None]


def percent_interval(bounds: Sequence[float] | None) -> str:
    """Return an interval of shares in per cent as ``[low, high]``, or nothing without one."""
    return "" if bounds is None else f"[{percent(bounds[0])}, {percent(bounds[1])}]"


def auroc(row: Row) -> str:
    """An AUROC in per cent, marked as an upper bound where samples were not attacked."""
    return ("≤ " if row.get("not_attacked") else "") + percent(row["auroc"])


def objective_title(objective: str | None) -> str:
    """Return what the tables call an objective; none of them is the multi-armed setting."""
    return "MEAD" if objective is None else _OBJECTIVES.get(objective, plain(objective))


def norm_title(norm: str | None) -> str:
    """Return the title of the rows of averages."""
    return "no norm" if norm is None else "mean of these" if norm == "all" else f"{plain(norm)} average"


def short_arm(name: str, group: str, adaptive_to: str | None = None) -> str:
    """The name of an arm on one line, without its group and the detector that it is adaptive to, which end it."""
    return plain(name.removesuffix(f", knowing {adaptive_to}").removesuffix(f" {group}"))


def largest_attribution(row: Row) -> tuple[str, float] | None:
    """The arm with the largest attribution, and that share; None without positives, or where it is the only arm."""
    shares = row.get("attribution") or {}
    return max(shares.items(), key=lambda pair: pair[1]) if len(shares) > 1 else None


def objectives(result: Mapping[str, Any]) -> list[str]:
    """The objectives that have averages, in the order of the result."""
    return list(dict.fromkeys(row["objective"] for row in result["averages"] if row["objective"] is not None))


def averages_of(result: Mapping[str, Any], detector: str) -> Averages:
    """The averages of a detector, by norm and objective."""
    return {(row["norm"], row["objective"]): row for row in result["averages"] if row["detector"] == detector}


def norms_of(averages: Averages) -> list[str | None]:
    """The norms that have averages: those of the paper's tables in their order, then others, and the mean last."""
    known = dict.fromkeys(norm for norm, _ in averages)
    others = [norm for norm in known if norm not in _NORMS]
    return [norm for norm in (*_NORMS[:3], *others, *_NORMS[3:]) if norm in known]


def groups_of(detector: Row) -> list[Group]:
    """The groups of a detector, in the order of its results; those only white-box arms have come last."""
    rows = [row for row in (*detector["results"], *detector["white_box"]) if row["algorithm"] is None]
    whole = {(row["group"], row["scenario"]): row for row in rows if row["objective"] is None}
    singles: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["objective"] is not None and row["scenario"] == "blind":
            singles.setdefault(row["group"], {})[row["objective"]] = row
    return [
        Group(
            name=name,
            blind=whole.get((name, "blind")),
            white_box=whole.get((name, "white-box")),
            both=whole.get((name, "all")),
            objectives=singles.get(name, {}),
        )
        for name in dict.fromkeys(row["group"] for row in rows)
    ]


def lowest_row(rows: Iterable[Row | None]) -> Row | None:
    """The row with the lowest AUROC of those that are not rough, or else of all; None where no row has an AUROC."""
    found = [row for row in rows if row is not None and row["auroc"] is not None]
    return min(found, key=lambda row: (row["positives"] < FEW, row["auroc"])) if found else None


def notes(result: Mapping[str, Any]) -> list[str]:
    """Sentences on what makes numbers rough or leaves some out; detectors that share a sentence are named together."""
    everyone = len(result["detectors"])
    sentences = []
    for kind in (_few, _non_finite, _not_attacked, _unscored, _left_out):
        holders: dict[str, list[str]] = {}
        for detector in result["detectors"]:
            if (sentence := kind(result, detector)) is not None:
                holders.setdefault(sentence, []).append(plain(detector["name"]))
        sentences += [
            sentence if len(names) == everyone else f"{', '.join(names)}: {sentence}"
            for sentence, names in holders.items()
        ]
    warnings = (f"Warning: {plain(words)}" for words in result.get("warnings", ()))
    return [*sentences, *_refused(result), *warnings]


def _refused(result: Mapping[str, Any]) -> list[str]:
    """Describe the arms that did not run, and why, by detector and reason."""
    found: dict[tuple[str | None, str], list[str]] = {}
    for row in result.get("refused", ()):
        found.setdefault((row["detector"], row["reason"]), []).extend(row["arms"])
    return [
        f"Not run{'' if detector is None else f' against {plain(detector)}'}: "
        f"{', '.join(map(plain, arms[:3]))}{f' and {len(arms) - 3} more' if len(arms) > 3 else ''}. {plain(reason)}"
        for (detector, reason), arms in found.items()
    ]


def _few(_: Mapping[str, Any], detector: Row) -> str | None:
    rough = [
        f"{plain(group.name)} ({row['positives']})"
        for group in groups_of(detector)
        for _, row in group.scenarios[:1]
        if row["positives"] < FEW
    ]
    return f"Fewer than {FEW} positives, so numbers are rough or missing: {', '.join(rough)}." if rough else None


def _non_finite(result: Mapping[str, Any], detector: Row) -> str | None:
    found = [
        f"{plain(group.name)}, {row['non_finite']} of {result['samples']} (AUROC without them: "
        f"{percent(row['auroc_without_non_finite'])})"
        for group in groups_of(detector)
        for _, row in group.scenarios
        if row.get("non_finite")
    ]
    return f"Samples that are broken by non-finite logits alone: {'; '.join(found)}." if found else None


def _not_attacked(result: Mapping[str, Any], detector: Row) -> str | None:
    found = [
        f"{plain(group.name)}, {row['not_attacked']} of {result['samples']}"
        for group in groups_of(detector)
        for _, row in group.scenarios
        if row.get("not_attacked")
    ]
    return (
        f"Samples that not every arm attacked, so that numbers are upper bounds: {'; '.join(found)}." if found else None
    )


def _unscored(_: Mapping[str, Any], detector: Row) -> str | None:
    lost = [row["unscored"] for group in groups_of(detector) for _, row in group.scenarios if row["unscored"]]
    if not lost:
        return None
    return f"Scores that are no numbers (NaN) were left out in {count(len(lost), 'row')}, up to {max(lost)} in one."


def _left_out(result: Mapping[str, Any], detector: Row) -> str | None:
    averages, skipped = averages_of(result, detector["name"]), []
    for norm in norms_of(averages):
        columns: dict[str, list[str]] = {}
        for (of_norm, objective), row in averages.items():
            if of_norm == norm:
                left_out = f"{row['skipped']} of {row['rows'] + row['skipped']}" if row["skipped"] else ""
                columns.setdefault(left_out, []).append(objective_title(objective))
        for left_out, titles in columns.items():
            if left_out:
                of = f" ({', '.join(titles)})" if len(columns) > 1 else ""
                skipped.append(f"{norm_title(norm)}, {left_out}{of}")
    return f"Rows without a number are not part of the averages: {'; '.join(skipped)}." if skipped else None
