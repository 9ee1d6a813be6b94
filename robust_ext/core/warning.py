"""Warnings for users: call ``warn(text)`` anywhere in the library.

Inside an evaluation texts are collected, put into the result's ``warnings``, and issued once, at the end, as
:class:`robust_ext.RobustExtWarning` at the line of the caller. Texts that an evaluation puts into
``content["warnings"]`` itself are issued with them. Elsewhere ``warn`` issues at once. The command line shows each text
once: in the report of the result, or on stderr where no result holds it.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from robust_ext.core.errors import RobustExtWarning

logger = logging.getLogger(__name__)

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


@contextmanager
def issuing_once() -> Iterator[Callable[[Iterable[str]], None]]:
    """Collect warnings inside the block and issue them at its end; yields what takes those of the result.

    Inside another such block, what was collected is handed on to that one, and the result's are left out.
    """
    outermost, shown = _COLLECTED.get() is None, dict[str, bool]()

    def take(texts: Iterable[str]) -> None:
        if outermost:
            shown.update(dict.fromkeys(texts, True))

    collected: Mapping[str, bool] = {}
    try:
        with collecting() as collected:
            yield take
    finally:
        reported = shown if _REPORTED.get() else {}
        issue({text: kept for text, kept in {**shown, **collected}.items() if text not in reported})


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
