"""The rules by which a tape records functions: as gates, as layers with fast transposes, or as any affine function."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional as F

from robust_ext.attacks.linear_region.network.affine import (
    AFFINE,
    AffineMap,
    ChannelScale,
    Convolution,
    record_affine,
)
from robust_ext.attacks.linear_region.network.gates import Constant, MaxGate, PiecewiseActivation, products
from robust_ext.attacks.linear_region.network.tape import Call, Tape

Rule = Callable[[Tape, Call], Any]
# Breakpoints, slopes and intercepts.
Pieces = tuple[Sequence[Constant], Sequence[Constant], Sequence[Constant]]
_RELU: Pieces = (0,), (0, 1), (0, 0)
_POSITIONS = "it uses positions of largest values"

RULES: dict[str, Rule] = dict.fromkeys(AFFINE, record_affine)


def _rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of functions by name."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def _activation(tape: Tape, name: str, x: Tensor, pieces: Pieces) -> PiecewiseActivation:
    entry = (1, *x.shape[1:])
    for value in (one for constants in pieces for one in constants):
        if isinstance(value, Tensor) and torch.broadcast_shapes(value.shape, entry) != entry:  # type: ignore[no-untyped-call]
            raise tape.refusal("a constant has a value for each row of the batch, or more values than its input")
    breakpoints, slopes, intercepts = (
        tuple(one.detach() if isinstance(one, Tensor) else float(one) for one in constants) for constants in pieces
    )
    active = tuple(x.detach() > point for point in breakpoints)
    return PiecewiseActivation(name, breakpoints, slopes, intercepts, active, x.dtype)


def _leaky(slope: Constant) -> Pieces:
    return (0,), (slope, 1), (0, 0)


def _prelu(tape: Tape, call: Call) -> Pieces:
    slope = call.get(1, "weight")
    if tape.depends(slope):
        raise tape.refusal("its weight depends on the input")
    return _leaky(slope.detach().view(-1, *(1,) * (call.input.dim() - 2)) if slope.numel() > 1 else slope.detach())


def _clamped(tape: Tape, low: Any, high: Any) -> Pieces:
    if tape.depends(low) or tape.depends(high):
        raise tape.refusal("its limits depend on the input")
    if low is None:
        return (high,), (1, 0), (0, high)
    if high is None:
        return (low,), (0, 1), (low, 0)
    if bool((torch.as_tensor(low) > torch.as_tensor(high)).any()):
        raise tape.refusal("its lower limit is above its upper limit")
    return (low, high), (0, 1, 0), (low, 0, high)


_PIECES: dict[str, Callable[[Tape, Call], Pieces]] = {
    "relu": lambda tape, call: _RELU,
    "abs": lambda tape, call: _leaky(-1),
    "absolute": lambda tape, call: _leaky(-1),
    "leaky_relu": lambda tape, call: _leaky(call.get(1, "negative_slope", 0.01)),
    "prelu": _prelu,
    "clamp": lambda tape, call: _clamped(tape, call.get(1, "min"), call.get(2, "max")),
    "clip": lambda tape, call: _clamped(tape, call.get(1, "min"), call.get(2, "max")),
    "clamp_min": lambda tape, call: _clamped(tape, call.get(1, "min"), None),
    "clamp_max": lambda tape, call: _clamped(tape, None, call.get(1, "max")),
    "hardtanh": lambda tape, call: _clamped(tape, call.get(1, "min_val", -1.0), call.get(2, "max_val", 1.0)),
    "relu6": lambda tape, call: _clamped(tape, 0.0, 6.0),
    "hardsigmoid": lambda tape, call: ((-3, 3), (0, 1 / 6, 0), (0, 0.5, 1)),
    "threshold": lambda tape, call: ((call.get(1, "threshold"),), (0, 1), (call.get(2, "value"), 0)),
}


@_rule(*_PIECES)
def _elementwise(tape: Tape, call: Call) -> Any:
    pieces = _PIECES[call.name](tape, call)
    return tape.record(call, _activation(tape, call.name, call.input, pieces), call.input)


@_rule("maximum", "minimum")
def _larger(tape: Tape, call: Call) -> Tensor:
    """Record the larger or smaller of two: ``b + relu(a - b)`` or ``a - relu(a - b)``."""
    first, second = call.input, call.get(1, "other")
    largest = call.name.startswith("max")
    if not tape.depends(second) or not tape.depends(first):
        entry, limit = (first, second) if tape.depends(first) else (second, first)
        if limit.dim() < entry.dim() or limit.shape[0] == 1:
            pieces = _clamped(tape, limit, None) if largest else _clamped(tape, None, limit)
            return tape.record(call, _activation(tape, call.name, entry, pieces), entry)
    difference = record_affine(tape, Call("sub", torch.sub, (first, second), {}))
    gate = _activation(tape, call.name, difference, _RELU)
    positive = tape.bind(difference.relu(), tape.emit(gate, tape.number(difference)))
    joined = (torch.add, (second, positive)) if largest else (torch.sub, (first, positive))
    combined = record_affine(tape, Call(call.name, *joined, {}))
    return tape.bind(call.run(), tape.number(combined))


@_rule("max", "min", "amax", "amin")
def _largest(tape: Tape, call: Call) -> Any:
    """Record the largest or smallest along dimensions, or of two tensors."""
    if call.name in ("max", "min") and isinstance(call.get(1, "other"), Tensor):
        return _larger(tape, call)
    x, dims = call.input, call.get(1, "dim", call.kwargs.get("axis"))
    dims = [] if dims is None else [dims] if isinstance(dims, int) else list(dims)
    along = sorted(dim % x.dim() for dim in dims)
    if not along or along[0] == 0:
        raise tape.refusal("it works along the batch dimension")
    largest = call.name in ("max", "amax")
    kept = [dim for dim in range(x.dim()) if dim not in along]
    order = (*kept, *along)

    def arranged(value: Tensor) -> Tensor:
        return (value if largest else -value).permute(order)

    number, value = tape.emit(AffineMap(arranged, (x,)), tape.number(x)), arranged(x.detach())
    flat = value.flatten(len(kept))
    argmax = flat.argmax(-1).reshape(tape.rows, -1, 1)
    out = call.run()
    result = out if isinstance(out, Tensor) else out[0]
    windows = torch.arange(flat.shape[-1], device=x.device)[:, None]
    number = tape.emit(MaxGate.make(call.name, value, result, windows, argmax), number)
    tape.bind(result, number if largest else tape.emit(AffineMap(torch.neg, (result,)), number))
    if not isinstance(out, Tensor):
        tape.make_final(out[1], _POSITIONS)
    return out


_POOLS = itertools.product(("", "adaptive_"), (1, 2, 3), ("", "_with_indices"))


@_rule(*(f"{kind}max_pool{dims}d{ending}" for kind, dims, ending in _POOLS))
def _max_pool(tape: Tape, call: Call) -> Any:
    """Record max pooling, with windows of a fixed size or a fixed number of windows."""
    x = call.input
    number = tape.number(x)
    dims = int(call.name.split("pool")[1][0])
    sizes, adaptive = x.shape[-dims:], call.name.startswith("adaptive")
    pool = getattr(F, f"{'adaptive_' if adaptive else ''}max_pool{dims}d_with_indices")
    if adaptive:
        out, index = pool(x, call.get(1, "output_size"))
        axes = [
            [list(range(w * n // o, -(-(w + 1) * n // o))) for w in range(o)]
            for n, o in zip(sizes, out.shape[-dims:], strict=True)
        ]
    else:
        kernel = _per_dimension(call.get(1, "kernel_size"), dims)
        stride = _per_dimension(call.get(2, "stride") or kernel, dims)
        padding = _per_dimension(call.get(3, "padding", 0), dims)
        dilation = _per_dimension(call.get(4, "dilation", 1), dims)
        out, index = pool(x, kernel, stride, padding, dilation, call.get(5, "ceil_mode", False))
        axes = [
            [[i for i in range(w * s - p, w * s - p + d * k, d) if 0 <= i < n] for w in range(o)]
            for n, o, k, s, p, d in zip(sizes, out.shape[-dims:], kernel, stride, padding, dilation, strict=True)
        ]
    windows = products(axes, sizes).T.contiguous().to(x.device)
    argmax = index.reshape(tape.rows, -1, windows.shape[1])
    tape.bind(out, tape.emit(MaxGate.make(call.name, x, out, windows, argmax), number))
    tape.make_final(index, _POSITIONS)
    both = call.name.endswith("indices") or call.get(2 if adaptive else 6, "return_indices")
    return (out, index) if both else out


@_rule("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as")
def _reshape(tape: Tape, call: Call) -> Tensor:
    x = call.input
    number, before = tape.number(x), x.shape[1:]
    out: Tensor = call.run()
    if out.dtype != x.dtype:
        raise tape.refusal("it changes the dtype")

    def shaped(value: Tensor, tail: torch.Size = out.shape[1:]) -> Tensor:
        return value.reshape(value.shape[0], *tail)

    return tape.bind(out, tape.emit(AffineMap(shaped, transpose=lambda given: (shaped(given, before),)), number))


@_rule("expand", "expand_as", "broadcast_to")
def _expand(tape: Tape, call: Call) -> Tensor:
    x = call.input
    out: Tensor = call.run()
    if out.dim() != x.dim():
        raise tape.refusal("it repeats rows of the batch")
    tail, number = out.shape[1:], tape.number(x)
    return tape.bind(out, tape.emit(AffineMap(lambda value: value.expand(value.shape[0], *tail), (x,)), number))


@_rule("contiguous", "clone", "detach", "to", "float", "double", "half", "bfloat16", "cpu", "cuda")
def _same(tape: Tape, call: Call) -> Any:
    x = call.input
    number = tape.number(x)
    out = call.run()
    same = out.dtype == x.dtype and out.device == x.device
    return tape.bind(out, number) if same else record_affine(tape, call)


@_rule("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")
def _dropout(tape: Tape, call: Call) -> Any:
    if call.get(2, "training", True) and call.get(1, "p", 0.5) > 0:
        raise tape.refusal("it is in train mode; call eval() on the network")
    return _same(tape, call)


@_rule("log_softmax")
def _log_softmax(tape: Tape, call: Call) -> Tensor:
    """Leave out the last step of a network: differences between classes are the same without it."""
    x = call.input
    why = f"it is not the network's last step over classes; let the network return what enters {call.name}"
    if x.dim() != 2 or call.get(1, "dim") not in (1, -1) or call.get(3, "dtype") is not None:
        raise tape.refusal(why)
    number = tape.number(x)
    return tape.make_final(tape.bind(call.run(), number), why)


@_rule("softmax", "softmin", "sigmoid")
def _softmax(tape: Tape, call: Call) -> Tensor:
    raise tape.refusal("it is not piecewise affine; where it is the last step, let the network return what enters it")


@_rule("batch_norm")
def _batch_norm(tape: Tape, call: Call) -> Tensor:
    order = ("running_mean", "running_var", "weight", "bias")
    if call.func is torch.batch_norm or isinstance(call.func, OpOverload):
        order = ("weight", "bias", "running_mean", "running_var")
    given = {name: call.get(place, name) for place, name in enumerate(order, 1)}
    mean, variance = given["running_mean"], given["running_var"]
    if call.get(5, "training", False) or mean is None or variance is None:
        raise tape.refusal("it is in train mode; call eval() on the network")
    weight, bias = (1.0 if given["weight"] is None else given["weight"].detach()), given["bias"]
    scale = (variance.detach() + call.get(7, "eps", 1e-5)).rsqrt() * weight
    shift = -mean.detach() * scale + (0.0 if bias is None else bias.detach())
    shape = (1, -1) + (1,) * (call.input.dim() - 2)
    return tape.record(call, ChannelScale(scale.view(shape), shift.view(shape)), call.input)


def _parameters(tape: Tape, call: Call, *, dims: int | None = None) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a layer, which must be constants, for inputs of ``dims`` dimensions or a batch."""
    x, weight, bias = call.input, call.get(1, "weight"), call.get(2, "bias")
    if (x.dim() != dims if dims else x.dim() < 2) or tape.depends(weight) or tape.depends(bias):
        raise tape.refusal("it needs a batch, and a weight that does not depend on the input")
    return weight.detach(), None if bias is None else bias.detach()


