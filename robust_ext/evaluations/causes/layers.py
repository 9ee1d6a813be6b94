"""The layer at fault: which module of a network, by name, stops, blurs, randomises or saturates the gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.random import seeded_globals, stream
from robust_ext.evaluations.causes.calls import Call, copied
from robust_ext.evaluations.causes.secants import Function, Secants, secants
from robust_ext.evaluations.causes.tracing import PassTrace

# A saturated layer counts where the error of the whole network's gradient is above this, over that many directions.
_SUFFERS, _DIRECTIONS = 0.05, 6
_REPEATS = 4
_AGAIN, _ALONE = 1e-6, 1e-4


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """Measurements of a module, in its first call; None where something was not measured.

    Attributes:
        name: As in ``named_modules()``; empty for the model itself.
        kind: Name of its class.
        leaf: Whether it called no other module.
        gradient_norm: Mean over rows of the norm of the logit difference's gradient at its output.
        passed_norm: Likewise at its input: what it passes on.
        small: See :class:`robust_ext.evaluations.causes.secants.Secants`, as for ``large`` and ``steepness``.
        large: See there.
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
    """A module, or one of its operations, whose measured gradient is useless."""

    code: str
    call: Call
    found: Secants
    operation: str = ""


def measure_gradients(
    module: nn.Module, inputs: Tensor, trace: PassTrace, *, random: bool, seed: int
) -> tuple[dict[Call, Secants], list[Fault]]:
    """Compare gradients and differences of a network and of its layers.

    Args:
        module: From inputs to logits.
        inputs: ``(N, ...)``.
        trace: Of the module with these inputs.
        random: Whether its outputs are; then each call gets the same draws.
        seed: Of directions and draws.

    Returns:
        Measurements of calls of leaves; and the faults, where no leaf is at fault that of the innermost module
        which is by operations of its own.
    """
    measure, found = partial(_measure, draws=random, seed=seed), dict[Call, Secants]()
    for call in trace.first_calls:
        if call.leaf and (one := measure(call.again, call.points)) is not None:
            found[call] = one
    faults = [Fault(one.fault, call, one) for call, one in found.items() if one.fault]
    if any(fault.code != "saturated_layer" for fault in faults):
        return found, faults
    whole = None
    if faults or any(call.operations for call in trace.calls if not call.leaf):
        whole = measure(lambda points: [module(points[0])], [inputs], directions=_DIRECTIONS)
    if whole is None or (not whole.silent and max(whole.small, whole.large) < _SUFFERS):
        # Softmax attention that decides, for one, is no fault where the network as a whole does not suffer.
        return found, []
    return found, faults or list(islice(_inline(trace, measure, whole), 1))


def _inline(trace: PassTrace, measure: Callable[..., Secants | None], whole: Secants) -> Iterator[Fault]:
    """Modules at fault by what they compute besides calling others, the innermost first."""
    for call in trace.first_calls:
        if call.leaf or not call.operations:
            continue
        one = measure(call.again, call.points) if whole.fault else None
        # Far from a point a healthy network of some depth is another function: only a single operation saturates.
        if one is not None and one.fault not in (None, "saturated_layer"):
            yield Fault(one.fault, call, one)
        for operation in call.inline:
            one = measure(operation.again, operation.points)
            # A detach may be harmless next to what is not detached; whether it is shows in the module as a whole.
            if one is not None and one.fault and not one.silent:
                yield Fault(one.fault, call, one, operation.name)


def _measure(
    function: Function, points: Sequence[Tensor], *, draws: bool, seed: int, directions: int = 2
) -> Secants | None:
    """Secants of a function that draws the same at each call; None where it cannot be called in this way."""

    def repeated(given: Sequence[Tensor]) -> Sequence[Tensor]:
        with seeded_globals(seed) if draws else nullcontext():
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


def layer_reports(trace: PassTrace, found: dict[Call, Secants], faults: Sequence[Fault]) -> tuple[LayerReport, ...]:
    """Return all modules that were called, in the order in which they returned."""
    codes = {fault.call: fault.code for fault in faults}

    def report(call: Call) -> LayerReport:
        one = found.get(call)
        return LayerReport(
            name=call.name,
            kind=type(call.module).__name__,
            leaf=call.leaf,
            gradient_norm=None if call.gradient is None else float(call.gradient.mean()),
            passed_norm=None if call.passed is None else float(call.passed.mean()),
            **({} if one is None else {"small": one.small, "large": one.large, "steepness": one.steepness}),
            fault=codes.get(call),
        )

    return tuple(map(report, trace.first_calls))


def random_calls(trace: PassTrace) -> list[Call]:
    """Return leaves that return something else for the same arguments; else the innermost module that does."""

    def differs(call: Call) -> bool:
        first = call.again()
        return any(_apart(first, call.again()) > _AGAIN for _ in range(_REPEATS))

    return _differing(trace, differs)


def batch_calls(trace: PassTrace, rows: int) -> list[Call]:
    """Return leaves that return something else for a row alone; else the innermost module that does."""

    def differs(call: Call) -> bool:
        whole = call.again()
        if any(len(one) != rows for one in (*call.points, *whole) if one.dim()):
            return False
        return _apart([one[:1] for one in whole], call.again([one[:1] for one in call.points])) > _ALONE

    return _differing(trace, differs)


def mode_calls(trace: PassTrace, seed: int) -> list[Call]:
    """Return modules in train mode that return something else in eval mode, for the same draws."""

    def differs(call: Call) -> bool:
        try:
            with seeded_globals(seed):
                training = call.again()
            call.module.training = False
            with seeded_globals(seed):
                return _apart(training, call.again()) > _AGAIN
        finally:
            call.module.training = True

    return [call for call in trace.first_calls if call.module.training and _holds(differs, call)]


def _differing(trace: PassTrace, differs: Callable[[Call], bool]) -> list[Call]:
    calls = trace.first_calls
    leaves = [call for call in calls if call.leaf and _holds(differs, call)]
    inner = (call for call in calls if not call.leaf and call.operations and _holds(differs, call))
    return leaves or list(islice(inner, 1))


def _holds(check: Callable[[Call], bool], call: Call) -> bool:
    """Return the result of a check, False where foreign code raises in it."""
    try:
        with torch.no_grad():
            return check(call)
    except Exception:
        return False


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
