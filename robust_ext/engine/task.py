"""Tasks: what a worker is given and what it returns, and how a worker in this process runs one.

A worker has what an attacker has: the target, rows, labels, threat model, and the keys of a random stream of its
own. What its candidates are checked by stays behind, see :class:`Check`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import Attack
from robust_ext.attacks.limited import search_within
from robust_ext.attacks.running import exposed, guarding
from robust_ext.core.cost import Spent
from robust_ext.core.machine import keep_freed_memory, lap, trimmed
from robust_ext.core.random import RowGenerator, derive_seed, seeded_globals, stream
from robust_ext.core.target import PassCounter, Target, count_all_calls, count_calls
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.context import current_context
from robust_ext.engine.copies import Behaviours, copied_task
from robust_ext.engine.progress import Phases, phase, watching
from robust_ext.engine.recorder import record_queries
from robust_ext.engine.trace import Trace
from robust_ext.engine.verify import Verification, take_witnesses, unverified, verify
from robust_ext.models.forms import ambient_autocast

Key = int | str
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Task:
    """One call of an attack on some rows."""

    attack: Attack  # Whether it fits was checked before, see Attack.check
    target: Target  # What it may query
    inputs: Tensor  # float32 (n, ...)
    labels: Tensor  # int64 (n,): the goals of the target's criterion
    threat_model: ThreatModel  # What it is given
    stream: tuple[Key, ...]  # Seed and keys of the generator it draws from, see robust_ext.core.random.stream
    # Which rows of the stream's these are, so that each draws what it would among all; None for the first
    rows: Sequence[int] | None = None
    # Network, or networks by name, whose rows are counted meanwhile; None where the target counts its own
    counted: nn.Module | Mapping[str, nn.Module] | None = None
    # Of the global generators, for targets that draw from them; None: it follows from the stream
    global_seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """The results of a task."""

    candidates: object  # What the attack returned; not verified
    seconds: float
    passes: dict[str, int]  # Rows sent forward and backward
    # Queried points (n, ...) in the ball whose logits are not finite, NaN in rows without one; not verified
    witnesses: Tensor | None = None
    # What its queries showed; its own process's statement where it ran in one, and no part of any verdict
    trace: Trace | None = None
    # Where nothing came back: one of robust_ext.engine.verify.LOST, and why
    lost: tuple[str, str] | None = None


Worker = Callable[[Task], TaskResult]


@dataclass(frozen=True, kw_only=True)
class Check:
    """The verification of candidates; it stays in the process that made the task."""

    module: nn.Module  # The full target, in eval mode
    name: str  # Of the attack, for error texts
    # Which of the verified candidates (n, ...) a detector rejects, bool (n,)
    rejects: Callable[[Tensor], Tensor] | None = None
    # Whether witnesses of non-finite logits take the place of candidates that came to nothing
    witnessed: bool = True


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The outcome of an attempt at a task."""

    verified: Verification
    spent: dict[str, Spent]  # By {"attack", "verify"}
    witnesses: Tensor | None = None  # As in the task's result
    trace: Trace | None = None  # As in the task's result
    error: str | None = None  # Why nothing came back, where nothing did


