"""Two or more results of one kind next to each other: what changed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.evaluations.changes import identities, name_pairs, score_changes, setting_changes, version_changes
from robust_ext.evaluations.result import EvaluationResult, Tabular
from robust_ext.evaluations.unfinished import load_result
from robust_ext.reports.tabular import Columns, Line, Row, paragraph, table
from robust_ext.reports.wording import count, plain

_ENDS = {"before": ("before", "before_low", "before_high"), "after": ("after", "after_low", "after_high")}


@dataclass(frozen=True, repr=False)
class Comparison(Tabular):
    """The result of :func:`compare`; ``print`` shows it.

    Args:
        content: Plain values: ``of`` (the kind), ``runs``, and ``changes``, one for each run but the first, with
            ``same``, ``verdict``, ``settings``, ``versions``, ``scores`` and ``only``.
    """

    content: Mapping[str, Any]

    columns: ClassVar[Columns] = {
        "run": str,
        "score": str,
        "verdict_before": str,
        "verdict_after": str,
        "before": float,
        "before_low": float,
        "before_high": float,
        "after": float,
        "after_low": float,
        "after_high": float,
        "difference": float,
        "difference_low": float,
        "difference_high": float,
        "p_value": float,
        "gained": int,
        "lost": int,
        "paired": int,
        "beyond_chance": bool,
    }
    keys = ("run", "score")
    shown = ("run", "score", "verdict_before", "verdict_after", "before", "after", "difference", "p_value")

    def rows(self) -> list[Row]:
        """One a score that both runs have, and run that is compared with the first."""
        return [{"run": change["run"], **row} for change in self.content["changes"] for row in change["scores"]]

    @property
    def headline(self) -> str:
        """The changes of verdicts and scores of each run."""
        return "; ".join(map(_summary, self.content["changes"]))

    @property
    def reason(self) -> str:
        """The similarities and differences, in sentences."""
        return " ".join(words for change in self.content["changes"] for words in _sentences(change))

    def to_dict(self) -> dict[str, Any]:
        """The content, as a dict of its own."""
        return dict(self.content)

    def __str__(self) -> str:
        lines = paragraph(f"Compared with {plain(self.content['runs'][0]['name'])}, {self.content['of']}:")
        for change in self.content["changes"]:
            rows: list[Line] = [("score", "before", "after", "difference", "p", "gained", "lost")]
            rows += [_line(row) for row in change["scores"]]
            shown = table(rows, words=(0,)) if len(rows) > 1 else []
            lines += ["", *paragraph(f"{plain(change['run'])}: {_summary(change)}."), "", *shown, ""]
            lines += [line for words in _sentences(change) for line in paragraph(words)]
        return "\n".join(lines) + "\n"


def compare(*results: EvaluationResult | str | os.PathLike[str]) -> Comparison:
    """Set two or more results of one kind next to each other: each is compared with the first.

    Scores come with their intervals and the difference. Where both runs have the same samples and keep what became of
    each, the p-value is of McNemar's exact test; elsewhere the interval of the difference takes them for independent.
    Nothing is corrected for the number of scores.

    Args:
        *results: Results, or run folders (or ``result.json`` files) with one.

    Raises:
        InvalidArgumentError: Fewer than two, or of different kinds.
        DataError: A folder holds no result that can be read.

    Example:
        >>> import torch, robust_ext
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3)).eval()
        >>> x, threat_model = torch.rand(8, 1, 4, 4), robust_ext.ThreatModel(norm="linf", epsilon=1e-6)
        >>> run = lambda steps: robust_ext.robust_accuracy(
        ...     network, {"apgd": f"robust_ext:APGD(steps={steps})"}, x, network(x).argmax(1), threat_model
        ... )
        >>> compare(run(2), run(3)).content["changes"][0]["scores"][0]["p_value"]
        1.0
    """
    if len(results) < 2:
        raise InvalidArgumentError("results", f"{len(results)} of them", "two or more to compare")
    loaded = [one if isinstance(one, EvaluationResult) else load_result(_path(one)) for one in results]
    kinds = list(dict.fromkeys(one.kind for one in loaded))
    if len(kinds) > 1:
        raise InvalidArgumentError("results", f"results of kinds {', '.join(kinds)}", "results of one kind")
    names = _names(results)
    first, *others = loaded
    runs = [
        {"name": name, "headline": one.headline, "verdict": getattr(one, "verdict", None)}
        for name, one in zip(names, loaded, strict=True)
    ]
    changes = [_changes(first, other, name) for other, name in zip(others, names[1:], strict=True)]
    return Comparison({"kind": "comparison", "of": kinds[0], "runs": runs, "changes": changes})


def _path(given: object) -> str | os.PathLike[str]:
    if not isinstance(given, (str, os.PathLike)):
        raise InvalidArgumentError("results", type(given).__name__, "results of evaluations, or their run folders")
    return given


def _names(results: Sequence[EvaluationResult | str | os.PathLike[str]]) -> list[str]:
    """Folders by the last part of their paths where these differ; results by their number."""
    paths = [None if isinstance(one, EvaluationResult) else Path(one) for one in results]
    short = [None if path is None else path.parent.name if path.name == "result.json" else path.name for path in paths]
    known = [name for name in short if name]
    brief = len(set(known)) == len(known)
    return [
        f"result {number}" if path is None else (name if brief and name else str(path))
        for number, (path, name) in enumerate(zip(paths, short, strict=True), 1)
    ]


def _changes(first: EvaluationResult, other: EvaluationResult, name: str) -> dict[str, Any]:
    pairs = name_pairs(first, other)
    key = first.keys[0]
    verdicts = [getattr(one, "verdict", None) for one in (first, other)]
    only = [
        list(dict.fromkeys(str(row[key]) for row in one.rows() if str(row[key]) not in known))
        for one, known in ((first, pairs), (other, pairs.values()))
    ]
    return {
        "run": name,
        "verdict": None if None in verdicts else verdicts,
        "same": identities(first, other),
        "settings": setting_changes(first, other, pairs),
        "versions": version_changes(first, other),
        "scores": list(score_changes(first, other, pairs)),
        "only": only,
    }


def _summary(change: Mapping[str, Any]) -> str:
    """The verdict's change, and that of the only score or how many changed, as text."""
    verdict, scores = change["verdict"], change["scores"]
    parts = []
    if verdict is not None:
        parts.append(f"verdict {verdict[0]} -> {verdict[1]}" if verdict[0] != verdict[1] else f"still {verdict[0]}")
    if len(scores) == 1:
        row = scores[0]
        _, before, after, difference, p_value, gained, lost = _line(row)
        parts.append(f"{plain(row['score'])} {before} -> {after}, {difference}")
        if row["paired"]:
            parts[-1] += f", p = {p_value} ({gained} gained, {lost} lost of the same {count(row['paired'], 'sample')})"
    elif scores:
        beyond = [plain(row["score"]) for row in scores if row["beyond_chance"]]
        more = f": {', '.join(beyond[:3])}{', ...' if len(beyond) > 3 else ''}" if beyond else ""
        parts.append(f"{len(beyond)} of {count(len(scores), 'score')} changed by more than chance (5%){more}")
    else:
        parts.append("no score that both have")
    return "; ".join(parts)


