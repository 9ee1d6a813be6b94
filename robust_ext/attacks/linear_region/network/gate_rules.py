"""How functions of one variable, or of two that are compared, become gates with the choices they make now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.network.affine import AffineMap
from robust_ext.attacks.linear_region.network.affine_rules import affine_call
from robust_ext.attacks.linear_region.network.calls import Call
from robust_ext.attacks.linear_region.network.gates import Comparison, Constant, PiecewiseActivation
from robust_ext.attacks.linear_region.network.tape import Tape

# Breakpoints, slopes and intercepts.
Pieces = tuple[Sequence[Constant], Sequence[Constant], Sequence[Constant]]
_RELU: Pieces = (0,), (0, 1), (0, 0)
_STEP: Pieces = (0,), (0, 0), (0, 1)


def _gate(
    tape: Tape, name: str, x: Tensor, pieces: Pieces, kind: type[PiecewiseActivation] = PiecewiseActivation
) -> PiecewiseActivation:
    entry = (1, *x.shape[1:])
    for value in (one for constants in pieces for one in constants):
        if isinstance(value, Tensor) and torch.broadcast_shapes(value.shape, entry) != entry:  # type: ignore[no-untyped-call]
            raise tape.refusal("a constant has a value for each row of the batch, or more values than its input")
    breakpoints, slopes, intercepts = (
        tuple(one.detach() if isinstance(one, Tensor) else float(one) for one in constants) for constants in pieces
    )
    x = x.detach()
    active, values = tuple(x > point for point in breakpoints), x.numel() // tape.rows
    last = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return kind(name, breakpoints, slopes, intercepts, active, tape.rows, values, x.dtype, last)


def _elementwise(pieces_of: Callable[[Tape, Call], Pieces]) -> Callable[[Tape, Call], Any]:
    """The rule of a function of one variable, from a function that returns its pieces."""

    def rule(tape: Tape, call: Call) -> Tensor:
        x = call.input
        return tape.record(call, _gate(tape, call.name, x, pieces_of(tape, call)), x)

    return rule


def _leaky(slope: Constant) -> Pieces:
    return (0,), (slope, 1), (0, 0)


def _rrelu(tape: Tape, call: Call) -> Pieces:
    if call.get(3, "training", False):
        raise tape.refusal("it is in train mode; call eval() on the network")
    return _leaky((call.get(1, "lower", 1 / 8) + call.get(2, "upper", 1 / 3)) / 2)


def _prelu(tape: Tape, call: Call) -> Pieces:
    weight = call.get(1, "weight")
    if tape.depends(weight):
        raise tape.refusal("its weight depends on the input")
    slope = weight.detach()
    return _leaky(slope.view(-1, *(1,) * (call.input.dim() - 2)) if slope.numel() > 1 else slope)


def _clamped(tape: Tape, low: Any, high: Any) -> Pieces:
    if low is None:
        return (high,), (1, 0), (0, high)
    if high is None:
        return (low,), (0, 1), (low, 0)
    if bool((torch.as_tensor(low) > torch.as_tensor(high)).any()):
        raise tape.refusal("its lower limit is above its upper limit")
    return (low, high), (0, 1, 0), (low, 0, high)


def _softshrink(tape: Tape, call: Call) -> Pieces:
    width = call.get(1, "lambd", 0.5)
    return (-width, width), (1, 0, 1), (width, 0, -width)


def _hardshrink(tape: Tape, call: Call) -> Pieces:
    width = call.get(1, "lambd", 0.5)
    return (-width, width), (1, 0, 1), (0, 0, 0)


def larger(tape: Tape, call: Call) -> Tensor:
    """The larger or smaller of two: ``b + relu(a - b)`` or ``a - relu(a - b)``."""
    first, second = call.input, call.get(1, "other")
    largest = call.name.startswith("max")
    if not tape.depends(second) or not tape.depends(first):
        entry, limit = (first, second) if tape.depends(first) else (second, first)
        if limit.dim() < entry.dim() or limit.shape[0] == 1:
            pieces: Pieces = ((limit,), (0, 1), (limit, 0)) if largest else ((limit,), (1, 0), (0, limit))
            return tape.record(call, _gate(tape, call.name, entry, pieces), entry)
    difference = affine_call(tape, Call("sub", torch.sub, (first, second), {}))
    gate = _gate(tape, call.name, difference, _RELU)
    positive = tape.bind(difference.relu(), tape.emit(gate, tape.affine(difference)))
    joined = (torch.add, (second, positive)) if largest else (torch.sub, (first, positive))
    combined = affine_call(tape, Call(call.name, *joined, {}))
    return tape.bind(call.run(), tape.number(combined))


def compare(tape: Tape, call: Call) -> Tensor:
    """Which of two values is larger: chosen by the sign of their difference."""
    first, second = call.input, call.get(1, "other")
    turned, negated = call.name in ("lt", "less", "ge", "greater_equal"), call.name in _OR_EQUAL
    pair = (second, first) if turned else (first, second)
    difference = affine_call(tape, Call(call.name, _difference, pair, {}))
    gate = _gate(tape, call.name, difference, _STEP, Comparison)
    number = tape.emit(gate, tape.affine(difference), chosen=True)
    out: Tensor = call.run()
    if not torch.equal(gate.active[0] ^ negated, out):
        raise tape.refusal("it compares values whose difference is not finite")
    return tape.bind(out, tape.emit(AffineMap(torch.logical_not), number, chosen=True) if negated else number)


def _difference(first: Any, second: Any) -> Tensor:
    out: Tensor = first - second
    return out


def _limited(tape: Tape, call: Call) -> Tensor:
    """Values between limits, which may depend on the input."""
    low, high = call.get(1, "min"), call.get(2, "max")
    if not tape.depends(low) and not tape.depends(high):
        return tape.record(call, _gate(tape, call.name, call.input, _clamped(tape, low, high)), call.input)
    out, before = call.input, call.input.clone()
    tape.bind(before, tape.number(out))
    for limit, function in ((low, torch.maximum), (high, torch.minimum)):
        if limit is not None:
            limit = limit if isinstance(limit, Tensor) else torch.as_tensor(limit, dtype=out.dtype, device=out.device)
            before = larger(tape, Call(function.__name__, function, (before, limit), {}))
    return tape.bind(call.run(), tape.number(before))


RULES: dict[str, Callable[[Tape, Call], Any]] = {
    name: _elementwise(pieces_of)
    for name, pieces_of in {
        "relu": lambda tape, call: _RELU,
        "abs": lambda tape, call: ((0,), (-1, 1), (0, 0)),
        "absolute": lambda tape, call: ((0,), (-1, 1), (0, 0)),
        "leaky_relu": lambda tape, call: _leaky(call.get(1, "negative_slope", 0.01)),
        "rrelu": _rrelu,
        "prelu": _prelu,
        "clamp_min": lambda tape, call: _clamped(tape, call.get(1, "min"), None),
        "clamp_max": lambda tape, call: _clamped(tape, None, call.get(1, "max")),
        "hardtanh": lambda tape, call: _clamped(tape, call.get(1, "min_val", -1.0), call.get(2, "max_val", 1.0)),
        "relu6": lambda tape, call: _clamped(tape, 0.0, 6.0),
        "hardsigmoid": lambda tape, call: ((-3, 3), (0, 1 / 6, 0), (0, 0.5, 1)),
        "softshrink": _softshrink,
        "hardshrink": _hardshrink,
        "threshold": lambda tape, call: ((call.get(1, "threshold"),), (0, 1), (call.get(2, "value"), 0)),
    }.items()
}
_COMPARISONS = ("gt", "greater", "lt", "less")
_OR_EQUAL = ("ge", "greater_equal", "le", "less_equal")
RULES |= {"maximum": larger, "minimum": larger, "clamp": _limited, "clip": _limited}
RULES |= dict.fromkeys((*_COMPARISONS, *_OR_EQUAL), compare)
