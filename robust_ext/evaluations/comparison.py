"""Two or more results of one kind next to each other: scores, settings, versions, network and samples."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.statistics import difference_interval, paired_difference
from robust_ext.core.tabular import Columns, Line, Row, paragraph, table
from robust_ext.core.wording import count, plain, typed
from robust_ext.evaluations.callbacks import is_digest
from robust_ext.evaluations.result import EvaluationResult, Tabular, bounds_of
from robust_ext.evaluations.unfinished import load_result

# What settings identify by digests, as text; not all evaluations keep all of them.
_IDENTITY = {
    "model": "network",
    "model_code": "code of the network",
    "inputs": "samples",
    **{name: name for name in ("labels", "defense")},
    "goals": "targets",
    "detector_digest": "detector",
}
# Beside the settings, in some evaluations.
_STATED = ("norm", "epsilon", "samples", "suite", "naturals", "seed", "isolated")
_CHANCE = 0.05
_TEXTS = ("run", "score", "verdict_before", "verdict_after")
_NUMBERS = tuple(f"{name}{end}" for name in ("before", "after", "difference") for end in ("", "_low", "_high"))

Result = EvaluationResult
Different = dict[str, list[Any]]


@dataclass(frozen=True, repr=False)
class Comparison(Tabular):
    """The result of :func:`compare`; ``print`` shows it.

    Args:
        content: Plain values: ``of`` (the kind), ``runs``, and ``changes``, one for each run but the first, with
            ``same``, ``verdict``, ``settings``, ``versions``, ``scores`` and ``only``.
    """

    content: Mapping[str, Any]

    columns: ClassVar[Columns] = {
        **dict.fromkeys(_TEXTS, str),
        **dict.fromkeys((*_NUMBERS, "p_value"), float),
        **dict.fromkeys(("gained", "lost", "paired"), int),
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


def compare(*results: Result | str | os.PathLike[str]) -> Comparison:
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
    if wrong := [one for one in results if not isinstance(one, (Result, str, os.PathLike))]:
        raise InvalidArgumentError("results", type(wrong[0]).__name__, "results of evaluations, or their run folders")
    loaded = [one if isinstance(one, Result) else load_result(one) for one in results]
    kinds = list(dict.fromkeys(one.kind for one in loaded))
    if len(kinds) > 1:
        raise InvalidArgumentError("results", f"results of kinds {', '.join(kinds)}", "results of one kind")
    # Folders by the last part of their paths where these differ; results by their number.
    paths = [None if isinstance(one, Result) else Path(one) for one in results]
    short = ["" if path is None else (path.parent if path.name == "result.json" else path).name for path in paths]
    known = [name for name in short if name]
    brief = len(set(known)) == len(known)
    names = [
        f"result {number}" if path is None else (brief and name) or str(path)
        for number, (path, name) in enumerate(zip(paths, short, strict=True), 1)
    ]
    runs = [
        {"name": name, "headline": one.headline, "verdict": getattr(one, "verdict", None)}
        for name, one in zip(names, loaded, strict=True)
    ]
    changes = [_changes(loaded[0], other, name) for other, name in zip(loaded[1:], names[1:], strict=True)]
    return Comparison({"kind": "comparison", "of": kinds[0], "runs": runs, "changes": changes})


def _changes(first: Result, other: Result, name: str) -> dict[str, Any]:
    before, after = (list(dict.fromkeys(str(row[one.keys[0]]) for row in one.rows())) for one in (first, other))
    # Names in the second result of the first one's attacks, detectors or studies; two that stand alone are compared.
    pairs = {one: one for one in before if one in after}
    left = [one for one in before if one not in pairs], [one for one in after if one not in pairs]
    if len(left[0]) == len(left[1]) == 1:
        pairs[left[0][0]] = left[1][0]
    settings, others = (one.content.get("settings", {}) for one in (first, other))
    same = {
        words: settings[key] == others[key]
        for key, words in _IDENTITY.items()
        if key in settings and key in others and (is_digest(key) or isinstance(settings[key], str))
    }
    verdicts = [getattr(one, "verdict", None) for one in (first, other)]
    return {
        "run": name,
        "verdict": None if None in verdicts else verdicts,
        "same": same,
        "settings": _setting_changes(_settings(first, {}), _settings(other, {new: old for old, new in pairs.items()})),
        "versions": _different(*(one.content.get("versions", {}) for one in (first, other))),
        "scores": list(_score_changes(first, other, pairs, paired=same.get("samples", False))),
        "only": [[one for one in before if one not in pairs], [one for one in after if one not in pairs.values()]],
    }


def _settings(result: Result, renamed: Mapping[str, str]) -> dict[str, Any]:
    """Everything that was chosen, by flat names, and what each attack is; attacks are called as in the first result."""
    content = result.content
    found = {name: content[name] for name in _STATED if name in content}
    for name, value in content.get("settings", {}).items():
        if name in _IDENTITY or is_digest(name) or name in ("attacks", "detectors", "surrogates"):
            continue
        found |= {f"{name} {key}": one for key, one in value.items()} if isinstance(value, Mapping) else {name: value}
    for row in result.rows():
        if row.get("description") is not None:
            name = str(row[result.keys[0]])
            found[f"attack {renamed.get(name, name)}"] = row["description"]
    return found


def _setting_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Different:
    """The settings with different values, each with both; None where one lacks it."""
    found: Different = {}
    for name, (old, new) in _different(before, after).items():
        parts = _parts(old), _parts(new)
        if parts[0] and parts[0][""] == parts[1].get(""):
            found |= {f"{name} {key}": pair for key, pair in _different(*parts).items()}
        else:
            found[name] = [old, new]
    return found


def _parts(description: Any) -> dict[str, str]:
    """The settings in the description of an attack, ``Name(key=value, ...)``, its name under no key; or nothing."""
    found = re.fullmatch(r"([^()]+)\((.*)\)", description) if isinstance(description, str) else None
    parts = [] if found is None else re.split(r", (?=\w+=)", found[2])
    if found is None or not all(re.match(r"\w+=", part) for part in parts):
        return {}
    return {"": found[1], **dict(part.split("=", 1) for part in parts)}


def _different(before: Mapping[str, Any], after: Mapping[str, Any]) -> Different:
    """Entries that differ, each with both values; JSON makes lists of tuples."""
    pairs = {name: [before.get(name), after.get(name)] for name in {**before, **after}}
    plain = {name: [list(one) if isinstance(one, tuple) else one for one in pair] for name, pair in pairs.items()}
    return {name: pairs[name] for name, (old, new) in plain.items() if old != new}


def _score_changes(first: Result, second: Result, pairs: Mapping[str, str], *, paired: bool) -> Iterator[Row]:
    """A row for each row of both results; scores of the same samples are compared sample by sample where known."""
    value, keys = first.value, first.keys
    after = {tuple(row[key] for key in keys): row for row in second.rows()}
    solved = (first.solved(), second.solved()) if paired else ({}, {})
    for row in first.rows():
        place = tuple(row[key] for key in keys)
        there = (pairs.get(str(place[0])), *place[1:])
        if (other := after.get(there)) is None:
            continue
        title = str(place[0]) if place[0] == there[0] else f"{place[0]} -> {there[0]}"
        named = [(key, one) for key, one in zip(keys[1:], place[1:], strict=True) if one is not None]
        rest = [f"{key} {typed(one)}" if isinstance(one, float) else str(one) for key, one in named]
        yield {
            "score": ", ".join([title, *rest]),
            "verdict_before": row.get("verdict"),
            "verdict_after": other.get("verdict"),
            "before": row[value],
            **bounds_of("before", _interval(row, value)),
            "after": other[value],
            **bounds_of("after", _interval(other, value)),
            **_change(row, other, value, solved[0].get(place, {}), solved[1].get(there, {})),
        }


def _interval(row: Row, value: str) -> tuple[float, float] | None:
    low, high = row.get(f"{value}_low"), row.get(f"{value}_high")
    return (low, high) if isinstance(low, float) and isinstance(high, float) else None


def _change(row: Row, other: Row, value: str, solved: Mapping[int, bool], then: Mapping[int, bool]) -> Row:
    """The difference of two scores with its interval, and what is known of single samples."""
    before, after, ids = row[value], other[value], solved.keys() & then.keys()
    found, beyond, counts = None, None, dict.fromkeys(("p_value", "gained", "lost", "paired"))
    if not isinstance(before, float) or not isinstance(after, float):
        return {**counts, "difference": None, **bounds_of("difference", None), "beyond_chance": None}
    difference = after - before
    if ids:
        gained, lost = (sum(b[one] and not a[one] for one in ids) for a, b in ((solved, then), (then, solved)))
        difference, found, p_value = paired_difference(gained, lost, len(ids))
        counts, beyond = {"p_value": p_value, "gained": gained, "lost": lost, "paired": len(ids)}, p_value < _CHANCE
    elif (old := _interval(row, value)) and (new := _interval(other, value)):
        found = difference_interval(before, old, after, new)
        beyond = not found[0] <= 0 <= found[1]
    return {**counts, "difference": difference, **bounds_of("difference", found), "beyond_chance": beyond}


def _summary(change: Mapping[str, Any]) -> str:
    """The verdict's change, and that of the only score or how many changed, as text."""
    verdict, scores, parts = change["verdict"], change["scores"], []
    if verdict is not None:
        parts.append(f"verdict {verdict[0]} -> {verdict[1]}" if verdict[0] != verdict[1] else f"still {verdict[0]}")
    if len(scores) == 1:
        row = scores[0]
        score, before, after, difference, p_value, gained, lost = _line(row)
        parts.append(f"{score} {before} -> {after}, {difference}")
        if row["paired"]:
            parts[-1] += f", p = {p_value} ({gained} gained, {lost} lost of the same {count(row['paired'], 'sample')})"
    elif scores:
        beyond = [plain(row["score"]) for row in scores if row["beyond_chance"]]
        more = f": {', '.join(beyond[:3])}{', ...' if len(beyond) > 3 else ''}" if beyond else ""
        parts.append(f"{len(beyond)} of {count(len(scores), 'score')} changed by more than chance (5%){more}")
    else:
        parts.append("no score in common")
    return "; ".join(parts)


