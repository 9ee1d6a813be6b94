"""A result as flat names and values, for trackers of experiments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from robust_ext.core.printable import printable

if TYPE_CHECKING:
    from robust_ext.evaluations.result import EvaluationResult


def metrics(result: EvaluationResult) -> dict[str, float]:
    """Every number of the rows of a result, by a flat name: ``binarization/pgd/score``.

    Names hold letters, digits and ``_-./`` alone, which all trackers take; numbers that are missing are left out. A
    result with a verdict has ``KIND/passed`` besides, 1 or 0.
    """
    found: dict[str, float] = {}
    verdict = getattr(result, "verdict", None)
    if verdict is not None:
        found[f"{result.kind}/passed"] = float(verdict == "passed")
    numbers = [name for name, kind in result.columns.items() if kind in (int, float) and name not in result.keys]
    titles = _apart("/".join(_name(row[key]) for key in result.keys if row[key] is not None) for row in result.rows())
    for title, row in zip(titles, result.rows(), strict=True):
        for name in numbers:
            value = row[name]
            if isinstance(value, (int, float)):
                found[f"{result.kind}/{title}/{name}"] = float(value)
    return found


def params(result: EvaluationResult) -> dict[str, str]:
    """The settings and versions of a result as texts, by flat names: ``binarization/epsilon``.

    Digests of code by file, and what networks return for probe inputs, are left out.
    """
    settings = {name: value for name, value in result.content.get("settings", {}).items() if not is_digest(name)}
    parts = {"seed": result.content.get("seed"), **settings}
    flat = [*_flat("", parts), *_flat("versions", result.content.get("versions", {}))]
    names = _apart(_name(name) for name, _ in flat)
    return {f"{result.kind}/{name}": text for name, (_, text) in zip(names, flat, strict=True)}


def is_digest(name: str) -> bool:
    """Whether a setting identifies code or behaviour in too many numbers for a reader."""
    return name.endswith(("_code", "_behaviour"))


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for key, value in values.items():
        name = f"{prefix}/{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from _flat(name, value)
        else:
            yield name, printable(value if isinstance(value, str) else json.dumps(value))


def _name(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return re.sub(r"[^A-Za-z0-9_./-]+", "_", text).strip("_/") or "_"


def _apart(names: Iterable[str]) -> list[str]:
    """Names of which equal ones are numbered."""
    found: dict[str, None] = {}
    for name in names:
        number, one = 1, name
        while one in found:
            number += 1
            one = f"{name}_{number}"
        found[one] = None
    return list(found)
