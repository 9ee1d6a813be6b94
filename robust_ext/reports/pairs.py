"""The result of a regular and an inverted test, laid out as if each test had been run on attacks of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_pair(result: Mapping[str, Any]) -> bool:
    """Whether the attacks of a result went through two tests each."""
    return any("tests" in attack for attack in result["attacks"])


def spread_out(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """A result in which every test of every attack is an entry; a result of one test is returned as it is.

    Args:
        result: The content of ``result.json``.
    """
    if not is_pair(result):
        return result
    entries = [
        {**one, "name": f"{attack['name']} ({test})"}
        for attack in result["attacks"]
        for test, one in attack["tests"].items()
    ]
    return {**result, "attacks": entries}
