"""The layer at fault: which module of a network, by name, stops, blurs, randomises or saturates the gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.random import seeded_globals, stream
from robust_ext.evaluations.causes.calls import Call, Place, copied
from robust_ext.evaluations.causes.cut_operations import Killed, PassTrace
from robust_ext.evaluations.causes.secants import Function, Secants, secants

# A saturated layer counts where the error of the whole network's gradient is above this, over that many directions.
_SUFFERS, _DIRECTIONS = 0.05, 6
_REPEATS = 4
_AGAIN, _ALONE = 1e-6, 1e-4


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """Measurements of a module, in its first call.

    Attributes:
        name: As in ``named_modules()``; empty for the model itself.
        kind: Name of its class.
        leaf: Whether it called no other module.
        gradient_norm: Mean over rows of the gradient's norm at its output, of the logit difference; None without one.
        passed_norm: Likewise at its input: what it passes on.
        small: Error of its gradient for small steps, see
            :class:`robust_ext.evaluations.causes.secants.Secants`; None where it was not measured.
        large: Likewise for larger steps.
        steepness: See there.
        fault: A code of :data:`robust_ext.evaluations.causes.finding.CODES`, or None.
    """

    name: str
    kind: str
    leaf: bool
    gradient_norm: float | None = None
    passed_norm: float | None = None
    small: float | None = None
    large: float | None = None
    steepness: float | None = None
    fault: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Fault:
    """A module whose gradient is no use.

    Attributes:
        code: Of :data:`robust_ext.evaluations.causes.finding.CODES`.
        call: Of the module.
        found: The measurements.
        operation: Which of its operations it is; empty where it is the whole.
    """

    code: str
    call: Call
    found: Secants
    operation: str = ""


def measure_gradients(
    module: nn.Module, inputs: Tensor, trace: PassTrace, *, random: bool, seed: int
) -> tuple[list[tuple[Call, Secants]], list[Fault]]:
    """Compare gradients and differences of a network and of its layers.

    Args:
        module: From inputs to logits.
        inputs: ``(N, ...)``.
        trace: Of the module with these inputs.
        random: Whether its outputs are; then each call gets the same draws.
        seed: Of directions and draws.

    Returns:
        What was measured of calls of leaves; and the faults, where no leaf is at fault that of the innermost module
        which is by operations of its own.
    """
    measure = partial(_measure, draws=random, seed=seed)
    found = []
    for call in first_calls(trace):
        if call.leaf and call.points and (one := measure(call.again, call.points)) is not None:
            found.append((call, one))
    faults = [Fault(one.fault, call, one) for call, one in found if one.fault]
    if faults and any(fault.code != "saturated_layer" for fault in faults):
        return found, faults
    inline = any(call.operations for call in trace.calls if not call.leaf)
    whole = None
    if faults or inline:
        whole = measure(lambda points: [module(points[0])], [inputs], directions=_DIRECTIONS)
    if whole is None or (not whole.silent and max(whole.small, whole.large) < _SUFFERS):
        # Softmax attention that decides, for one, is no fault where the network as a whole does not suffer.
        return found, []
    return found, faults or _inline(trace, measure, whole)


def _inline(trace: PassTrace, measure: Callable[..., Secants | None], whole: Secants) -> list[Fault]:
    """The innermost module at fault by what it computes besides calling others."""
    for call in first_calls(trace):
        if call.leaf or not call.operations:
            continue
        one = measure(call.again, call.points) if whole.fault else None
        # Far from a point a healthy network of some depth is another function: only a single operation saturates.
        if one is not None and one.fault not in (None, "saturated_layer"):
            return [Fault(one.fault, call, one)]
        for operation in call.inline:
            one = measure(operation.again, operation.points)
            # A detach may be harmless next to what is not detached; whether it is shows in the module as a whole.
            if one is not None and one.fault and not one.silent:
                return [Fault(one.fault, call, one, operation.name)]
    return []


def layer_reports(
    trace: PassTrace, found: Sequence[tuple[Call, Secants]], faults: Sequence[Fault]
) -> list[LayerReport]:
    """All modules that were called, in the order in which they returned."""
    measured, codes = {id(call): one for call, one in found}, {id(fault.call): fault.code for fault in faults}
    reports = []
    for call in first_calls(trace):
        one = measured.get(id(call))
        reports.append(
            LayerReport(
                name=call.name,
                kind=type(call.module).__name__,
                leaf=call.leaf,
                gradient_norm=None if call.gradient is None else float(call.gradient.mean()),
                passed_norm=None if call.passed is None else float(call.passed.mean()),
                small=None if one is None else one.small,
                large=None if one is None else one.large,
                steepness=None if one is None else one.steepness,
                fault=codes.get(id(call)),
            )
        )
    return reports


def first_calls(trace: PassTrace) -> Iterator[Call]:
    """The first call of each module, those inside a module before its own."""
    seen = set()
    for call in trace.calls:
        if id(call.module) not in seen:
            seen.add(id(call.module))
            yield call


def killer(trace: PassTrace, rows: Tensor, *, zero: bool) -> Killed | None:
    """Return the place where gradients of rows (bool ``(N,)``) became zero, or not finite.

    Zero: the place nearest to the input, as branches may die harmlessly before. Not finite: the one nearest to the
    output, as what follows is not finite because of it.
    """
    found = [one for one in trace.killed if one.zero == zero and bool((one.rows & rows).any())]
    return found[-1 if zero else 0] if found else None


def random_calls(trace: PassTrace) -> list[Call]:
    """Leaves that return something else for the same arguments; else the innermost module that does."""
    return _differing(trace, _repeats_differ)


def batch_calls(trace: PassTrace, rows: int) -> list[Call]:
    """Leaves that return something else for a row alone than among others; else the innermost module that does."""
    return _differing(trace, partial(_row_alone_differs, rows=rows))


def mode_calls(trace: PassTrace, seed: int) -> list[Call]:
    """Modules in train mode that return something else in eval mode, for the same draws."""
    found = []
    for call in first_calls(trace):
        if call.module.training and _runs(partial(_mode_matters, call, seed)):
            found.append(call)
    return found


def first_not_finite(trace: PassTrace) -> Call | None:
    """The first module that returned values that are not finite for finite arguments."""
    return next((call for call in trace.calls if call.finite == (True, False)), None)


def last_softmax(trace: PassTrace) -> Place | None:
    """Return the place of the last softmax or log-softmax."""
    for call in reversed(trace.calls):
        for operation in reversed(call.operations):
            if "softmax" in operation:
                return Place(call, operation)
    return None


def _measure(
    function: Function, points: Sequence[Tensor], *, draws: bool, seed: int, directions: int = 2
) -> Secants | None:
    """Secants of a function that draws the same at each call; None where it cannot be called in this way."""

    def repeated(given: Sequence[Tensor]) -> Sequence[Tensor]:
        fixed: AbstractContextManager[None] = seeded_globals(seed) if draws else nullcontext()
        with fixed:
            return function(given)

    try:
        if not points or not all(one.numel() for one in points):
            return None
        if draws and _apart(repeated(copied(list(points))), repeated(copied(list(points)))) > _AGAIN:
            return None
        return secants(repeated, points, generator=stream(seed, "secants"), directions=directions)
    except Exception:
        # Foreign code that runs in one way need not run in another.
        return None


def _differing(trace: PassTrace, differs: Callable[[Call], bool]) -> list[Call]:
    calls = list(first_calls(trace))
    leaves = [call for call in calls if call.leaf and _runs(partial(differs, call))]
    inner = (call for call in calls if not call.leaf and call.operations and _runs(partial(differs, call)))
    return leaves or [call for call in [next(inner, None)] if call is not None]


def _runs(check: Callable[[], bool]) -> bool:
    """The result of a check, False where foreign code raises in it."""
    try:
        with torch.no_grad():
            return check()
    except Exception:
        return False


def _repeats_differ(call: Call) -> bool:
    first = call.again()
    return any(_apart(first, call.again()) > _AGAIN for _ in range(_REPEATS))


def _row_alone_differs(call: Call, *, rows: int) -> bool:
    whole = call.again()
    if any(len(one) != rows for one in (*call.points, *whole) if one.dim()):
        return False
    alone = call.again([one[:1] for one in call.points])
    return _apart([one[:1] for one in whole], alone) > _ALONE


def _mode_matters(call: Call, seed: int) -> bool:
    try:
        with seeded_globals(seed):
            training = call.again()
        call.module.training = False
        with seeded_globals(seed):
            return _apart(training, call.again()) > _AGAIN
    finally:
        call.module.training = True


def _apart(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest value; infinite between other shapes."""
    found = 0.0
    for a, b in zip(one, other, strict=True):
        if a.shape != b.shape:
            return torch.inf
        if a.numel():
            scale = float(a.detach().abs().nan_to_num(0, 0, 0).max()) or 1.0
            found = max(found, float((a - b).detach().abs().nan_to_num(0, 0, 0).max()) / scale)
    return found
