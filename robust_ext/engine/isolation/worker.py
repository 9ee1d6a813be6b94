"""The worker that runs each attack in a process of its own."""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from robust_ext.attacks.base import Attack, AttackTraits
from robust_ext.core.criteria import Criterion
from robust_ext.core.errors import (
    AttackError,
    InvalidArgumentError,
    OutOfTimeError,
    RobustExtError,
    RunFolderError,
    printable,
    warn,
)
from robust_ext.core.target import PassCounter, Target
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_number
from robust_ext.engine.context import ISOLATING
from robust_ext.engine.isolation.messages import LONGEST, Packer, as_error
from robust_ext.engine.isolation.process import AttackProcess, LostError, start_server, stated, unreadable
from robust_ext.engine.task import Task, TaskResult
from robust_ext.engine.trace import Trace, no_values, plain_curve
from robust_ext.registry.attack import as_attack, attacks_from_text

logger = logging.getLogger(__name__)

CAN_ISOLATE = "forkserver" in multiprocessing.get_all_start_methods()
"""Whether this system can run attacks in processes of their own."""

# Attacks whose processes are kept at a time; an attack whose process is gone gets another.
_PROCESSES = 8
# Parts that are kept, so that the worker of a long-lived cluster does not keep every model that it has met.
_PARTS = 64
# Warnings of a task, and characters of each.
_WARNINGS, _CHARACTERS = 20, 2000
Call = Callable[[Callable[[], Any]], Any]


class IsolatedWorker:
    """Runs tasks in processes, one an attack; a worker as :func:`robust_ext.engine.task.drive` takes it."""

    def __init__(self, *, timeout: float | None) -> None:
        if timeout is not None:
            timeout = check_number("attack_timeout", timeout, minimum=0, open_minimum=True)
        self.timeout = timeout
        self._packer = _packer()
        # Attacks are kept, so that no other one gets the id of one that has a process.
        self._processes: dict[int, tuple[Attack, AttackProcess]] = {}

    def set_aside(self, objects: Sequence[object]) -> None:
        """Pickle what attacks are to get of a run, before the judge shows it anything; each may hold those before."""
        start_server()
        if len(self._packer.parts) > _PARTS:
            self._packer = _packer()
        for one in objects:
            self._packer.share(one)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Inside the block, objects count as they are now, not as an evaluation before has set them aside."""
        before, self._packer = self._packer, _packer()
        try:
            yield
        finally:
            self._packer = before

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
            result = process.request(task, self._packer, read=partial(_read, task), room=room, progress=count)
            if isinstance(result, RobustExtError):
                raise result
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
        count(**result.passes)
        return result

    def call(self, function: Callable[[], Any]) -> Any:
        """The plain value that a function returns in a process of its own, which then ends."""
        process = AttackProcess(timeout=self.timeout)
        try:
            found = process.request(function, _packer(), read=lambda header, _: header)
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
        for attack, _ in list(self._processes.values()):
            self.drop(attack)

    def _process(self, attack: Attack) -> AttackProcess:
        found = self._processes.pop(id(attack), None) or (attack, AttackProcess(timeout=self.timeout))
        if len(self._processes) >= _PROCESSES:
            self.drop(next(iter(self._processes.values()))[0])
        self._processes[id(attack)] = found
        return found[1]


def _packer() -> Packer:
    return Packer("the attack's process")


def _read(task: Task, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> TaskResult | RobustExtError:
    """A process's reply to a task: a result, or an error of the attack; an exception where it is neither."""
    if "error" in header:
        error = as_error(header)
        # Neither the time nor the run folder is for an attack's process to judge.
        about_run = isinstance(error, (OutOfTimeError, RunFolderError))
        return AttackError(f"{task.attack.name}: {error}") if about_run else error
    if "lost" in header:
        raise LostError("ended", str(header["lost"])[:LONGEST])
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


class RemoteAttack(Attack):
    """The judge's handle of an attack that it does not load; pickled, it becomes the attack itself."""

    def __init__(self, text: str, name: str, call: Call) -> None:
        described = call(partial(_describe, text, name))
        try:
            traits: dict[str, Any] = {
                key: tuple(one) if isinstance(one, list) else one for key, one in described["traits"].items()
            }
            # What the attack imports is looked for in its own process, see ``_refusal``.
            self.name, self.traits, self.text = name, AttackTraits(**{**traits, "packages": ()}), text
            self._described, self._call = str(described["description"])[:LONGEST], call
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidArgumentError("attack", text, f"an attack that states its traits ({error})") from error

    @property
    def description(self) -> str:
        """The attack's description."""
        return self._described

    def refusal(self, *, threat_model: ThreatModel, detector: bool = False) -> str | None:
        """Return the attack's refusal."""
        found = self._call(partial(_refusal, self.text, self.name, threat_model, detector))
        return None if found is None else str(found)[:LONGEST]

    def pursues(self, criterion: Criterion) -> bool:
        """Return whether the attack does; raises what it raises."""
        return self._call(partial(_pursues, self.text, self.name, criterion)) is True

    def search(
        self,
        target: Target,
        inputs: Tensor,
        labels: Tensor,
        *,
        threat_model: ThreatModel,
        generator: torch.Generator,
    ) -> Tensor:
        """Raise: it is run in its own process alone."""
        raise AttackError(f"{self.name}: is loaded in a process of its own, and cannot be run in this one")

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self.text, self.name)


def _load(text: str, name: str) -> Attack:
    return as_attack(text, name=name)


def _describe(text: str, name: str) -> dict[str, Any]:
    made = _load(text, name)
    return {"traits": vars(made.traits), "description": made.description}


def _pursues(text: str, name: str, criterion: Criterion) -> bool:
    return _load(text, name).pursues(criterion)


def _refusal(text: str, name: str, threat_model: ThreatModel, detector: bool) -> str | None:
    attack = _load(text, name)
    reason = attack.refusal(threat_model=threat_model, detector=detector)
    if reason is None:
        attack.check(threat_model=threat_model, detector=detector)
    return reason


@contextmanager
def isolating(worker: IsolatedWorker) -> Iterator[None]:
    """Inside the block, attacks that are named as code (``file.py:attack``) are loaded in their own process only."""
    token = ISOLATING.set(worker)
    try:
        with unreadable(), attacks_from_text(lambda text, name: RemoteAttack(text, name, worker.call)):
            yield
    finally:
        ISOLATING.reset(token)