def run_task(task: Task, *, behaviours: Behaviours | None = None) -> TaskResult:
    """Run a task in this process, the default worker; AttackError where the attack raised.

    With ``behaviours``, it runs on copies of the networks, whose behaviour is compared with that at first sight.
    """
    keep_freed_memory()
    seed, *keys = task.stream
    generator = stream(int(seed), *keys) if task.rows is None else RowGenerator.of(task.rows, int(seed), *keys)
    own, counter = task, task.target.counter
    with ExitStack() as stack:
        if behaviours is None:
            stack.enter_context(guarding(task.attack, task.target))
        else:
            behaviours.note(task)
            own, twins = copied_task(task)
            probe = partial(behaviours.changes, task, twins)
            stack.enter_context(guarding(task.attack, own.target, original=task.target, probe=probe))
        begun, before = time.perf_counter(), counter.snapshot()
        stack.enter_context(counter.until(current_context().deadline))
        # An attack may hold a network itself.
        for counted in (task,) if own is task else (task, own):
            stack.enter_context(_counting(counted, counter))
        # What draws from the global generators draws the same in every run, and leaves them as they were.
        seed = derive_seed(int(task.stream[0]), *task.stream[1:], "globals")
        stack.enter_context(seeded_globals(seed if task.global_seed is None else task.global_seed))
        kind = task.inputs.device.type
        if ambient_autocast(kind) is not None:
            # The model keeps it by itself; what an attack computes is the same in this process and in its own.
            stack.enter_context(torch.autocast(kind, enabled=False))
        recorder = stack.enter_context(record_queries(own.target, task.inputs, task.labels, task.threat_model))
        target = stack.enter_context(exposed(task.attack, own.target, generator))
        search = search_within(task.attack, task.threat_model)
        candidates = search(
            target,
            task.inputs.clone(),
            task.labels.clone(),
            threat_model=replace(task.threat_model),
            generator=generator,
        )
        seconds, spent = time.perf_counter() - begun, counter.since(before)
    passes = {"forward": spent.forward, "backward": spent.backward}
    return TaskResult(
        candidates=candidates,
        seconds=seconds,
        passes=passes,
        witnesses=recorder.witnesses.points,
        # Statistics are of steps and distances that all entries share.
        trace=recorder.trace(candidates) if task.threat_model.plain else None,
    )


def _counting(task: Task, counter: PassCounter) -> AbstractContextManager[None]:
    """Count rows while a task runs, or while its candidates are verified."""
    if task.counted is None:
        return nullcontext()
    if isinstance(task.counted, nn.Module):
        return count_calls(task.counted, counter)
    return count_all_calls(task.counted, counter)


# A protocol's work: it yields tasks, is sent what they came to, and returns what it makes of them.
Work = Generator[tuple[Task, Check], Attempt, T]


def verified(work: Work[T]) -> Generator[Task, TaskResult, T]:
    """The tasks of some work; what comes back is verified here before the work sees it."""
    try:
        task, check = next(work)
        while True:
            try:
                result = yield task
            except Exception as error:
                task, check = work.throw(error)
            else:
                task, check = work.send(_verify(task, check, result))
    except StopIteration as end:
        done: T = end.value
        return done
    finally:
        work.close()


def drive(tasks: Generator[Task, TaskResult, T], worker: Worker = run_task) -> T:
    """Run tasks one after another; an error of a worker is raised where its task was made."""
    here = worker is run_task
    worker = partial(run_task, behaviours=Behaviours()) if here else worker
    with trimmed():
        try:
            task = next(tasks)
            while True:
                lap()
                try:
                    with watching(task.target.counter, task.attack.name):
                        result = worker(task)
                    # The process of an attack has its own count.
                    lap(own=here)
                except BaseException as error:
                    task = tasks.throw(error)
                else:
                    task = tasks.send(result)
        except StopIteration as end:
            done: T = end.value
            return done


def _verify(task: Task, check: Check, result: TaskResult) -> Attempt:
    phases, error = Phases(task.target.counter), None
    phase(f"verification of {check.name}")
    with _counting(task, task.target.counter):
        if result.lost is None:
            found = _judge(task, check, result)
        else:
            outcome, error = result.lost
            found = unverified(outcome, task.inputs, module=check.module)
    phases.stop("verify")
    return Attempt(
        verified=found,
        spent={"attack": Spent(**result.passes, seconds=result.seconds), **phases.spent},
        witnesses=result.witnesses,
        trace=result.trace,
        error=error,
    )


def _judge(task: Task, check: Check, result: TaskResult) -> Verification:
    inputs, labels, model = task.inputs, task.labels, task.threat_model
    judge: dict[str, Any] = {"module": check.module, "threat_model": model, "attack": check.name}
    judge["criterion"] = task.target.criterion
    found = verify(result.candidates, inputs, labels, rejects=check.rejects, **judge)
    if result.witnesses is not None and check.witnessed:
        found = take_witnesses(found, result.witnesses, inputs, labels, **judge)
    return found
