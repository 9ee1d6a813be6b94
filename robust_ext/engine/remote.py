"""Calls for workers: how this process makes them, and what a worker does with them."""

from __future__ import annotations

import io
import os
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from robust_ext.core.errors import InvalidArgumentError, ModelError, RobustExtError, collecting
from robust_ext.core.machine import trimmed
from robust_ext.engine.context import RunContext, run_context, set_aside
from robust_ext.engine.isolation.messages import Packer, Unpickler, describe_error
from robust_ext.engine.isolation.process import unreadable
from robust_ext.engine.isolation.worker import IsolatedWorker, isolating
from robust_ext.engine.run import Block, Run, timed
from robust_ext.engine.task import drive, run_task

# Parts that a worker keeps: runs, and the networks of several.
_PARTS = 32
_MADE: dict[tuple[str, str | None], Any] = {}
# What is in the memory of this process, also after a fork.
_MEMORY = secrets.token_hex(8)
# Hooks and global seeds belong to a process: of threads that an executor has in it one works at a time.
_ONE = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Call:
    """A function with its arguments, for a worker."""

    packed: bytes
    parts: tuple[str, ...] = ()  # Digests of what it shares with other calls; each may refer to those before it
    origin: str = "cpu"  # The kind of device that its tensors lie on
    device: str | None = None  # Where the worker is to have them; None for where they lie
    content: Mapping[str, bytes] = field(default_factory=dict)  # Of parts that the worker lacks
    caller: tuple[str, int] = field(default_factory=lambda: (_MEMORY, os.getpid()))


def make_call(packer: Packer, function: Callable[..., Any], *, origin: str = "cpu", **arguments: Any) -> Call:
    """Return a call of a function of a module; ModelError where something cannot be pickled."""
    content, parts = packer.pickle((function, _own(arguments)))
    return Call(packed=content, parts=tuple(parts), origin=origin)


def _own(value: Any) -> Any:
    """Return copies of tensors, by name: a pickle of a view holds all that it is a view of."""
    if isinstance(value, Mapping):
        return {name: _own(one) for name, one in value.items()}
    return value.detach().clone() if isinstance(value, Tensor) else value


def run_call(call: Call) -> dict[str, Any]:
    """Return the ``value`` of a call and its ``warnings``; or which parts are ``missing``; or an error, described."""
    with _ONE, collecting() as warned:
        missing = [digest for digest in call.parts if (digest, call.device) not in _MADE and digest not in call.content]
        if missing:
            return {"missing": missing}
        try:
            _check_process(*call.caller)
            function, arguments = _loaded(call)
            with trimmed():
                reply = {"value": function(**arguments)}
        except RobustExtError as error:
            reply = describe_error(error)
        except Exception:
            reply = {"raised": traceback.format_exc()}
    return {**reply, "warnings": warned}


def run_block(
    run: Run,
    rows: range,
    needs: Mapping[str, Any],
    *,
    isolate: bool,
    attack_timeout: float | None,
    seconds: float | None,
) -> Block:
    """Plant, attack and verify a block of samples on a worker, ``seconds`` before the deadline of the run."""
    deadline = None if seconds is None else time.monotonic() + seconds
    with ExitStack() as stack:
        worker = _isolated(os.getpid(), attack_timeout) if isolate else run_task
        if isinstance(worker, IsolatedWorker):
            stack.enter_context(isolating(worker))
        stack.enter_context(run_context(RunContext(deadline=deadline)))
        stack.enter_context(run.session())
        set_aside(run.common())
        return drive(timed(run.work(rows, needs)), worker)


def _check_process(memory: str, process: int) -> None:
    if (memory, process) == (_MEMORY, os.getpid()):
        expected = "one whose workers are processes, as hooks and global seeds are those of a whole process"
        raise InvalidArgumentError("executor", "an executor that works in this process", expected)
    if memory == _MEMORY:
        # A fork has the parent's OpenMP without its threads, and hangs where it would use several.
        torch.set_num_threads(1)


@cache
def _isolated(_process: int, timeout: float | None) -> IsolatedWorker:
    """Return the worker of this process; attacks' processes are kept between blocks, and end with this one."""
    # For good: what they start may look on between blocks.
    unreadable().__enter__()
    return IsolatedWorker(timeout=timeout)


def _loaded(call: Call) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a call's function and arguments, its parts made where they are not there yet."""
    parts: dict[str, Any] = {}
    try:
        for digest in call.parts:
            key = digest, call.device
            made = _MADE.pop(key) if key in _MADE else _Loader(call.content[digest], parts, call).load()
            parts[digest] = _MADE[key] = made
        while len(_MADE) > max(_PARTS, len(call.parts)):
            del _MADE[next(iter(_MADE))]
        function, arguments = _Loader(call.packed, parts, call).load()
        return function, arguments
    except RobustExtError:
        raise
    except Exception as error:
        raise ModelError(
            f"what the run needs cannot be made on a worker ({type(error).__name__}: {error}); install there what is "
            "imported here, define it in the script itself, or run it in this process (no executor)"
        ) from error


class _Loader(Unpickler):
    """A reader of pickles that makes tensors and devices of the caller's kind on the call's device, if it has one."""

    def __init__(self, content: bytes, parts: Mapping[str, object], call: Call) -> None:
        super().__init__(content, parts)
        self._origin, self._device = call.origin, call.device

    def find_class(self, module: str, name: str) -> Any:
        """Return what makes tensors and devices."""
        made: dict[tuple[str, str], Callable[..., object]] = {
            # As torch.storage reads it: what a pickle of this project holds.
            ("torch.storage", "_load_from_bytes"): lambda content: torch.load(
                io.BytesIO(content), map_location=self._place, weights_only=False
            ),
            ("torch", "device"): lambda kind, *index: torch.device(
                *((kind, *index) if kind != self._origin else (str(self._device),))
            ),
            ("robust_ext.engine.isolation.messages", "_scripted"): lambda content: torch.jit.load(  # type: ignore[no-untyped-call]
                io.BytesIO(content), map_location=self._device
            ),
        }
        found = None if self._device is None else made.get((module, name))
        return super().find_class(module, name) if found is None else found

    def _place(self, storage: Any, location: str) -> Any:
        if location.split(":")[0] != self._origin:
            return None
        return torch.serialization.default_restore_location(storage, str(self._device))  # type: ignore[no-untyped-call]