def _sentences(change: Mapping[str, Any]) -> list[str]:
    """Describe the similarities and differences."""
    kinds = (("the same", True), ("different", False))
    named = [(word, [one for one, same in change["same"].items() if same is kind]) for word, kind in kinds]
    words = "; ".join(f"{word} {', '.join(found)}" for word, found in named if found)
    sentences = [f"{words[0].upper()}{words[1:]}."] if words else []
    for title in ("settings", "versions"):
        pairs = [f"{plain(name)} {_short(old)} -> {_short(new)}" for name, (old, new) in change[title].items()]
        sentences.append(f"{title.capitalize()} that differ: {'; '.join(pairs)}." if pairs else f"The same {title}.")
    for names, whose in zip(change["only"], ("the first", plain(change["run"])), strict=True):
        if names:
            sentences.append(f"Only in {whose}: {', '.join(map(plain, names))}.")
    return sentences


def _line(row: Mapping[str, Any]) -> Line:
    """The cells of a score."""
    cells = []
    for name, form in (("before", ".3f"), ("after", ".3f"), ("difference", "+.3f")):
        value, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
        bounds = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
        cells.append("-" if value is None else f"{value:{form}}{bounds}")
    counts = ["-" if row[name] is None else str(row[name]) for name in ("gained", "lost")]
    return plain(row["score"]), *cells, "-" if row["p_value"] is None else f"{row['p_value']:.2g}", *counts


def _short(value: object) -> str:
    text = plain("-" if value is None else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
