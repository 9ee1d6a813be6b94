"""Copies of the networks for attacks in this process, and how the networks behave before any attack."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from robust_ext.core.foreign import text_of
from robust_ext.core.target import Counted, PassCounter
from robust_ext.core.warning import warn
from robust_ext.detectors.base import Detector
from robust_ext.engine.behaviour import behaviour, compare_behaviour
from robust_ext.models.adaptive import AdaptiveDefense

if TYPE_CHECKING:
    from robust_ext.engine.task import Task

Twins = dict[int, Any]
"""Copies by the identity of their originals."""


class Behaviours:
    """How the networks of tasks behave on probe inputs when they are met first."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[nn.Module, dict[str, Any] | None]] = {}

    def note(self, task: Task) -> None:
        """Note those of a task that are new."""
        for network in _networks(task):
            if id(network) not in self._noted:
                first, again = (_behaviour(network, task) for _ in range(2))
                # One that draws from a generator of its own cannot be compared.
                self._noted[id(network)] = network, first if compare_behaviour(first, again) is None else None

    def changes(self, task: Task, twins: Twins) -> Iterator[str]:
        """How the networks of a task, or their copies, behave otherwise than was noted."""
        for network in _networks(task):
            _, noted = self._noted[id(network)]
            for one in dict.fromkeys((network, twins.get(id(network), network))):
                words = None if noted is None else compare_behaviour(noted, _behaviour(one, task))
                if words is not None:
                    yield f"{type(network).__name__} {words}"


_CURRENT: ContextVar[Behaviours | None] = ContextVar("robust_ext_behaviours", default=None)


@contextmanager
def copying() -> Iterator[None]:
    """Inside the block, attacks in this process get copies of the networks."""
    token = _CURRENT.set(Behaviours())
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_behaviours() -> Behaviours | None:
    """Those of the block; None where attacks get the networks that they are given."""
    return _CURRENT.get()


def copied_task(task: Task) -> tuple[Task, Twins]:
    """A task on copies of its networks, which count where these do; the attack itself is no copy."""
    target, twins = task.target, Twins()
    inside = {id(part) for root in _roots(task) for part in root.modules()}
    # Networks first and alone: where one of them cannot be copied, what is around it still can.
    for one in [*(network for network in _networks(task) if id(network) in inside), *_roots(task)]:
        twins = _with_copy(one, twins)
    module, defended = twins[id(target.module)], twins.get(id(target.defended))
    own: Mapping[str, nn.Module] | nn.Module | None
    own = {name: twins[id(one)] for name, one in _counted(task).items() if twins.get(id(one), one) is not one}
    if isinstance(task.counted, nn.Module):
        own = next(iter(own.values()), None)
    return replace(task, target=replace(target, module=module, defended=defended), counted=own or None), twins


def _with_copy(network: nn.Module, twins: Twins) -> Twins:
    """The copies with that of a network, or with the network itself where it cannot be copied."""
    held = (value for part in network.modules() for value in vars(part).values())
    known = {**twins, **{id(value): value for value in held if isinstance(value, PassCounter)}}
    more = dict(known)
    try:
        with torch.no_grad():
            # Some modules are copied as ones without what every module has.
            list(copy.deepcopy(network, more).named_modules())
    except Exception as error:  # A network may hold anything.
        warn(
            f"{type(network).__name__} cannot be copied ({type(error).__name__}: {text_of(error)}), so attacks run on "
            "the model itself, and what they change of its attributes may stay: let copy.deepcopy(model) work, or run "
            "attacks in processes of their own (isolate=True)"
        )
        return {**known, id(network): network}
    return more


def _roots(task: Task) -> list[nn.Module]:
    return [task.target.module, *([] if task.target.defended is None else [task.target.defended])]


def _counted(task: Task) -> Mapping[str, nn.Module]:
    counted = task.counted
    return counted if isinstance(counted, Mapping) else {} if counted is None else {"": counted}


def _networks(task: Task) -> list[nn.Module]:
    """The networks, detectors and defenses of a task, without what is planted around them."""
    parts = [part for root in _roots(task) for part in root.modules()]
    inner = [part.module for part in parts if isinstance(part, Counted)]
    inner += [part for part in parts if isinstance(part, (AdaptiveDefense, Detector))]
    return list(dict.fromkeys([*_counted(task).values(), *inner]))


def _behaviour(network: nn.Module, task: Task) -> dict[str, Any]:
    """How a network behaves; its rows are not counted."""
    counter = task.target.counter
    before = dict(vars(counter))
    counter.watch = counter.deadline = None
    try:
        return behaviour(network, task.inputs, task.threat_model.bounds)
    finally:
        vars(counter).update(before)
