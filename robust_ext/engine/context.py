"""The surroundings of a run that are not arguments: origins, listeners and the deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from robust_ext.core.errors import InvalidArgumentError

if TYPE_CHECKING:
    from robust_ext.engine.isolation.worker import IsolatedWorker


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The surroundings of a run."""

    # Where things came from, as text by name ({"model": "net.py:make"}), kept with the settings
    origin: Mapping[str, str] = field(default_factory=dict)
    target: str = ""  # Names of targets, for tables that hold several
    command: Sequence[str] = ()  # Arguments of robust-ext that repeat the run
    # Called with each record when its block is finished, in order
    on_record: Callable[[Mapping[str, Any]], None] | None = None
    # Of time.monotonic: queries end, and where a run may end early its finished blocks count
    deadline: float | None = None
    dry_run: bool = False  # Whether an evaluation ends with what it would cost, before anything is run or written
    repair: bool = False  # Whether damaged parts of a run folder are dropped and recomputed, not refused

    def __post_init__(self) -> None:
        origin, command = self.origin, self.command
        if not isinstance(origin, Mapping) or not all(isinstance(one, str) for pair in origin.items() for one in pair):
            raise InvalidArgumentError("origin", origin, 'texts by name, as in {"model": "net.py:make"}')
        if not isinstance(self.target, str):
            raise InvalidArgumentError("target", self.target, "a text")
        if not isinstance(command, (list, tuple)) or not all(isinstance(one, str) for one in command):
            raise InvalidArgumentError("command", command, "a list of texts")
        if not isinstance(self.repair, bool):
            raise InvalidArgumentError("repair", self.repair, "True or False")

    @property
    def origins(self) -> dict[str, str]:
        """The origin as entries of the settings in a result."""
        return {f"{name}_origin": words for name, words in self.origin.items()}


ISOLATING: ContextVar[IsolatedWorker | None] = ContextVar("robust_ext_isolating", default=None)
"""The worker that runs each attack in a process of its own; None where they run in this process."""

_CURRENT: ContextVar[RunContext | None] = ContextVar("robust_ext_run", default=None)


def current_context() -> RunContext:
    """The context of the run that begins now."""
    return _CURRENT.get() or RunContext()


def set_aside(objects: Sequence[object]) -> None:
    """Keep what a run is made of as it is before anything is planted, for attacks in processes of their own."""
    worker = ISOLATING.get()
    if worker is not None:
        worker.set_aside(objects)


@contextmanager
def run_context(context: RunContext) -> Iterator[None]:
    """Runs that begin inside the block have this context."""
    token = _CURRENT.set(context)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def is_over() -> bool:
    """Return whether the time that was given is over."""
    deadline = current_context().deadline
    return deadline is not None and time.monotonic() >= deadline


@contextmanager
def limited(minutes: float | None) -> Iterator[None]:
    """Runs that begin inside the block end after that many minutes, or at an earlier outer deadline."""
    context = current_context()
    ends = [context.deadline, None if minutes is None else time.monotonic() + 60 * minutes]
    with run_context(replace(context, deadline=min((end for end in ends if end is not None), default=None))):
        yield


@contextmanager
def repairing() -> Iterator[None]:
    """Runs that begin inside the block drop damaged records in their run folders, and do exactly that again.

    Example:
        >>> with repairing():
        ...     current_context().repair
        True
    """
    with run_context(replace(current_context(), repair=True)):
        yield
