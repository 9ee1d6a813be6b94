"""Views of a MEAD result: groups of arms, averages, and what makes numbers rough."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from robust_ext.core.wording import count, percent, plain, shorten
from robust_ext.reports.blocks import Cell, Row

Averages = dict[tuple[str | None, str | None], Row]

FEW = 20
"""With fewer positives than this, the numbers of a row are called rough."""

TITLE = 15
"""Columns that the title of an objective or a norm takes at most."""

METRICS = {"AUROC": "auroc", "FPR95": "fpr_at_95_tpr", "TPR5": "tpr_at_5_fpr"}
_OBJECTIVES = {"ace": "ACE", "kl": "KL", "gini": "Gini", "fisher-rao": "FR"}
_NORMS = ("l1", "l2", "linf", None, "all")


@dataclass(frozen=True, kw_only=True)
class Group:
    """One group of arms, such as ``"linf 0.25"``, against one detector.

    ``scenarios`` has the entries there are: of the arms that are not adaptive to the detector (blind), of those that
    are (white-box), and of both together. ``objectives`` has the entries of each objective alone.
    """

    name: str
    scenarios: Mapping[str, Row]
    objectives: Mapping[str, Row]

    @property
    def blind(self) -> Row | None:
        """The entry of the arms that are not adaptive to the detector."""
        return self.scenarios.get("blind")

    @property
    def lowest(self) -> str:
        """The objective with the lowest AUROC, and that AUROC in per cent; a dash without any."""
        found = {name: row["auroc"] for name, row in self.objectives.items() if row["auroc"] is not None}
        least = min(found, key=lambda name: found[name], default=None)
        return "-" if least is None else f"{shorten(objective_title(least), TITLE)} {percent(found[least])}"

    @property
    def with_white_box(self) -> Row | None:
        """The entry of all arms there are, where some are adaptive to the detector."""
        return self.scenarios.get("white-box" if self.blind is None else "blind and white-box")


def groups_of(detector: Row) -> list[Group]:
    """Return the groups of a detector, in the order of its results; those only white-box arms have come last."""
    rows = [row for row in (*detector["results"], *detector["white_box"]) if row["algorithm"] is None]
    found = []
    for name in dict.fromkeys(row["group"] for row in rows):
        mine = [row for row in rows if row["group"] == name]
        whole = {row["scenario"]: row for row in mine if row["objective"] is None}
        titles = {"blind": "blind", "white-box": "white-box", "all": "blind and white-box"}
        alone = {row["objective"]: row for row in mine if row["objective"] is not None and row["scenario"] == "blind"}
        scenarios = {title: whole[key] for key, title in titles.items() if key in whole}
        found.append(Group(name=name, scenarios=scenarios, objectives=alone))
    return found


def lowest_row(rows: Iterable[Row | None]) -> Row | None:
    """Return the row with the lowest AUROC of those that are not rough, or else of all; None without any AUROC."""
    found = [row for row in rows if row is not None and row["auroc"] is not None]
    return min(found, key=lambda row: (row["positives"] < FEW, row["auroc"])) if found else None


def worst_row(detector: Row) -> Row | None:
    """Return the row with the lowest AUROC of any arms against a detector, white-box ones too."""
    return lowest_row(row for group in groups_of(detector) for row in group.scenarios.values())


def objective_title(objective: str | None) -> str:
    """Return what the tables call an objective; none of them is the multi-armed setting."""
    return "MEAD" if objective is None else _OBJECTIVES.get(objective, plain(objective))


def norm_title(norm: str | None) -> str:
    """Return the title of the rows of averages."""
    return "no norm" if norm is None else "mean of these" if norm == "all" else f"{plain(norm)} average"


def short_arm(name: str, group: str, adaptive_to: str | None = None) -> str:
    """Return the name of an arm without its group and the detector that it is adaptive to, which end it."""
    return plain(name.removesuffix(f", knowing {adaptive_to}").removesuffix(f" {group}"))


def averages_of(result: Row, detector: Row) -> Averages:
    """Return the averages of a detector by norm and objective."""
    rows = [row for row in result["averages"] if row["detector"] == detector["name"]]
    return {(row["norm"], row["objective"]): row for row in rows}


def norms_of(averages: Averages) -> list[str | None]:
    """Return the norms that have averages: the paper's in their order, then others, and the mean last."""
    known = dict.fromkeys(norm for norm, _ in averages)
    others = [norm for norm in known if norm not in _NORMS]
    return [norm for norm in (*_NORMS[:3], *others, *_NORMS[3:]) if norm in known]