@_rule("linear")
def _linear(tape: Tape, call: Call) -> Tensor:
    return _product(tape, call, *_parameters(tape, call))


@_rule("matmul")
def _matmul(tape: Tape, call: Call) -> Any:
    first, second = call.input, call.get(1, "other")
    if tape.depends(first) and not tape.depends(second) and first.dim() >= 2 and second.dim() == 2:
        return _product(tape, call, second.detach().T, None)
    return record_affine(tape, call)


def _product(tape: Tape, call: Call, weight: Tensor, bias: Tensor | None) -> Tensor:
    layer = AffineMap(lambda x: F.linear(x, weight, bias), transpose=lambda gradient: (gradient @ weight,))
    return tape.record(call, layer, call.input)


@_rule("conv1d", "conv2d", "conv3d")
def _convolution(tape: Tape, call: Call) -> Any:
    x, dims = call.input, call.get(1, "weight").dim() - 2
    weight, bias = _parameters(tape, call, dims=dims + 2)
    stride, dilation = _per_dimension(call.get(3, "stride", 1), dims), _per_dimension(call.get(5, "dilation", 1), dims)
    padding = call.get(4, "padding", 0)
    if isinstance(padding, str):
        total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, weight.shape[2:], strict=True)]
        if any(width % 2 for width in total):
            return record_affine(tape, call)
        padding = [width // 2 for width in total]
    padding, groups = _per_dimension(padding, dims), call.get(6, "groups", 1)
    return tape.record(call, Convolution(weight, bias, stride, padding, dilation, groups, tuple(x.shape[2:])), x)


def _per_dimension(value: Any, dims: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return tuple(int(one) for one in (values * dims if len(values) == 1 else values))
