"""Functions called on the workers of the current pool; in this process where there is none."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from robust_ext.core.errors import RobustExtError
from robust_ext.core.heap import trimmed
from robust_ext.engine.isolation.messages import as_error, describe_error
from robust_ext.engine.pool.packing import pack, unpack
from robust_ext.engine.pool.pool import Job, current_pool

FunctionCall = tuple[Callable[..., Any], Mapping[str, Any]]
"""A function of a module, which returns plain values or arrays, and its keyword arguments."""


@dataclass(frozen=True, kw_only=True)
class _Call:
    packed: bytes
    origin: str  # Kind of device that tensors lie on
    device: str | None = None  # Where the worker is to run it; None for where they lie
    content: dict[str, bytes] = field(default_factory=dict)


def call_all(calls: Sequence[FunctionCall], *, place: torch.device) -> Iterator[tuple[int, Any]]:
    """The index of each call and what it returns, as they end; they begin in order, each in one process.

    ``place`` is where their tensors lie. RobustExtError: one of them raised it, or a worker ended.
    """
    pool = current_pool()
    if pool is None or len(calls) < 2:
        for number, (function, arguments) in enumerate(calls):
            with trimmed():
                value = function(**arguments)
            yield number, value
        return
    waiting, left = deque(enumerate(calls)), len(calls)
    while left:
        while waiting and pool.room > 0:
            number, (function, arguments) = waiting.popleft()
            call = _Call(packed=pack({"": function, **arguments}), origin=place.type)
            pool.submit(Job(function=_run, call=call, parts={}, place=number))
        for job in pool.wait(None):
            if job.reply is None:
                raise RobustExtError(f"executor: a worker ended ({job.lost}); see what it printed")
            if "error" in job.reply:
                raise as_error(job.reply)
            if "raised" in job.reply:
                raise RobustExtError(f"a worker raised\n{job.reply['raised']}")
            left -= 1
            yield job.place, job.reply["value"]


def _run(call: _Call) -> dict[str, Any]:
    try:
        arguments = unpack(call.packed, {}, origin=call.origin, device=call.device)
        function = arguments.pop("")
        with trimmed():
            return {"value": function(**arguments)}
    except RobustExtError as error:
        return describe_error(error)
    except Exception:
        return {"raised": traceback.format_exc()}
