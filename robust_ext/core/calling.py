"""Wrong calls of classes whose arguments are keywords, answered with the right call."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from typing import Any, TypeVar

from robust_ext.core.errors import WrongCallError

T = TypeVar("T")

# What other libraries call these.
_OTHER_NAMES = {
    "eps": "epsilon", "budget": "epsilon", "max_norm": "epsilon", "p": "norm", "ord": "norm", "clip_values": "bounds",
    "clip": "bounds", "n_iter": "steps", "max_iter": "steps", "iterations": "steps", "num_steps": "steps",
    "n_restarts": "restarts", "num_random_init": "restarts", "n_queries": "queries", "n_samples": "samples",
}  # fmt: skip
_LONGEST = 40


def teaching(cls: type[T]) -> type[T]:
    """Let a keyword-only dataclass answer positional, unknown and missing arguments with the call that was meant.

    Example:
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
    fields = [field for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    names = [field.name for field in fields]
    missing = dataclasses.MISSING
    required = {one.name for one in fields if one.default is missing and one.default_factory is missing}
    made: Any = cls
    init = made.__init__

    @functools.wraps(init)
    def checked(self: T, *arguments: Any, **keywords: Any) -> None:
        if arguments or not required <= keywords.keys() <= {*names}:
            raise _wrong_call(cls.__name__, arguments, keywords, names, required)
        init(self, **keywords)

    made.__init__ = checked
    return cls


def _wrong_call(
    cls: str, arguments: tuple[Any, ...], keywords: dict[str, Any], names: list[str], required: set[str]
) -> WrongCallError:
    meant = {name: value for name, value in keywords.items() if name in names}
    unknown = False
    for name, value in keywords.items():
        if name not in names:
            other = _OTHER_NAMES.get(name.lower(), "")
            near = [other] if other in names else difflib.get_close_matches(name.lower(), names, n=1)
            unknown |= not near
            meant |= dict.fromkeys(near[:1], value)
    free = sorted((name for name in names if name not in meant), key=lambda name: name not in required)
    meant |= zip(free, arguments, strict=False)
    unknown |= len(arguments) > len(free)
    given = [*map(_shown, arguments), *(f"{name}={_shown(value)}" for name, value in keywords.items())]
    wanted = [
        f"{name}={_shown(meant[name]) if name in meant else '...'}" for name in names if name in {*meant, *required}
    ]
    more = f", with keywords of {', '.join(names)}" if unknown else ""
    return WrongCallError(f"{cls}: got {cls}({', '.join(given)}), expected {cls}({', '.join(wanted)}){more}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"<{type(value).__name__}>"
