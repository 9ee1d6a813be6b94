"""The boundary around code that is not this project's: attacks, models, and callables of users and libraries."""

from __future__ import annotations

import difflib
import functools
import inspect
import signal
import threading
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor

from robust_ext.core.errors import DataError, IsolationError, ModelError, RobustExtError, RunFolderError, WrongCallError

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
    for other in (*others, *(f"{one}s" for one in others)):
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


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@contextmanager
def foreign_code(
    argument: str, what: str, *, hint: str = "check its arguments", kind: type[RobustExtError] = DataError
) -> Iterator[None]:
    """Turn what foreign code raises inside into an error of a ``kind``; errors of this project and Ctrl-C pass.

    ``sys.exit`` counts as raising: nothing that is evaluated may end the evaluation as if it had gone well.
    """
    with reported(lambda error: kind(f"{argument}: {what} {raised(error, hint=hint)}")):
        yield


@contextmanager
def reported(report: Callable[[BaseException], RobustExtError]) -> Iterator[list[int]]:
    """Turn what foreign code raises inside into the error of a report; errors of this project and Ctrl-C pass.

    The list has the user's interrupts that arrived.
    """
    with noting_interrupts() as interrupts:
        try:
            yield interrupts
        except BaseException as error:
            if is_own(error) or (interrupts and isinstance(error, KeyboardInterrupt)):
                raise
            raise report(error) from error


@contextmanager
def not_ending() -> Iterator[None]:
    """Turn an attempt by evaluated code to end the process into a ModelError."""
    try:
        yield
    except (SystemExit, GeneratorExit) as error:
        text = raised(error, hint="raise another exception where it cannot go on")
        raise ModelError(f"the model, or other code that is evaluated, {text} ({place_of(error)})") from error


def is_own(error: BaseException) -> bool:
    """Return whether this project's code raised an error of its own, for example about a call by foreign code.

    Errors about the evaluation itself are never a report on the code that it runs.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_by = str(frames[-1].f_globals.get("__name__")) if frames else ""
    places = {name.split(".")[0] for name in (raised_by, type(error).__module__)}
    return places == {__name__.split(".")[0]} and not isinstance(error, (RunFolderError, IsolationError))


@contextmanager
def noting_interrupts() -> Iterator[list[int]]:
    """List the user's interrupts (Ctrl-C) that arrive inside the block; they are still handled as before."""
    arrived, handler = list[int](), signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield arrived
        return

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield arrived
    finally:
        signal.signal(signal.SIGINT, handler)


def raised(error: BaseException, *, hint: str) -> str:
    """``raised ...; HINT`` as text; another hint where code tried to end the process."""
    if isinstance(error, SystemExit):
        hint = "let it return instead, with what it runs as a program below `if __name__ == '__main__':`"
    return f"raised {': '.join(filter(None, (type(error).__name__, text_of(error))))}; {hint}"


def text_of(error: BaseException) -> str:
    """The text of an error, also of one whose ``__str__`` raises; empty where it has none."""
    try:
        return str(error)
    except Exception as unreadable:
        return f"its text cannot be read, which raised {type(unreadable).__name__}"


def place_of(error: BaseException) -> str:
    """The line of code that raised an error; empty where that is not known."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return "; ".join(f"at `{one.line}` ({Path(one.filename).name}, line {one.lineno})" for one in last)


def without_values(tensor: Any) -> str | None:
    """Why the values of a tensor cannot be computed with, as ``on the meta device``; None for a plain tensor.

    Subclasses of tensors are plain unless they define ``__torch_dispatch__``; see :func:`plain_tensor`.
    """
    kind = type(tensor)
    if kind.__torch_dispatch__ not in (Tensor.__torch_dispatch__, torch.nn.Parameter.__torch_dispatch__):
        return f"of {kind.__name__}, a class that defines __torch_dispatch__"
    with torch._C.DisableTorchFunctionSubclass():
        layout, dtype, meta, nested = (
            getattr(Tensor, one).__get__(tensor) for one in ("layout", "dtype", "is_meta", "is_nested")
        )
    if layout != torch.strided or meta or nested:
        return "on the meta device" if meta else "that is nested" if nested else f"of layout {layout}"
    return f"of dtype {dtype}" if dtype.is_floating_point and dtype not in _FLOATS else None


def plain_tensor(tensor: Any) -> Tensor:
    """A tensor as a plain one on the same values: what a subclass overrides has no part in it."""
    with torch._C.DisableTorchFunctionSubclass():
        plain: Tensor = Tensor.as_subclass(tensor, Tensor)
    return plain.detach()
