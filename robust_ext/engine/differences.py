"""What differs between two runs, in words: settings, data, code and behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from robust_ext.engine.behaviour import compare_behaviour

_CODE, _BEHAVIOUR = "_code", "_behaviour"
# What digests are of.
_WORDS = {
    "model": "other weights, buffers or attributes",
    "defense": "other weights, buffers or attributes",
    "detector": "another detector",
    "detector_digest": "other weights, threshold or attributes",
    "surrogates": "other networks",
    "inputs": "other samples",
    "labels": "other labels",
}


def differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Everything in which what identifies a run differs from an earlier one; empty where they are the same run.

    Digests of code (keys that end in ``_code``) are compared file by file, what networks return for probe inputs
    (``_behaviour``) up to a tolerance.
    """
    found: list[str] = []
    for key in {**earlier, **now}:
        before, after = earlier.get(key), now.get(key)
        if before == after:
            continue
        kind = _CODE if key.endswith(_CODE) else _BEHAVIOUR if key.endswith(_BEHAVIOUR) else ""
        what = key.removesuffix(kind).replace("_", " ") if kind else key
        if kind and (not isinstance(before, Mapping) or not isinstance(after, Mapping)):
            kept = "begun by a version that did not keep it" if before is None else f"{_short(before)} there"
            found.append(f"{what} {kind[1:]}: {kept}")
        elif kind == _CODE:
            found += _code(what, before or {}, after or {})
        elif kind == _BEHAVIOUR:
            found += _behaviour(what, before or {}, after or {})
        elif key == "streams":
            found.append("streams: begun by a version that draws other points from the same seed")
        else:
            found.append(f"{key}: {_WORDS[key]}" if key in _WORDS and before and after else _values(key, before, after))
    return found


def _code(what: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    nested = [name for name in {**before, **after} if isinstance(before.get(name, after.get(name)), Mapping)]
    if nested:
        return [text for name in nested for text in _code(f"{what} {name}", before.get(name, {}), after.get(name, {}))]
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    # What code holds follows from its files, where these differ; else by name, where it has one.
    files = [name for name in names if name.endswith(".py")]
    shown = files or [name for name in names if name not in ("values", "compiled code")] or names
    fates = [" is new" if name not in before else " is gone" if name not in after else "" for name in shown]
    listed = [name + fate for name, fate in zip(shown, fates, strict=True)]
    more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
    return [f"{what} code: changed ({', '.join(listed[:4])}{more})"] if listed else []


def _behaviour(what: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    if not {"values", "raised"} & {*before, *after}:
        parts = [(name, before.get(name), after.get(name)) for name in {**before, **after}]
        return [text for name, a, b in parts for text in (_behaviour(f"{what} {name}", a, b) if a and b else ())]
    words = compare_behaviour(before, after)
    return [] if words is None else [f"{what}: {words}"]


def _values(key: str, before: Any, after: Any) -> str:
    return f"{key}: {_short(before)} there, {_short(after)} now"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
