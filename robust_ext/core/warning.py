"""Warnings for users: call ``warn(text)`` anywhere in the library.

Inside an evaluation (a function with :func:`warning_once`) texts are collected, put into the result's ``warnings``, and
issued once, at the end, as :class:`robust_ext.RobustExtWarning` at the line of the caller. Texts that only the result
holds, in ``content["warnings"]``, are issued with them. Elsewhere ``warn`` issues at once. The command line shows each
text once: in the report of the result, or on stderr where no result holds it.
"""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

from robust_ext.core.errors import RobustExtWarning

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# Texts by order, and whether the result holds them among its warnings.
_COLLECTED: ContextVar[dict[str, bool] | None] = ContextVar("robust_ext_warnings", default=None)
_REPORTED: ContextVar[bool] = ContextVar("robust_ext_reported", default=False)


def warn(text: str, *, kept: bool = True) -> None:
    """Warn the user, once for each text in an evaluation.

    Args:
        text: What is wrong and what to do; without counts that differ between blocks of samples.
        kept: Whether the result is to hold it among its warnings; False where it says the same elsewhere.
    """
    collected = _COLLECTED.get()
    if collected is None:
        warnings.warn(text, RobustExtWarning, stacklevel=_callers_level())
    elif text not in collected:
        logger.info("%s", text)
        collected[text] = kept


def issue(collected: Mapping[str, bool]) -> None:
    """Warn of what was collected elsewhere."""
    for text, kept in collected.items():
        warn(text, kept=kept)


@contextmanager
def collecting() -> Iterator[dict[str, bool]]:
    """Collect the texts of :func:`warn` inside the block, with their ``kept``, instead of issuing them."""
    collected: dict[str, bool] = {}
    token = _COLLECTED.set(collected)
    try:
        yield collected
    finally:
        _COLLECTED.reset(token)


def with_collected(texts: Iterable[str]) -> list[str]:
    """The warnings of a result: these texts, then those that were collected for it."""
    collected = _COLLECTED.get() or {}
    return list(dict.fromkeys([*texts, *(text for text, kept in collected.items() if kept)]))


def warning_once(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function that returns a result issue its warnings once, at its end.

    Inside another such function, what was collected is handed on to that one.
    """

    @functools.wraps(function)
    def evaluation(*arguments: P.args, **keywords: P.kwargs) -> R:
        outermost, texts = _COLLECTED.get() is None, list[str]()
        try:
            with collecting() as collected:
                result = function(*arguments, **keywords)
            if outermost:
                texts = getattr(result, "content", {}).get("warnings", [])
        finally:
            found = {**dict.fromkeys(texts, True), **collected}
            shown = set(texts) if _REPORTED.get() else set[str]()
            issue({text: kept for text, kept in found.items() if text not in shown})
        return result

    return evaluation


@contextmanager
def on_stderr() -> Iterator[None]:
    """Log warnings as plain lines; those of results are left out, as their reports show them (the command line)."""
    token = _REPORTED.set(True)
    with warnings.catch_warnings():
        warnings.simplefilter("always", RobustExtWarning)
        show = warnings.showwarning

        def log(message: Warning | str, category: type[Warning], *more: Any, **keywords: Any) -> None:
            if issubclass(category, RobustExtWarning):
                logger.warning("%s", message)
            else:
                show(message, category, *more, **keywords)

        warnings.showwarning = log
        try:
            yield
        finally:
            _REPORTED.reset(token)


def _callers_level() -> int:
    """The ``stacklevel`` that names, for :func:`warn`, the line that called this package."""
    frame, level, found = sys._getframe(1).f_back, 2, 2
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == "robust_ext":
            found = level + 1
        frame, level = frame.f_back, level + 1
    return found
