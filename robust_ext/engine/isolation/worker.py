"""The worker that runs each attack in a process of its own."""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from robust_ext.attacks.base import Attack
from robust_ext.core.errors import InvalidArgumentError, RobustExtError
from robust_ext.core.printable import printable
from robust_ext.core.target import PassCounter
from robust_ext.core.validation import check_integer, check_number
from robust_ext.core.warning import warn
from robust_ext.engine.context import ISOLATED
from robust_ext.engine.isolation.forking import zygote
from robust_ext.engine.isolation.messages import as_error, describe_tensor, receive_tensor
from robust_ext.engine.isolation.process import AttackProcess, LostError, unreadable
from robust_ext.engine.isolation.remote import RemoteAttack
from robust_ext.engine.task import Task, TaskResult
from robust_ext.engine.trace import Trace, no_values, plain_curve
from robust_ext.registry.attack import attacks_from_text

logger = logging.getLogger(__name__)

CAN_ISOLATE = hasattr(os, "fork")
"""Whether this system can run attacks in processes of their own."""

# Attacks whose processes are kept at a time; an attack whose process is gone gets another.
_PROCESSES = 8


class IsolatedWorker:
    """Runs tasks in processes, one an attack; a worker as :func:`robust_ext.engine.task.drive` takes it."""

    def __init__(self, *, timeout: float | None) -> None:
        if timeout is not None:
            timeout = check_number("attack_timeout", timeout, minimum=0, open_minimum=True)
        self.timeout = timeout
        self._processes: OrderedDict[int, tuple[Attack, AttackProcess]] = OrderedDict()

    def __call__(self, task: Task) -> TaskResult:
        """Run a task; errors of the attack are raised here, and a process that is lost costs these rows.

        One that was killed may have been killed by mistake: its task is run once more, in a new process.
        """
        begun, before = time.perf_counter(), task.target.counter.snapshot()
        try:
            try:
                return self._run(task, before)
            except LostError as lost:
                self.drop(task.attack)
                if not lost.killed:
                    raise
                logger.info("%s: %s; it is run once more", task.attack.name, lost.text)
                return self._run(task, before)
        except RobustExtError:
            # What it has sent besides is not to be taken for the next result.
            self.drop(task.attack)
            raise
        except LostError as lost:
            self.drop(task.attack)
            logger.info("%s: %s", task.attack.name, lost.text)
            spent = task.target.counter.since(before)
            passes = {"forward": spent.forward, "backward": spent.backward}
            seconds = time.perf_counter() - begun
            return TaskResult(candidates=None, seconds=seconds, passes=passes, lost=(lost.outcome, lost.text))

    def _run(self, task: Task, before: PassCounter) -> TaskResult:
        counter = task.target.counter

        def count(forward: int, backward: int) -> None:
            # Progress bars look at the counter; what a process counts is its own statement.
            counter.count_backward(max(0, before.backward + backward - counter.backward))
            counter.count_forward(max(0, before.forward + forward - counter.forward))

        process = self._process(task.attack)
        for shared in (*task.shared, task.attack):
            process.share(shared)
        found = process.request(task, task=True, progress=count)
        with process.receiving(waiting=False) as connection:
            result = _received(found, connection, task)
        if isinstance(result, RobustExtError):
            raise result
        count(**result.passes)
        return result

    def call(self, function: Callable[[], Any]) -> Any:
        """The plain value that a function returns in a process of its own, which then ends."""
        try:
            try:
                found = self._called(function)
            except LostError as lost:
                if not lost.killed:
                    raise
                found = self._called(function)
        except LostError as lost:
            raise InvalidArgumentError("attack", lost.text, "code that defines an attack and returns") from lost
        if "error" in found:
            raise as_error(found)
        return found.get("value")

    def _called(self, function: Callable[[], Any]) -> dict[str, Any]:
        process = AttackProcess(timeout=self.timeout)
        try:
            return process.request(function)
        finally:
            process.close(patience=0.0)

    def drop(self, attack: Attack) -> None:
        """End the process of an attack."""
        found = self._processes.pop(id(attack), None)
        if found is not None:
            found[1].close(patience=0.0)

    def close(self) -> None:
        """End all processes."""
        for attack, _ in list(self._processes.values()):
            self.drop(attack)

    def _process(self, attack: Attack) -> AttackProcess:
        if id(attack) not in self._processes:
            if len(self._processes) >= _PROCESSES:
                self.drop(next(iter(self._processes.values()))[0])
            # The attack is kept, so that no other gets its id.
            self._processes[id(attack)] = attack, AttackProcess(timeout=self.timeout)
        self._processes.move_to_end(id(attack))
        return self._processes[id(attack)][1]


def _received(found: Mapping[str, Any], connection: Connection, task: Task) -> TaskResult | RobustExtError:
    """What a process sent back: a result, whose tensors follow the header, or an error of the attack."""
    if "error" in found:
        return as_error(found)
    if "lost" in found:
        raise LostError("ended", str(found["lost"]))
    expected: dict[str, Any] = {"expected": tuple(task.inputs.shape), "attack": task.attack.name}
    for text in found.get("warnings", ()):
        warn(printable(str(text)))
    met, curve = found.get("witnesses"), found.get("curve")
    return TaskResult(
        seconds=check_number("seconds", found["seconds"], minimum=0),
        passes={way: check_integer(way, found["passes"][way], minimum=0) for way in ("forward", "backward")},
        candidates=receive_tensor(connection, found["candidates"], **expected),
        witnesses=None if met is None else receive_tensor(connection, met, **expected),
        trace=None if curve is None else _received_trace(curve, connection, task),
    )


def _received_trace(curve: object, connection: Connection, task: Task) -> Trace:
    """What the process states of the attack's queries; ValueError where that is no trace."""
    values = no_values(len(task.inputs))
    described = describe_tensor(values)
    values = receive_tensor(connection, described, expected=described["shape"], attack=task.attack.name)
    return Trace(values=values, curve=plain_curve(curve))


@contextmanager
def isolating(worker: IsolatedWorker) -> Iterator[None]:
    """Inside the block, attacks that are named as code (``file.py:attack``) are loaded in their own process only."""
    isolated = ISOLATED.set(True)
    zygote().prepare()
    try:
        with unreadable(), attacks_from_text(lambda text, name: RemoteAttack.load(text, name, worker.call)):
            yield
    finally:
        ISOLATED.reset(isolated)
