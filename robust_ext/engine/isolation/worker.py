"""The worker that runs each attack in a process of its own."""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from robust_ext.attacks.base import Attack
from robust_ext.core.errors import AttackError, InvalidArgumentError, OutOfTimeError, RobustExtError, RunFolderError
from robust_ext.core.printable import printable
from robust_ext.core.target import PassCounter
from robust_ext.core.validation import check_number
from robust_ext.core.warning import warn
from robust_ext.engine.context import ISOLATED, SETTING_ASIDE
from robust_ext.engine.isolation.messages import Parts, as_error
from robust_ext.engine.isolation.process import AttackProcess, LostError, start_server, stated, unreadable
from robust_ext.engine.isolation.remote import RemoteAttack
from robust_ext.engine.task import Task, TaskResult
from robust_ext.engine.trace import Trace, no_values, plain_curve
from robust_ext.registry.attack import attacks_from_text

logger = logging.getLogger(__name__)

CAN_ISOLATE = "forkserver" in multiprocessing.get_all_start_methods()
"""Whether this system can run attacks in processes of their own."""

# Attacks whose processes are kept at a time; an attack whose process is gone gets another.
_PROCESSES = 8
# Warnings of a task, and characters of each.
_WARNINGS, _CHARACTERS = 20, 2000


class IsolatedWorker:
    """Runs tasks in processes, one an attack; a worker as :func:`robust_ext.engine.task.drive` takes it."""

    def __init__(self, *, timeout: float | None) -> None:
        if timeout is not None:
            timeout = check_number("attack_timeout", timeout, minimum=0, open_minimum=True)
        self.timeout = timeout
        self._parts = Parts()
        self._processes: OrderedDict[int, tuple[Attack, AttackProcess]] = OrderedDict()

    def set_aside(self, objects: Sequence[object]) -> None:
        """Pickle what attacks are to get of a run, before the judge shows it anything."""
        start_server()
        self._parts.add(objects)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Inside the block, objects count as they are now, not as an evaluation before has set them aside."""
        before, self._parts = self._parts, Parts()
        try:
            yield
        finally:
            self._parts = before

    def __call__(self, task: Task, *, earlier: PassCounter | None = None) -> TaskResult:
        """Run a task; errors of the attack are raised here, and a process that is lost costs these rows.

        One that was killed may have been killed by mistake: its task is run once more, in a new process, with the
        counts from ``earlier``, before the first.
        """
        counter, begun = task.target.counter, time.perf_counter()
        before = counter.snapshot() if earlier is None else earlier

        def count(forward: int, backward: int) -> None:
            # Progress bars look at the counter; what a process counts is its own statement.
            counter.count_backward(max(0, before.backward + backward - counter.backward))
            counter.count_forward(max(0, before.forward + forward - counter.forward))

        # Candidates and witnesses, of float64 at most, and the trace.
        room = 16 * task.inputs.numel() + 8 * no_values(len(task.inputs)).numel()
        try:
            process = self._process(task.attack)
            result = process.request(task, self._parts, read=partial(_read, task), room=room, progress=count)
            if isinstance(result, RobustExtError):
                raise result
            count(**result.passes)
        except LostError as lost:
            self.drop(task.attack)
            logger.info("%s: %s", task.attack.name, lost.text)
            if lost.killed and earlier is None:
                return self(task, earlier=before)
            spent, seconds = counter.since(before), time.perf_counter() - begun
            passes = {"forward": spent.forward, "backward": spent.backward}
            return TaskResult(candidates=None, seconds=seconds, passes=passes, lost=(lost.outcome, lost.text))
        except BaseException:
            # What the process sends besides is not to be taken for the next result.
            self.drop(task.attack)
            raise
        return result

    def call(self, function: Callable[[], Any]) -> Any:
        """The plain value that a function returns in a process of its own, which then ends."""
        process = AttackProcess(timeout=self.timeout)
        try:
            found = process.request(function, Parts(), read=lambda header, _: header)
        except LostError as lost:
            raise InvalidArgumentError("attack", lost.text, "code that defines an attack and returns") from lost
        finally:
            process.close()
        if "error" in found:
            raise as_error(found)
        return found.get("value")

    def drop(self, attack: Attack) -> None:
        """End the process of an attack."""
        found = self._processes.pop(id(attack), None)
        if found is not None:
            found[1].close()

    def close(self) -> None:
        """End all processes."""
        for one, _ in list(self._processes.values()):
            self.drop(one)

    def _process(self, attack: Attack) -> AttackProcess:
        if id(attack) not in self._processes:
            if len(self._processes) >= _PROCESSES:
                self.drop(next(iter(self._processes.values()))[0])
            # The attack is kept, so that no other gets its id.
            self._processes[id(attack)] = attack, AttackProcess(timeout=self.timeout)
        self._processes.move_to_end(id(attack))
        return self._processes[id(attack)][1]


def _read(task: Task, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> TaskResult | RobustExtError:
    """A process's reply to a task: a result, or an error of the attack; an exception where it is neither."""
    if "error" in header:
        error = as_error(header)
        # Neither the time nor the run folder is for an attack's process to judge.
        about_run = isinstance(error, (OutOfTimeError, RunFolderError))
        return AttackError(f"{task.attack.name}: {error}") if about_run else error
    if "lost" in header:
        raise LostError("ended", str(header["lost"])[:20_000])
    for name, tensor in tensors.items():
        expected = no_values(len(task.inputs)) if name == "trace" else task.inputs
        if tensor.shape != expected.shape:
            raise ValueError(f"{name} of shape {tuple(tensor.shape)}")
    forward, backward = (int(stated(rows)) for rows in header["passes"])
    curve = header["curve"]
    result = TaskResult(
        seconds=float(stated(header["seconds"])),
        passes={"forward": forward, "backward": backward},
        candidates=tensors["candidates"],
        witnesses=tensors.get("witnesses"),
        trace=None if curve is None else Trace(values=tensors["trace"].double(), curve=plain_curve(curve)),
    )
    for text in header["warnings"][:_WARNINGS]:
        warn(printable(str(text)[:_CHARACTERS]))
    return result


@contextmanager
def isolating(worker: IsolatedWorker) -> Iterator[None]:
    """Inside the block, attacks that are named as code (``file.py:attack``) are loaded in their own process only."""
    isolated, setting_aside = ISOLATED.set(True), SETTING_ASIDE.set(worker.set_aside)
    try:
        with unreadable(), attacks_from_text(lambda text, name: RemoteAttack(text, name, worker.call)):
            yield
    finally:
        SETTING_ASIDE.reset(setting_aside)
        ISOLATED.reset(isolated)