def objectives(result: Row) -> list[str]:
    """Return the objectives that have averages, in the order of the result."""
    return list(dict.fromkeys(row["objective"] for row in result["averages"] if row["objective"] is not None))


def auroc(row: Row) -> str:
    """Return an AUROC in per cent, marked as an upper bound where samples were not attacked."""
    return ("≤ " if row.get("not_attacked") else "") + percent(row["auroc"])


def with_interval(row: Row) -> Cell:
    """Return an AUROC with its interval."""
    bounds = row["auroc_interval"]
    return Cell(auroc(row), f"[{percent(bounds[0])}, {percent(bounds[1])}]" if bounds else "")


def notes(result: Row) -> list[str]:
    """Return what makes numbers rough or leaves some out; detectors that share a sentence are named together."""
    everyone, found = len(result["detectors"]), []
    every = [list(_notes_on(result, detector)) for detector in result["detectors"]]
    for kind in zip(*every, strict=True):
        holders: dict[str, list[str]] = {}
        for detector, sentence in zip(result["detectors"], kind, strict=True):
            if sentence:
                holders.setdefault(sentence, []).append(plain(detector["name"]))
        for sentence, names in holders.items():
            found.append(sentence if len(names) == everyone else f"{', '.join(names)}: {sentence}")
    refused: dict[tuple[str | None, str], list[str]] = {}
    for row in result.get("refused", ()):
        refused.setdefault((row["detector"], row["reason"]), []).extend(map(plain, row["arms"]))
    for (name, reason), arms in refused.items():
        against = "" if name is None else f" against {plain(name)}"
        more = f" and {len(arms) - 3} more" if len(arms) > 3 else ""
        found.append(f"Not run{against}: {', '.join(arms[:3])}{more}. {plain(reason)}")
    return [*found, *(f"Warning: {plain(words)}" for words in result.get("warnings", ()))]


def _notes_on(result: Row, detector: Row) -> Iterator[str]:
    """Yield a sentence of each kind on a detector, empty where it does not hold."""
    groups, samples, averages = groups_of(detector), result["samples"], averages_of(result, detector)
    rows = [(plain(group.name), row) for group in groups for row in group.scenarios.values()]
    first = [(plain(group.name), next(iter(group.scenarios.values()))) for group in groups if group.scenarios]
    few = ", ".join(f"{name} ({row['positives']})" for name, row in first if row["positives"] < FEW)
    yield f"Fewer than {FEW} positives, so numbers are rough or missing: {few}." if few else ""
    broken = "; ".join(
        f"{name}, {row['non_finite']} of {samples} (AUROC without them: {percent(row['auroc_without_non_finite'])})"
        for name, row in rows
        if row.get("non_finite")
    )
    yield f"Samples that are broken by non-finite logits alone: {broken}." if broken else ""
    lost = "; ".join(f"{name}, {row['not_attacked']} of {samples}" for name, row in rows if row.get("not_attacked"))
    yield f"Samples that not every arm attacked, so that numbers are upper bounds: {lost}." if lost else ""
    nan = [row["unscored"] for _, row in rows if row["unscored"]]
    yield (
        f"Scores that are no numbers (NaN) were left out in {count(len(nan), 'row')}, up to {max(nan)} in one."
        if nan
        else ""
    )
    skipped = []
    for norm in norms_of(averages):
        columns: dict[str, list[str]] = {}
        for (of_norm, objective), row in averages.items():
            if of_norm == norm:
                left_out = f"{row['skipped']} of {row['rows'] + row['skipped']}" if row["skipped"] else ""
                columns.setdefault(left_out, []).append(objective_title(objective))
        for left_out, titles in columns.items():
            of = f" ({', '.join(titles)})" if len(columns) > 1 else ""
            skipped += [f"{norm_title(norm)}, {left_out}{of}"] if left_out else []
    yield f"Rows without a number are not part of the averages: {'; '.join(skipped)}." if skipped else ""