def _sentences(change: Mapping[str, Any]) -> list[str]:
    """Describe the similarities and differences."""
    same = [words for words, holds in change["same"].items() if holds]
    other = [words for words, holds in change["same"].items() if not holds]
    found = []
    if same or other:
        parts = [f"the same {', '.join(same)}"] if same else []
        parts += [f"another {', '.join(other)}"] if other else []
        words = "; ".join(parts)
        found.append(f"{words[0].upper()}{words[1:]}.")
    for title in ("settings", "versions"):
        pairs = [f"{plain(name)} {_short(old)} -> {_short(new)}" for name, (old, new) in change[title].items()]
        found.append(f"{title.capitalize()} that differ: {'; '.join(pairs)}." if pairs else f"The same {title}.")
    for names, whose in zip(change["only"], ("the first", plain(change["run"])), strict=True):
        if names:
            found.append(f"Only in {whose}: {', '.join(map(plain, names))}.")
    return found


def _line(row: Mapping[str, Any]) -> Line:
    """The cells of a score."""
    ends = ["-" if row[one[0]] is None else f"{row[one[0]]:.3f}{_bounds(row, one)}" for one in _ENDS.values()]
    difference = "-"
    if row["difference"] is not None:
        difference = f"{row['difference']:+.3f}{_bounds(row, ('', 'difference_low', 'difference_high'))}"
    counts = ["-" if row[name] is None else str(row[name]) for name in ("gained", "lost")]
    p_value = "-" if row["p_value"] is None else f"{row['p_value']:.2g}"
    return plain(row["score"]), *ends, difference, p_value, *counts


def _bounds(row: Mapping[str, Any], names: Sequence[str]) -> str:
    low, high = row[names[1]], row[names[2]]
    return "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"


def _short(value: object) -> str:
    text = plain("-" if value is None else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
