"""Wrong calls, answered with the right ones."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Collection
from typing import Any, TypeVar

from robust_ext.core.errors import WrongCallError

T = TypeVar("T")

# What other libraries call these; the first that a class has is meant.
_OTHER_NAMES = {
    "eps": ("epsilon",), "budget": ("epsilon",), "max_norm": ("epsilon",), "p": ("norm",), "ord": ("norm",),
    "clip_values": ("bounds",), "clip": ("bounds",), "n_iter": ("steps",), "max_iter": ("steps",),
    "iterations": ("steps",), "num_steps": ("steps",), "n_restarts": ("restarts",), "num_random_init": ("restarts",),
    "n_queries": ("queries",), "n": ("draws", "samples"), "n_samples": ("samples", "draws"),
    "num_samples": ("samples", "draws"), "nb_samples": ("samples", "draws"), "eot_iter": ("draws",),
    "model": ("module", "forward"),
}  # fmt: skip
_OF_BUDGETS = ("norm", "epsilon", "bounds")
_LONGEST = 40


def teaching(cls: type[T]) -> type[T]:
    """Let a class answer positional, unknown and missing arguments with the call that was meant.

    Example:
        >>> import dataclasses
        >>> @teaching
        ... @dataclasses.dataclass(kw_only=True)
        ... class Ball:
        ...     norm: str
        ...     epsilon: float
        >>> Ball("linf", eps=0.2)
        Traceback (most recent call last):
        ...
        robust_ext.core.errors.WrongCallError: Ball: got Ball('linf', eps=0.2), expected Ball(norm='linf', epsilon=0.2)
    """
    made: Any = cls
    init = made.__init__
    _, *parameters = inspect.signature(init).parameters.values()
    names = [one.name for one in parameters]
    leading = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    required = {one.name for one in parameters if one.default is one.empty}

    @functools.wraps(init)
    def checked(self: T, *arguments: Any, **keywords: Any) -> None:
        placed = {*leading[: len(arguments)]}
        if len(arguments) > len(leading) or not required - placed <= keywords.keys() <= {*names} - placed:
            raise _wrong_call(cls.__name__, arguments, keywords, names, leading, required)
        init(self, *arguments, **keywords)

    made.__init__ = checked
    return cls


def meant_instead(name: str, known: Collection[str]) -> str:
    """A clause naming what an unknown keyword was meant for, by the names of other libraries; empty where none is.

    Example:
        >>> meant_instead("n_iter", ["steps", "seed"])
        '; did you mean steps?'
        >>> meant_instead("eps", ["steps"])
        '; state epsilon in the threat model: ThreatModel(norm=..., epsilon=...)'
    """
    others = (name.lower(), *_OTHER_NAMES.get(name.lower(), ()))
    for other in others:
        if other in known:
            return f"; did you mean {other}?"
    budget = next((other for other in others if other in _OF_BUDGETS), None)
    if budget is None:
        return ""
    bounds = ", bounds=..." if budget == "bounds" else ""
    return f"; state {budget} in the threat model: ThreatModel(norm=..., epsilon=...{bounds})"


def _wrong_call(
    cls: str,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    names: list[str],
    leading: list[str],
    required: set[str],
) -> WrongCallError:
    meant = {name: value for name, value in keywords.items() if name in names}
    meant |= zip(leading, arguments, strict=False)
    unknown = False
    for name, value in keywords.items():
        if name not in names:
            near = [other for other in _OTHER_NAMES.get(name.lower(), ()) if other in names and other not in meant][:1]
            near = near or difflib.get_close_matches(name.lower(), names, n=1)
            unknown |= not near
            meant |= dict.fromkeys(near, value)
    rest = arguments[len(leading) :]
    free = sorted((name for name in names if name not in meant), key=lambda name: name not in required)
    meant |= zip(free, rest, strict=False)
    unknown |= len(rest) > len(free)
    given = [*map(_shown, arguments), *(f"{name}={_shown(value)}" for name, value in keywords.items())]
    wanted = [
        f"{name}={_shown(meant[name]) if name in meant else '...'}" for name in names if name in {*meant, *required}
    ]
    more = f", with keywords of {', '.join(names)}" if unknown else ""
    return WrongCallError(f"{cls}: got {cls}({', '.join(given)}), expected {cls}({', '.join(wanted)}){more}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"<{type(value).__name__}>"
