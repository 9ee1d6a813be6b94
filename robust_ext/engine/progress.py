"""What is shown of work that goes on: phase, count, rows through the network, and how long it will take.

On a terminal one line is written again and again, elsewhere (logs, CI, notebooks) a line at first and one a minute.
Whatever goes on inside :func:`showing` states its phase by :func:`phase`, and costs nothing where nothing is shown.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

import torch
from torch import nn

from robust_ext.core.errors import OutOfTimeError
from robust_ext.core.printable import printable
from robust_ext.core.target import PassCounter
from robust_ext.engine.context import current_context
from robust_ext.engine.forecast import Forecast, duration

# Seconds between two writings: on a terminal; elsewhere the first, and all others.
_TERMINAL, _FIRST, _LATER = 0.25, 5.0, 60.0


class _Screen:
    """Where lines go; those of several progresses at once are one line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.terminal = stream.isatty()  # Whether lines are written over
        self._due = time.monotonic() + (_TERMINAL if self.terminal else _FIRST)
        self._width = self.written = 0

    def due(self) -> bool:
        """Whether it is time to write."""
        return time.monotonic() >= self._due

    def write(self, text: str, *, last: bool = False) -> None:
        """Write a line, on a terminal in the place of the one before."""
        self._due = time.monotonic() + (_TERMINAL if self.terminal else _LATER)
        self.written += 1
        if self.terminal:
            room = shutil.get_terminal_size().columns - 1
            text = text if len(text) <= room else text[: room - 1] + "…"
            self._stream.write("\r" + text.ljust(self._width) + ("\n" if last else ""))
            self._width = 0 if last else len(text)
        else:
            self._stream.write(text + "\n")
        self._stream.flush()


class Progress:
    """How far some work has come.

    Args:
        title: What it is.
        total: How much there is to do, of ``unit``; None where that is not known.
        forecast: What it is expected to take; by the part that is done where left out.
    """

    def __init__(
        self, title: str, *, total: int | None, unit: str, forecast: Forecast | None, parent: Progress | None
    ) -> None:
        self.total, self.done = total, 0
        self.forecast = forecast or Forecast()
        self._title, self._unit, self._phase = title, unit, ""
        self._begun, self._parent = time.monotonic(), parent
        self._counter, self._seen = PassCounter(), PassCounter()
        self._screen: _Screen = _Screen(sys.stderr) if parent is None else parent._screen

    def phase(self, words: str) -> None:
        """State what begins."""
        self._phase = printable(words)
        self._show()

    def advance(self, count: int = 1) -> None:
        """State that so much more is done."""
        self.done += count
        self._show()

    def write_line(self, text: str) -> None:
        """Write a line that stays."""
        self._screen.write(text, last=True)

    @contextmanager
    def watching(self, counter: PassCounter) -> Iterator[None]:
        """Follow the rows that are counted inside the block."""
        before, counter.watch = counter.watch, self._watch
        self._follow(counter)
        try:
            yield
        finally:
            self._follow(counter)
            counter.watch = before

    def _follow(self, counter: PassCounter) -> None:
        if counter is self._counter:
            spent = counter.since(self._seen)
            self.forecast.count(spent.forward, spent.backward)
        self._counter, self._seen = counter, counter.snapshot()

    def _watch(self, counter: PassCounter) -> None:
        if self._screen.due():
            self._follow(counter)
            self._show()

    def _show(self) -> None:
        if self._screen.due():
            self._screen.write(self.line())

    def line(self) -> str:
        """All of it in one line."""
        taken = f"[{duration(time.monotonic() - self._begun)}{self._left()}]"
        what = ", ".join(part for part in (self._phase, self._rows()) if part)
        own = f"{self._title}: {' '.join(part for part in (self._count(), taken, what) if part)}"
        return own if self._parent is None else f"{self._parent.line()} | {own}"

    def _count(self) -> str:
        if self.total is None:
            return f"{self.done} {self._unit}s" if self.done else ""
        return f"{self.done} of {self.total} {self._unit}s"

    def _rows(self) -> str:
        forward, backward = self.forecast.rows
        back = f", {backward:,} back" if backward else ""
        return f"{forward:,} rows forward{back}" if forward else ""

    def _left(self) -> str:
        seconds, known = self.forecast.left()
        if seconds is None:
            if not self.done or self.total is None:
                return ""
            seconds = (time.monotonic() - self._begun) * (self.total - self.done) / self.done
        return f", {'about' if known else 'at least'} {duration(seconds)} left"

    def close(self, *, broken: bool = False) -> None:
        """State what it took, where anything was shown of it."""
        if self._parent is None and (self._screen.written or (self._screen.terminal and not broken)):
            ended = f"{self._title}: {self._count()} in {duration(time.monotonic() - self._begun)}"
            self._screen.write(self.line() if broken else ended, last=True)


_CURRENT: ContextVar[Progress | None] = ContextVar("robust_ext_progress", default=None)


@contextmanager
def showing(
    title: str, *, shown: bool, total: int | None = None, unit: str = "step", forecast: Forecast | None = None
) -> Iterator[Progress | None]:
    """Show the progress of what goes on inside the block; None where it is not shown.

    Inside another such block it is shown as a part of that one.
    """
    outer = _CURRENT.get()
    if not shown and outer is None:
        yield None
        return
    made = Progress(printable(title), total=total, unit=unit, forecast=forecast, parent=outer)
    _CURRENT.set(made)
    try:
        yield made
    except BaseException:
        made.close(broken=True)
        raise
    else:
        made.close()
    finally:
        # No token: the block may belong to a generator.
        _CURRENT.set(outer)


def is_shown(progress: bool) -> bool:
    """Whether progress that begins now is shown: as it was chosen, or as a part of other work's."""
    return progress or _CURRENT.get() is not None


def phase(words: str) -> None:
    """State what begins, of the work that is shown."""
    current = _CURRENT.get()
    if current is not None:
        current.phase(words)


@contextmanager
def watching(counter: PassCounter, words: str = "") -> Iterator[None]:
    """Follow the rows that are counted inside the block, which is a phase where it has words."""
    current = _CURRENT.get()
    if current is None:
        yield
        return
    if words:
        current.phase(words)
    with current.watching(counter):
        yield


class _TimeIsOver(KeyboardInterrupt):
    """An interrupt of foreign code by the deadline, which nothing takes for a fault of that code."""


@contextmanager
def paced(module: nn.Module, words: str) -> Iterator[None]:
    """Show the passes of a module inside the block as they come, and end it at the deadline of the run.

    Raises:
        OutOfTimeError: The time was over before the block was done; the module is left as it was.
    """
    begun, deadline, count = time.monotonic(), current_context().deadline, 0

    def note(part: nn.Module, _args: object) -> None:
        nonlocal count
        if deadline is not None and time.monotonic() > deadline:
            raise _TimeIsOver
        if part is module:
            count += 1
            phase(f"{words}, pass {count}")

    hooked = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    handles = [part.register_forward_pre_hook(note) for part in hooked]
    try:
        yield
    except _TimeIsOver:
        taken = f"{count} passes took {duration(time.monotonic() - begun)}"
        raise OutOfTimeError(
            f"{words}: the time is over before they were done ({taken}); give more minutes, or a faster device"
        ) from None
    finally:
        for handle in handles:
            handle.remove()
