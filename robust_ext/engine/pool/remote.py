"""What a worker does: one block of a run, planted, attacked and verified; it returns what the parent keeps."""

from __future__ import annotations

import os
import secrets
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from robust_ext.core.errors import InvalidArgumentError, ModelError, RobustExtError
from robust_ext.engine.context import RunContext, run_context
from robust_ext.engine.isolation.messages import describe_error
from robust_ext.engine.isolation.process import unreadable
from robust_ext.engine.isolation.worker import IsolatedWorker, isolating
from robust_ext.engine.phases import Speedometer
from robust_ext.engine.pool.packing import unpack
from robust_ext.engine.run import Run, timed
from robust_ext.engine.task import Worker, drive, run_task

# Parts of runs that a worker keeps: a run, and the networks of several.
_PARTS = 32
_MEMORY = secrets.token_hex(8)
_MADE: OrderedDict[tuple[str, str | None], Any] = OrderedDict()
# Hooks and global seeds are the process's: of threads that an executor has in it one works at a time.
_ONE = threading.Lock()


def own_process() -> tuple[str, int]:
    """This process: what is in its memory, which a fork shares, and its number."""
    return _MEMORY, os.getpid()


@dataclass(frozen=True, kw_only=True)
class Call:
    """One block, as plain values."""

    parts: tuple[str, ...]  # Digests of what the run is made of; the run itself last
    rows: tuple[int, int]
    needs: bytes  # What the block needs beside the run
    isolate: bool
    attack_timeout: float | None
    seconds: float | None  # Until the deadline
    origin: str  # Kind of device that the run lies on
    caller: tuple[str, int] = field(default_factory=own_process)
    device: str | None = None  # Where the worker is to run it; None for where it lies
    content: dict[str, bytes] = field(default_factory=dict)  # Of parts that the worker lacks


def run_block(call: Call) -> dict[str, Any]:
    """Records, timing and arrays of a block; the parts that are ``missing``; or an error, described."""
    missing = [digest for digest in call.parts if (digest, call.device) not in _MADE and digest not in call.content]
    if missing:
        return {"missing": missing}
    deadline = None if call.seconds is None else time.monotonic() + call.seconds
    try:
        _check_process(call)
        with _ONE, _attacking(call) as worker, run_context(RunContext(deadline=deadline)):
            (run, speed), needs = _received(call)
            with run.session():
                block = drive(timed(run.work(range(*call.rows), needs), speed), worker)
    except RobustExtError as error:
        return describe_error(error)
    except Exception:
        return {"raised": traceback.format_exc()}
    return {"records": block.records, "timing": block.timing, "arrays": block.arrays}


def _check_process(call: Call) -> None:
    memory, process = own_process()
    if call.caller == (memory, process):
        expected = "one whose workers are processes, as hooks and global seeds are those of a whole process"
        raise InvalidArgumentError("executor", "an executor that works in this process", expected)
    if call.caller[0] == memory:
        # A fork has the parent's OpenMP without its threads, and hangs where it would use several.
        torch.set_num_threads(1)


@contextmanager
def _attacking(call: Call) -> Iterator[Worker]:
    if not call.isolate:
        yield run_task
        return
    worker = _isolated(os.getpid(), call.attack_timeout)
    with isolating(worker):
        yield worker


@cache
def _isolated(_process: int, timeout: float | None) -> IsolatedWorker:
    """The worker of this process; attacks' processes are kept between blocks, and end with this one."""
    # For good: what they start may look on between blocks.
    unreadable().__enter__()
    return IsolatedWorker(timeout=timeout)


def _received(call: Call) -> tuple[tuple[Run, Speedometer], dict[str, Any]]:
    """The run, made once, with what times its network, and what the block needs."""
    where: dict[str, Any] = {"origin": call.origin, "device": call.device}
    found: dict[str, object] = {}
    try:
        for digest in call.parts:
            key = digest, call.device
            if key not in _MADE:
                made = unpack(call.content[digest], found, **where)
                _MADE[key] = (made, Speedometer(made.probe())) if isinstance(made, Run) else made
            found[digest] = _MADE[key]
            _MADE.move_to_end(key)
        while len(_MADE) > max(_PARTS, len(call.parts)):
            _MADE.popitem(last=False)
        return _MADE[call.parts[-1], call.device], unpack(call.needs, found, **where)
    except RobustExtError:
        raise
    except Exception as error:
        raise ModelError(
            f"what the run needs cannot be made on a worker ({type(error).__name__}: {error}); install there what is "
            "imported here, define it in the script itself, or run it in this process (no executor)"
        ) from error
