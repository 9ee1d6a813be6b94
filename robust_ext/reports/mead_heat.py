"""Heat maps of every arm's AUROC against one detector, as rows of coloured cells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from robust_ext.reports.mead_views import FEW, Row, short_arm
from robust_ext.reports.wording import percent

_LOW, _MIDDLE, _HIGH = (224, 130, 60), (247, 247, 247), (92, 160, 208)
"""Colours of AUROC 0, 0.5 and 1: told apart by colour-blind readers, and light enough for dark text."""


class Cell(NamedTuple):
    """One arm: its AUROC in per cent, a colour (None with too few positives), its full name and positives."""

    words: str
    colour: str | None
    title: str


class HeatMap(NamedTuple):
    """The arms of one norm: epsilons as text (``"-"``: without one), and rows with a name and a cell a column."""

    norm: str | None
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]


def heat_maps(result: Mapping[str, Any], detector: Row) -> list[HeatMap]:
    """The heat maps of a detector, one a norm, in the order of the result's arms."""
    known = {arm["name"]: arm for arm in result["arms"]}
    norms: dict[str | None, list[tuple[Row, Row]]] = {}
    for numbers in detector["arms"]:
        arm = known.get(numbers["arm"])
        if arm is not None:
            norms.setdefault(arm["norm"], []).append((arm, numbers))
    return [_heat_map(norm, pairs) for norm, pairs in norms.items()]


def _heat_map(norm: str | None, pairs: list[tuple[Row, Row]]) -> HeatMap:
    epsilons = sorted({arm["epsilon"] for arm, _ in pairs if arm["epsilon"] is not None})
    columns = [*epsilons, *([None] if any(arm["epsilon"] is None for arm, _ in pairs) else [])]
    rows: dict[str, dict[float | None, Cell]] = {}
    # Arms adaptive to the detector, and those without an objective, come after the others.
    for arm, numbers in sorted(
        pairs, key=lambda pair: (pair[0]["adaptive_to"] is not None, pair[0]["objective"] is None)
    ):
        name = short_arm(arm["name"], arm["group"], arm["adaptive_to"])
        name += "" if arm["adaptive_to"] is None else " (white-box)"
        place = arm["epsilon"]
        if place in rows.get(name, {}):
            name = f"{name} ({arm['name']})"
        rows.setdefault(name, {})[place] = _cell(arm, numbers)
    return HeatMap(
        norm=norm,
        columns=tuple("-" if epsilon is None else f"{epsilon:.4g}" for epsilon in columns),
        rows=tuple((name, tuple(cells.get(epsilon) for epsilon in columns)) for name, cells in rows.items()),
    )


def _cell(arm: Row, numbers: Row) -> Cell:
    positives, auroc = numbers["positives"], numbers["auroc"]
    return Cell(
        words=percent(auroc),
        colour=None if auroc is None or positives < FEW else colour(auroc),
        title=f"{arm['name']}: AUROC {percent(auroc)}, {positives} positives",
    )


def colour(share: float) -> str:
    """The colour of an AUROC in [0, 1], as a style sheet writes it."""
    end = _HIGH if share >= 0.5 else _LOW
    weight = min(abs(2 * share - 1), 1.0)
    red, green, blue = (round(low + (high - low) * weight) for low, high in zip(_MIDDLE, end, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"
