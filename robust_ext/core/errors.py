"""Exceptions and warnings of this project, and text that is safe to print."""

from __future__ import annotations

import logging
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


def printable(text: str) -> str:
    r"""Text with all that is not printed but lines and tabs (controls, turned directions, lone surrogates) as escapes.

    So that it cannot move a cursor, recolour or rename a terminal.

    Example:
        >>> print(printable("a\x1b[31mb"))
        a\x1b[31mb
    """
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text
    )


def duration(seconds: float) -> str:
    """Seconds as text.

    Example:
        >>> [duration(seconds) for seconds in (0.4, 75, 600, 7300)]
        ['0 s', '1 min 15 s', '10 min', '2 h 2 min']
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 600:
        minutes, rest = divmod(whole, 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    minutes = round(whole / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def shell_words(arguments: Iterable[str]) -> str:
    """Arguments as a shell takes them, in double quotes where they hold single ones and nothing that a shell expands.

    Example:
        >>> print(shell_words(["--attack", "robust_ext:APGD(loss='dlr')", "--out", "my runs"]))
        --attack "robust_ext:APGD(loss='dlr')" --out 'my runs'
    """
    return " ".join(
        f'"{one}"' if "'" in one and not set(one) & set('"$`\\!') else shlex.quote(one) for one in arguments
    )


class RobustExtWarning(UserWarning):
    """Something that a number rests on, or that was given in a way that is easily meant otherwise.

    Evaluations keep the texts in the result's ``warnings`` too; see :func:`robust_ext.core.errors.warn`.
    """


class RobustExtError(Exception):
    """Base of all errors this project raises on purpose."""


class InvalidArgumentError(RobustExtError, ValueError):
    """An argument is outside its range.

    Args:
        argument: Name of the argument, as the caller wrote it.
        got: What came; shown with ``repr`` unless it is a string.
        expected: What would have been accepted.

    Example:
        >>> raise InvalidArgumentError("epsilon", -1.0, "a number above 0")
        Traceback (most recent call last):
        ...
        robust_ext.core.errors.InvalidArgumentError: epsilon: got -1.0, expected a number above 0
    """

    def __init__(self, argument: str, got: object, expected: str) -> None:
        self.argument = argument
        self.got = got
        self.expected = expected
        shown = got if isinstance(got, str) else repr(got)
        super().__init__(f"{argument}: got {shown}, expected {expected}")


class WrongCallError(RobustExtError, TypeError):
    """A class was called with arguments that it does not have, or without some; the text has the right call."""


class ModelError(RobustExtError):
    """A model does not behave as a classifier from inputs in bounds to logits."""


class InconsistentModelError(ModelError):
    """A model's logits of a row do not follow from that row alone, or there are none.

    Args:
        text: What is wrong, and what to do.
        kind: ``"raises"``, ``"shape"``, ``"changes_input"``, ``"random"``, ``"batch"`` or ``"train_mode"``.
        difference: The largest between logits that should be the same; None where none were compared.
        scale: The largest logit, likewise.
        tried: What it was called with, as in ``"on a single row"``; empty where that does not matter.
    """

    def __init__(
        self,
        text: str,
        kind: str,
        difference: float | None = None,
        scale: float | None = None,
        *,
        tried: str = "",
    ) -> None:
        self.kind, self.difference, self.scale, self.tried = kind, difference, scale, tried
        super().__init__(text)


class SplitError(ModelError):
    """A classifier has no such layer or linear readout, or its logits do not follow from what enters it."""


class AttackError(RobustExtError):
    """An attack raised, or returned something that is not a batch of candidates."""


class AttackRefusedError(AttackError):
    """An attack cannot make sense on a target; the text has the reason and an alternative."""


class IsolationError(RobustExtError):
    """An attack's process could not be started, or could not load what it was sent: no fault of the attack."""


class DisturbedError(AttackError):
    """An attack changed the network, its hooks or the code that judges it; everything was put back."""


class OutOfTimeError(RobustExtError):
    """The time limit is over; finished work counts."""


class DataError(RobustExtError):
    """A data file is missing, unreadable or not what its name promises."""


class RunFolderError(RobustExtError):
    """A run folder holds another run, is damaged, or is being written by another process."""


class RunFolderBusyError(RunFolderError):
    """Another process is writing the run folder."""


class MissingDependencyError(RobustExtError, ImportError):
    """An optional package is needed; the text names the install command."""


logger = logging.getLogger(__name__)

# Texts by order, and whether the result holds them among its warnings.
_COLLECTED: ContextVar[dict[str, bool] | None] = ContextVar("robust_ext_warnings", default=None)
_REPORTED: ContextVar[bool] = ContextVar("robust_ext_reported", default=False)


# What was issued at once, and is not issued again at the end of the evaluation.
_TOLD: ContextVar[set[str] | None] = ContextVar("robust_ext_told", default=None)


def warn(text: str, *, kept: bool = True, at_once: bool = False) -> None:
    """Warn the user, once for each text in an evaluation.

    Args:
        text: What is wrong and what to do; without counts that differ between blocks of samples.
        kept: Whether the result is to hold it among its warnings; False where it repeats another part.
        at_once: Whether to issue it now, before the work begins, and not at the end.
    """
    collected, told = _COLLECTED.get(), _TOLD.get()
    if at_once and told is not None and text not in told:
        told.add(text)
        warnings.warn(text, RobustExtWarning, stacklevel=_callers_level())
    if collected is None:
        warnings.warn(text, RobustExtWarning, stacklevel=_callers_level())
    elif text not in collected:
        logger.info("%s", text)
        collected[text] = kept


def issue(collected: Mapping[str, bool]) -> None:
    """Issue warnings collected elsewhere."""
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

    Inside another such block, collected texts are handed on to that one, without those of the result.
    """
    outermost, shown = _COLLECTED.get() is None, dict[str, bool]()
    outer = _TOLD.get()
    told: set[str] = set() if outer is None else outer
    token = _TOLD.set(told)

    def take(texts: Iterable[str]) -> None:
        if outermost:
            shown.update(dict.fromkeys(texts, True))

    collected: Mapping[str, bool] = {}
    try:
        with collecting() as collected:
            yield take
    finally:
        _TOLD.reset(token)
        left_out = told | shown.keys() if _REPORTED.get() else told
        issue({text: kept for text, kept in {**shown, **collected}.items() if text not in left_out})


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
