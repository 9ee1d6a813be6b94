"""How functions of one variable, or of two that are compared, become gates with the choices they make now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.calls import Call
from robust_ext.attacks.linear_region.operations import Sum
from robust_ext.attacks.linear_region.pieces import Constant, Pieces

if TYPE_CHECKING:
    from robust_ext.attacks.linear_region.recording import Recorder


def _pieces(
    recorder: Recorder,
    name: str,
    x: Tensor,
    breaks: Sequence[Constant],
    slopes: Sequence[Constant],
    intercepts: Sequence[Constant],
) -> Pieces:
    constants = [
        value.detach() if isinstance(value, Tensor) else float(value) for value in (*breaks, *slopes, *intercepts)
    ]
    entry = (1, *x.shape[1:])
    for value in constants:
        if isinstance(value, Tensor) and torch.broadcast_shapes(value.shape, entry) != entry:  # type: ignore[no-untyped-call]
            raise recorder.refusal("a constant has a value for each row of the batch, or more values than its input")
    x = x.detach()
    return Pieces(
        name,
        breaks=tuple(constants[: len(breaks)]),
        slopes=tuple(constants[len(breaks) : len(breaks) + len(slopes)]),
        intercepts=tuple(constants[len(breaks) + len(slopes) :]),
        sides=tuple(x > point for point in constants[: len(breaks)]),
        rows=recorder.rows,
        values=x.numel() // recorder.rows,
        dtype=x.dtype,
        last=x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last),
    )


def _elementwise(
    recorder: Recorder,
    call: Call,
    breaks: Sequence[Constant],
    slopes: Sequence[Constant],
    intercepts: Sequence[Constant],
) -> Tensor:
    x = call.input
    step = recorder.emit(_pieces(recorder, call.name, x, breaks, slopes, intercepts), recorder.number(x))
    return recorder.bind(call.run(), step)


def _relu(recorder: Recorder, call: Call) -> Tensor:
    return _elementwise(recorder, call, (0,), (0, 1), (0, 0))


def _abs(recorder: Recorder, call: Call) -> Tensor:
    return _elementwise(recorder, call, (0,), (-1, 1), (0, 0))


def _leaky_relu(recorder: Recorder, call: Call) -> Tensor:
    return _elementwise(recorder, call, (0,), (call.get(1, "negative_slope", 0.01), 1), (0, 0))


def _rrelu(recorder: Recorder, call: Call) -> Tensor:
    if call.get(3, "training", False):
        raise recorder.refusal("it is in train mode; call eval() on the network")
    slope = (call.get(1, "lower", 1 / 8) + call.get(2, "upper", 1 / 3)) / 2
    return _elementwise(recorder, call, (0,), (slope, 1), (0, 0))


def _prelu(recorder: Recorder, call: Call) -> Tensor:
    x, weight = call.input, call.get(1, "weight")
    if recorder.depends(weight):
        raise recorder.refusal("its weight depends on the input")
    slope = weight.detach()
    if slope.numel() > 1:
        slope = slope.view(-1, *(1,) * (x.dim() - 2))
    return _elementwise(recorder, call, (0,), (slope, 1), (0, 0))


def _clamped(recorder: Recorder, call: Call, low: Any, high: Any) -> Tensor:
    if recorder.depends(low) or recorder.depends(high):
        raise recorder.refusal("its limits depend on the input")
    if low is None:
        return _elementwise(recorder, call, (high,), (1, 0), (0, high))
    if high is None:
        return _elementwise(recorder, call, (low,), (0, 1), (low, 0))
    if bool((torch.as_tensor(low) > torch.as_tensor(high)).any()):
        raise recorder.refusal("its lower limit is above its upper limit")
    return _elementwise(recorder, call, (low, high), (0, 1, 0), (low, 0, high))


def _clamp(recorder: Recorder, call: Call) -> Tensor:
    return _clamped(recorder, call, call.get(1, "min"), call.get(2, "max"))


def _clamp_min(recorder: Recorder, call: Call) -> Tensor:
    return _clamped(recorder, call, call.get(1, "min"), None)


def _clamp_max(recorder: Recorder, call: Call) -> Tensor:
    return _clamped(recorder, call, None, call.get(1, "max"))


def _hardtanh(recorder: Recorder, call: Call) -> Tensor:
    return _clamped(recorder, call, call.get(1, "min_val", -1.0), call.get(2, "max_val", 1.0))


def _relu6(recorder: Recorder, call: Call) -> Tensor:
    return _clamped(recorder, call, 0.0, 6.0)


def _hardsigmoid(recorder: Recorder, call: Call) -> Tensor:
    return _elementwise(recorder, call, (-3, 3), (0, 1 / 6, 0), (0, 0.5, 1))


def _softshrink(recorder: Recorder, call: Call) -> Tensor:
    width = call.get(1, "lambd", 0.5)
    return _elementwise(recorder, call, (-width, width), (1, 0, 1), (width, 0, -width))


def _threshold(recorder: Recorder, call: Call) -> Tensor:
    return _elementwise(recorder, call, (call.get(1, "threshold"),), (0, 1), (call.get(2, "value"), 0))


def larger(recorder: Recorder, call: Call) -> Tensor:
    """The larger or smaller of two: ``b + relu(a - b)`` or ``a - relu(a - b)``."""
    first, second = call.input, call.get(1, "other")
    largest = call.name.startswith("max")
    if not recorder.depends(second) or not recorder.depends(first):
        entry, limit = (first, second) if recorder.depends(first) else (second, first)
        pieces = ((limit,), (0, 1), (limit, 0)) if largest else ((limit,), (1, 0), (0, limit))
        step = recorder.emit(_pieces(recorder, call.name, entry, *pieces), recorder.number(entry))
        return recorder.bind(call.run(), step)
    if first.shape != second.shape:
        raise recorder.refusal("it compares two results of different shapes")
    numbers = recorder.number(first), recorder.number(second)
    tails = (first.shape[1:],) * 2
    difference = recorder.emit(Sum(-1.0, tails), *numbers)
    gate = _pieces(recorder, call.name, (first - second).detach(), (0,), (0, 1), (0, 0))
    positive = recorder.emit(gate, difference)
    step = recorder.emit(Sum(1.0 if largest else -1.0, tails), numbers[1] if largest else numbers[0], positive)
    return recorder.bind(call.run(), step)


RULES: dict[str, Callable[[Recorder, Call], Any]] = {
    "relu": _relu,
    "abs": _abs,
    "absolute": _abs,
    "leaky_relu": _leaky_relu,
    "rrelu": _rrelu,
    "prelu": _prelu,
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": _clamp_min,
    "clamp_max": _clamp_max,
    "hardtanh": _hardtanh,
    "relu6": _relu6,
    "hardsigmoid": _hardsigmoid,
    "softshrink": _softshrink,
    "threshold": _threshold,
    "maximum": larger,
    "minimum": larger,
}
