"""Copies of networks for attacks in this process, their behaviour on probe inputs, and its differences."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from robust_ext.core.errors import warn
from robust_ext.core.foreign import text_of
from robust_ext.core.guard import frozen
from robust_ext.core.random import derive_seed, seeded_globals, stream
from robust_ext.core.target import Counted, PassCounter
from robust_ext.detectors.base import Detector
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.eot import EoT

if TYPE_CHECKING:
    from robust_ext.engine.task import Task


PROBES = 4
# What outputs may differ by, relative to the largest: float32, other numbers of threads; on another kind of device,
# whose convolutions may round to ten bits.
TOLERANCE, TOLERANCE_ELSEWHERE = 1e-3, 5e-3
# Of more outputs than this, that many sums with random signs are kept.
_KEPT = 16


def behaviour(module: nn.Module, inputs: Tensor, bounds: tuple[float, float]) -> dict[str, Any]:
    """Return a module's outputs for probe inputs as plain values; restores the module.

    Args:
        module: From inputs ``(N, ...)`` to one or several numbers each; it may draw from the global generators.
        inputs: Of the probes' shape and device.
        bounds: Lowest and highest value of inputs.
    """
    low, high = bounds
    # Whole groups of what a defense treats together.
    group = max((part.group_size or 1 for part in module.modules() if isinstance(part, AdaptiveDefense)), default=1)
    rows = group * math.ceil(PROBES / group)
    drawn = [torch.rand(inputs.shape[1:], generator=stream(0, number, "probe")) for number in range(rows)]
    probes = (low + (high - low) * torch.stack(drawn)).to(inputs)
    # Seeded draws count batches: those before are not a change of behaviour.
    drawing = [part for part in module.modules() if isinstance(part, (AdaptiveDefense, EoT))]
    with ExitStack() as stack:
        stack.enter_context(frozen(module, attributes=True))
        for part in drawing:
            if part.seed is not None:
                stack.enter_context(part.seeded(part.seed))
        stack.enter_context(torch.no_grad())
        stack.enter_context(seeded_globals(derive_seed(0, "behaviour")))
        before = _draws(probes)
        try:
            values = _kept(module(probes))
        except Exception as error:  # A network may be made for no such inputs at all; then it always raises.
            return {"raised": type(error).__name__}
        return {"device": inputs.device.type, "random": not torch.equal(before, _draws(probes)), "values": values}


def compare_behaviour(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describe how a module's outputs differ from earlier ones; None where they agree."""
    if "raised" in earlier or "raised" in now:
        words = [f"raised {one['raised']}" if "raised" in one else "returned numbers" for one in (earlier, now)]
        return f"{words[1]} on probe inputs, and {words[0]} before" if len(set(words)) > 1 else None
    elsewhere = earlier["device"] != now["device"]
    if elsewhere and earlier["random"] and now["random"]:
        return None  # Another device draws other numbers.
    if np.shape(earlier["values"]) != np.shape(now["values"]):
        return "returns another number of values"
    a, b = (np.array(one["values"], dtype=np.float64) for one in (earlier, now))
    scale = np.nanmax(np.abs(a), initial=np.nanmax(np.abs(b), initial=0.0))
    tolerance = TOLERANCE_ELSEWHERE if elsewhere else TOLERANCE
    differ = ~((np.abs(a - b) <= tolerance * scale) | (np.isnan(a) & np.isnan(b))).all(1)
    if not differ.any():
        return None
    largest = np.nanmax(np.abs(a - b), initial=0.0)
    shown = f"largest difference {largest:.2g}" if largest else "other values are not finite"
    probes = f"{differ.sum()} of {len(differ)} probe inputs"
    return f"behaves differently on {probes} ({shown})"


def _draws(probes: Tensor) -> Tensor:
    """Return the states of torch's global generators."""
    states = [torch.cuda.get_rng_state(probes.device)] if probes.device.type == "cuda" else []
    return torch.cat([torch.get_rng_state(), *states])


def _kept(out: Tensor) -> list[list[float | None]]:
    values = out.detach()[:PROBES].reshape(PROBES, -1).double().cpu()
    if values.shape[1] > _KEPT:
        signs = torch.randint(2, (values.shape[1], _KEPT), generator=stream(0, "behaviour signs")) * 2.0 - 1
        values = values @ signs.double() / math.sqrt(len(signs))
    return [[float(f"{value:.8g}") if math.isfinite(value) else None for value in row] for row in values.tolist()]


_CODE, _BEHAVIOUR = "_code", "_behaviour"
# What digests are of.
_WORDS = {
    "model": "other weights, buffers or attributes",
    "defense": "other weights, buffers or attributes",
    "detector": "another detector",
    "detector_digest": "other weights, threshold or attributes",
    "surrogates": "other networks",
    "inputs": "other samples",
    "labels": "other labels",
    "goals": "other targets",
}


def differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Everything in which what identifies a run differs from an earlier one; empty where they are the same run.

    Digests of code (keys that end in ``_code``) are compared file by file, what networks return for probe inputs
    (``_behaviour``) up to a tolerance.
    """
    found: list[str] = []
    for key in {**earlier, **now}:
        before, after = earlier.get(key), now.get(key)
        if before == after:
            continue
        kind = _CODE if key.endswith(_CODE) else _BEHAVIOUR if key.endswith(_BEHAVIOUR) else ""
        what = key.removesuffix(kind).replace("_", " ") if kind else key
        if kind and (not isinstance(before, Mapping) or not isinstance(after, Mapping)):
            kept = "begun by a version that did not keep it" if before is None else f"{_short(before)} there"
            found.append(f"{what} {kind[1:]}: {kept}")
        elif kind == _CODE:
            found += _code(what, before or {}, after or {})
        elif kind == _BEHAVIOUR:
            found += _behaviour_differences(what, before or {}, after or {})
        elif key == "streams":
            found.append("streams: begun by a version that draws other points from the same seed")
        else:
            known = key in _WORDS and before and after
            found.append(f"{key}: {_WORDS[key] if known else f'{_short(before)} there, {_short(after)} now'}")
    return found


def _code(what: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    nested = [name for name in {**before, **after} if isinstance(before.get(name, after.get(name)), Mapping)]
    if nested:
        return [text for name in nested for text in _code(f"{what} {name}", before.get(name, {}), after.get(name, {}))]
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    # What code holds follows from its files, where these differ; else by name, where it has one.
    files = [name for name in names if name.endswith(".py")]
    shown = files or [name for name in names if name not in ("values", "compiled code")] or names
    fates = [" is new" if name not in before else " is gone" if name not in after else "" for name in shown]
    listed = [name + fate for name, fate in zip(shown, fates, strict=True)]
    more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
    return [f"{what} code: changed ({', '.join(listed[:4])}{more})"] if listed else []


def _behaviour_differences(what: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    if not {"values", "raised"} & {*before, *after}:
        parts = [(name, before.get(name), after.get(name)) for name in {**before, **after}]
        return [
            text for name, a, b in parts for text in (_behaviour_differences(f"{what} {name}", a, b) if a and b else ())
        ]
    words = compare_behaviour(before, after)
    return [] if words is None else [f"{what}: {words}"]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


Twins = dict[int, Any]
"""Copies by the identity of their originals."""


class Behaviours:
    """The behaviour of tasks' networks on probe inputs at first sight."""

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
        """Return the changes in behaviour of a task's networks, or of their copies."""
        for network in _networks(task):
            _, noted = self._noted[id(network)]
            for one in dict.fromkeys((network, twins.get(id(network), network))):
                words = None if noted is None else compare_behaviour(noted, _behaviour(one, task))
                if words is not None:
                    yield f"{type(network).__name__} {words}"


def copied_task(task: Task) -> tuple[Task, Twins]:
    """A task on copies of its networks, which count where these do; the attack itself is no copy."""
    roots, twins, memos = _roots(task), Twins(), list[Twins]()
    inside = {id(part) for root in roots for part in root.modules()}
    # Networks first and alone: where one of them cannot be copied, what is around it still can.
    for one in [*(network for network in _networks(task) if id(network) in inside), *roots]:
        # What counts is shared, and so are networks without a copy.
        held = (value for part in one.modules() for value in vars(part).values() if isinstance(value, PassCounter))
        twins |= {id(value): value for value in held}
        # A memo has an entry of its own, by its id, which nothing else may get while that is there.
        memos.append(copied := dict(twins))
        try:
            with torch.no_grad():
                # Some modules are copied as ones without what every module has.
                list(copy.deepcopy(one, copied).named_modules())
        except Exception as error:  # A network may hold anything.
            twins[id(one)] = one
            warn(
                f"{type(one).__name__} cannot be copied ({type(error).__name__}: {text_of(error)}), so attacks run on "
                "the model itself, and what they change of its attributes may stay: let copy.deepcopy(model) work, or "
                "run attacks in processes of their own (isolate=True)"
            )
        else:
            twins = copied
    target = replace(
        task.target, **dict(zip(("module", "defended"), (twins[id(root)] for root in roots), strict=False))
    )
    own = {name: twins[id(one)] for name, one in _counted(task).items() if twins.get(id(one), one) is not one}
    counted = own if isinstance(task.counted, Mapping) else own.get("")
    return replace(task, target=target, counted=counted or None), twins


def _roots(task: Task) -> list[nn.Module]:
    return [task.target.module, *([] if task.target.defended is None else [task.target.defended])]


def _counted(task: Task) -> Mapping[str, nn.Module]:
    counted = task.counted
    return counted if isinstance(counted, Mapping) else {} if counted is None else {"": counted}


def _networks(task: Task) -> list[nn.Module]:
    """The networks, detectors and defenses of a task, without the planted points around them."""
    parts = [part for root in _roots(task) for part in root.modules()]
    inner = [part.module for part in parts if isinstance(part, Counted)]
    inner += [part for part in parts if isinstance(part, (AdaptiveDefense, Detector))]
    return list(dict.fromkeys([*_counted(task).values(), *inner]))


def _behaviour(network: nn.Module, task: Task) -> dict[str, Any]:
    """Return a network's behaviour; its rows are not counted."""
    counter = task.target.counter
    before = dict(vars(counter))
    counter.watch = counter.deadline = None
    try:
        return behaviour(network, task.inputs, task.threat_model.bounds)
    finally:
        vars(counter).update(before)
