"""TOML files as plain data."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robust_ext.core.errors import DataError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LARGEST_FILE = 1_000_000
"""Bytes of a file that is read."""


def read_toml(file: Path | Traversable, *, name: str, kind: str, see: str) -> dict[str, Any]:
    """The content of a file.

    Args:
        file: The file.
        name: What error messages call it.
        kind: What it should be, as in ``"suite"``.
        see: Where that is described.

    Raises:
        DataError: It cannot be read, is too large, or is no valid TOML.
    """
    try:
        with file.open("rb") as opened:
            content: bytes = opened.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        raise DataError(f"{name}: cannot be read as a {kind} ({error})") from error
    if len(content) > LARGEST_FILE:
        raise DataError(f"{name}: is larger than a {kind} can be, {LARGEST_FILE} bytes; {see}")
    try:
        return tomllib.loads(content.decode())
    # The parser follows nesting by recursion, and Python limits the digits of an integer.
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}: is no valid TOML ({error}); {see}") from error


def table_text(name: str, values: Mapping[str, Any]) -> str:
    r"""A table of texts, numbers, truth values and lists of these, whose keys are bare.

    Example:
        >>> print(table_text("mead", {"eps": "8/255", "samples": 3, "suite": ["a\n", "b"]}))
        [mead]
        eps = "8/255"
        samples = 3
        suite = ["a\u000a", "b"]
    """
    return "\n".join([f"[{name}]", *(f"{key} = {_value_text(value)}" for key, value in values.items())])


def _value_text(value: object) -> str:
    if isinstance(value, (bool, int)):
        return json.dumps(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_value_text, value))}]"
    return f'"{"".join(map(_character, str(value)))}"'


def _character(character: str) -> str:
    """One character of a basic string; what a terminal would not print is escaped."""
    if character in '"\\':
        return f"\\{character}"
    code = ord(character)
    if character.isprintable():
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
