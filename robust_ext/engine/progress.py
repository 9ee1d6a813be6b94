"""Progress on stderr: a live bar on a terminal; in logs, CI and notebooks a line at first and one a minute.

Work inside :func:`showing` names its phase by :func:`phase`, which costs nothing where nothing is shown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from robust_ext.core.cost import Spent
from robust_ext.core.errors import OutOfTimeError, duration, printable
from robust_ext.core.machine import lap
from robust_ext.core.target import PassCounter
from robust_ext.engine.context import current_context

PHASES = {
    "calibration": "calibration",
    "training": "training",
    "accepted": "points the detector lets pass",
    "features": "planting",
    "readout": "readouts",
    "random": "random search",
    "witnesses": "witnesses",
    "attack": "attack",
    "verify": "verification",
    "scores": "scores",
    "certificate": "certificate",
    "search": "attack search, where that fails",
    "rest": "the rest",
}
"""Phases in words, in the order of tables."""


class Phases:
    """Phases that follow each other, each of which begins where the one before it ended."""

    def __init__(self, counter: PassCounter) -> None:
        self.spent: dict[str, Spent] = {}
        self._counter = counter
        self.skip()

    def skip(self) -> None:
        """Count nothing since the last call: the work in between is counted elsewhere."""
        self._begun, self._seen = time.perf_counter(), self._counter.snapshot()

    def stop(self, phase: str) -> None:
        """Count everything spent since the last call for this phase."""
        now, seen = time.perf_counter(), self._counter.snapshot()
        rows = seen.since(self._seen)
        more = Spent(rows.forward, rows.backward, now - self._begun)
        self.spent[phase] = Spent.total([self.spent.get(phase, Spent()), more])
        self._begun, self._seen = now, seen


def phases_of(timing: Mapping[str, Any], title: str) -> Iterator[tuple[str, str | None, Spent]]:
    """The phases of a block's timing, attacks with their names, which is ``title`` where there is one."""
    for phase, spent in timing.get("phases", {}).items():
        yield phase, title if phase == "attack" else None, Spent(*spent)
    for name, own in timing.get("attacks", {}).items():
        yield from phases_of(own, name)


# Seconds between two writings: on a terminal; elsewhere before the first, and between all others.
_TERMINAL, _FIRST, _LATER = 0.25, 5.0, 60.0


class Progress:
    """The progress of some work.

    Args:
        title: What it is.
        total: How much there is to do, of ``unit``; None where that is not known.
        parent: The work that it is a part of.
    """

    def __init__(self, title: str, *, total: int | None, unit: str, parent: Progress | None) -> None:
        self.total, self.done = total, 0
        self._title, self._unit, self._phase, self._kept = title, unit, "", 0
        self._begun, self._parent = time.monotonic(), parent
        self._forward = self._backward = 0
        self._counter, self._seen = PassCounter(), PassCounter()
        self._top: Progress = self if parent is None else parent._top
        if parent is None:
            self._bars = _bars() if sys.stderr.isatty() else None
            self._written, self._due = False, self._begun + (_FIRST if self._bars is None else _TERMINAL)
        bars = self._top._bars
        self._bar = None if bars is None else bars.add_task(title, total=total, words="")

    def phase(self, words: str) -> None:
        """State what begins."""
        self._phase = printable(words)
        self._show()

    def advance(self, count: int = 1, *, kept: bool = False) -> None:
        """State that so much more is done; ``kept`` where an earlier call did it."""
        self.done += count
        self._kept += count if kept else 0
        self._show()

    def count(self, forward: int, backward: int) -> None:
        """Count further rows that went forward and back."""
        self._forward, self._backward = self._forward + forward, self._backward + backward

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
            self.count(spent.forward, spent.backward)
        self._counter, self._seen = counter, counter.snapshot()

    def _watch(self, counter: PassCounter) -> None:
        if time.monotonic() >= self._top._due:
            self._follow(counter)
            self._show()

    def _show(self) -> None:
        """Show all of it, where it is time to."""
        top, now = self._top, time.monotonic()
        if now < top._due:
            return
        top._due, top._written = now + (_LATER if top._bars is None else _TERMINAL), True
        self._write(self.line(), self.words())

    def _write(self, line: str, words: str) -> None:
        bars = self._top._bars
        if bars is None:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
        else:
            bars.update(self._bar, completed=self.done, total=self.total, words=words)
            bars.refresh()

    def line(self) -> str:
        """Return all of it as one line, after that of the work that it is a part of."""
        own = f"{self._title}: {self.words()}"
        return own if self._parent is None else f"{self._parent.line()} | {own}"

    def words(self) -> str:
        """Return count, time, phase and rows."""
        taken = time.monotonic() - self._begun
        left, worked = "", self.done - self._kept
        if worked and self.total is not None:
            left = f", about {duration(taken * (self.total - self.done) / worked)} left"
        back = f", {self._backward:,} back" if self._backward else ""
        rows = f"{self._forward:,} rows forward{back}" if self._forward else ""
        what = ", ".join(part for part in (self._phase, rows) if part)
        return " ".join(part for part in (self._count(), f"[{duration(taken)}{left}]", what) if part)

    def _count(self) -> str:
        if self.total is None:
            return f"{self.done} {self._unit}s" if self.done else ""
        return f"{self.done} of {self.total} {self._unit}s"

    def close(self, *, broken: bool = False) -> None:
        """State what it took, where anything was shown of it."""
        bars, ended = self._top._bars, f"{self._count()} in {duration(time.monotonic() - self._begun)}"
        if self._parent is None and (bars is not None or self._written):
            words = self.words() if broken else ended
            self._write(f"{self._title}: {words}", words)
        if bars is not None:
            bars.stop() if self._parent is None else bars.remove_task(self._bar)


def _bars() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    title, words = (TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[words]"))
    console = Console(file=sys.stderr, force_terminal=True, force_jupyter=False)
    made = Progress(
        title, BarColumn(), words, console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    )
    made.start()
    return made


_CURRENT: ContextVar[Progress | None] = ContextVar("robust_ext_progress", default=None)


@contextmanager
def showing(title: str, *, shown: bool, total: int | None = None, unit: str = "step") -> Iterator[Progress | None]:
    """Show the progress of the work inside the block; None where it is not shown.

    Inside another such block it is shown as a part of that one.
    """
    outer = _CURRENT.get()
    if not shown and outer is None:
        yield None
        return
    made = Progress(printable(title), total=total, unit=unit, parent=outer)
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


def phase(words: str) -> None:
    """State what begins."""
    lap()
    current = _CURRENT.get()
    if current is not None:
        current.phase(words)


@contextmanager
def watching(counter: PassCounter, words: str = "") -> Iterator[None]:
    """Count rows inside the block, which is a phase where it has words."""
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
