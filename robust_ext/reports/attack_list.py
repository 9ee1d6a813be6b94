"""The attacks that can be named, as plain values and as text for a terminal."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from robust_ext.core.errors import MissingDependencyError
from robust_ext.core.validation import check_choice
from robust_ext.registry.base import AttackListing, adapters

logger = logging.getLogger(__name__)


def list_attacks(libraries: Sequence[str] | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """What is known of each attack of the installed libraries.

    Args:
        libraries: Names of adapters; all of them when left out.

    Returns:
        The attacks, and why libraries are missing among them.

    Raises:
        InvalidArgumentError: No adapter of that name.
    """
    rows: list[dict[str, Any]] = []
    missing: list[str] = []
    known = adapters()
    for name in known if libraries is None else libraries:
        check_choice("library", name, tuple(known))
        try:
            rows += [_row(name, listing) for listing in known[name].list_attacks()]
        except MissingDependencyError as error:
            missing.append(f"{name}: {error}")
    return rows, missing


def _row(library: str, listing: AttackListing) -> dict[str, Any]:
    traits = asdict(listing.traits)
    return {
        "name": f"{library}:{listing.name}",
        "aliases": [f"{library}:{alias}" for alias in listing.aliases],
        "kind": listing.traits.kind,
        **{key: list(value) if isinstance(value, tuple) else value for key, value in traits.items()},
        "channels": listing.channels,
        "reason": listing.reason,
        "defect": listing.defect,
    }


def attack_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The attacks as text: a line each, then those that cannot be used and why.

    Args:
        rows: As :func:`list_attacks` gives them.
    """
    width = max((len(row["name"]) for row in rows), default=6)
    lines = [f"{'attack':<{width}}  {'kind':<13}  {'norms':<12}  {'batching':<8}  also called"]
    for row in rows:
        if not row["reason"]:
            line = f"{row['name']:<{width}}  {row['kind']:<13}  {' '.join(row['norms']):<12}  {row['batching']:<8}  "
            lines.append((line + " ".join(row["aliases"])).rstrip())
    refused = [f"{row['name']}: {row['reason']}" for row in rows if row["reason"]]
    if refused:
        lines += ["", "Not usable here:", *refused]
    lines += ["", "Besides these: package.module:callable and path/to/file.py:callable, (model, x, y) -> x_adv."]
    return "\n".join(lines)
