"""The rules by which a tape records functions: as gates, as layers with fast transposes, or as any affine function.

Any other function that can be affine is let in by its name. Whether a call is, in all arguments that depend on the
input together, and whether it treats rows alike, is then tested with numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional as F

from robust_ext.attacks.linear_region.network.affine import AffineMap, ChannelScale, Convolution
from robust_ext.attacks.linear_region.network.gates import Constant, MaxGate, PiecewiseActivation, places_of
from robust_ext.attacks.linear_region.network.tape import Call, Tape, snapshot, tensors_in

Function = Callable[..., Any]
# Breakpoints, slopes and intercepts.
Pieces = tuple[Sequence[Constant], Sequence[Constant], Sequence[Constant]]
_RELU: Pieces = (0,), (0, 1), (0, 0)
_ABS: Pieces = (0,), (-1, 1), (0, 0)


def _affine(tape: Tape, call: Call) -> Any:
    """Record a call that is affine in the tensors that depend on the input, with constants held."""
    inputs = list({id(t): t for t in tensors_in((call.args, call.kwargs)) if tape.depends(t)}.values())
    numbers, before = [tape.number(one) for one in inputs], [snapshot(one) for one in inputs]
    functions = _functions(tape, call, inputs)
    given = call.run()
    results = list(given) if isinstance(given, (list, tuple)) else [given]
    if not all(isinstance(result, Tensor) for result in results):
        raise tape.refusal(f"it returns {type(given).__name__} instead of a tensor")
    for result in results:
        tape.check_kind(result)
    function = _row_wise(tape, functions, before, results)
    # A skip connection returns its gradient twice, which needs no graph.
    operands = (call.input, call.get(1, "other"))
    shapes = {one.shape if isinstance(one, Tensor) else None for one in operands}
    skip = call.name == "add" and len(inputs) == 2 and len(shapes) == 1 and call.get(2, "alpha") is None
    transpose = (lambda gradient: (gradient, gradient)) if skip else None
    for place, result in enumerate(results):
        part = function if isinstance(given, Tensor) else partial(_at, function, place)
        tape.bind(result, tape.emit(AffineMap(part, before, transpose), *numbers))
    return given


def _at(function: Function, place: int, *inputs: Tensor) -> Tensor:
    out: Tensor = function(*inputs)[place]
    return out


def _functions(tape: Tape, call: Call, inputs: Sequence[Tensor]) -> list[Function]:
    """Return the call as a function of its inputs: with constants unchanged, and with the first row of each repeated.

    What a constant's first dimension means decides between the two.
    """
    differ = False

    def unchanged(constant: Tensor) -> Callable[[Sequence[Tensor]], Tensor]:
        held = snapshot(constant)
        return lambda given: held

    def repeated(constant: Tensor) -> Callable[[Sequence[Tensor]], Tensor]:
        nonlocal differ
        if constant.dim() == 0 or constant.shape[0] != tape.rows:
            return unchanged(constant)
        differ |= not bool((constant == constant[:1]).all())
        held = constant.detach()[:1].clone()
        return lambda given: held.expand(given[0].shape[0], *held.shape[1:])

    def faulty(*given: Tensor) -> Any:
        raise tape.refusal("a constant has a different value in each row of the batch")

    functions = [call.function_of(inputs, unchanged), call.function_of(inputs, repeated)]
    return [functions[0], faulty if differ else functions[1]]


def _row_wise(
    tape: Tape, functions: Sequence[Function], before: Sequence[Tensor], results: Sequence[Tensor]
) -> Function:
    """Return the first function that reproduces the results and treats rows alike; it must be affine.

    The test inputs have a number of rows that is no other size.
    """
    sizes = {*itertools.chain.from_iterable(one.shape for one in (*before, *results))}
    count = next(number for number in itertools.count(3) if number not in sizes)
    generator = torch.Generator().manual_seed(0)
    first, second = (
        [torch.randn(count, *one.shape[1:], generator=generator, dtype=torch.float64).to(one) for one in before]
        for _ in range(2)
    )
    between = [torch.lerp(a, b, -1.5) for a, b in zip(first, second, strict=True)]
    kinds = {one.dtype for one in (*before, *results) if one.is_floating_point()}
    # GPUs may round the inputs of convolutions to ten bits.
    rounding = 1e-9 if kinds <= {torch.float64} else 5e-3 if before[0].is_cuda else 1e-4
    close = partial(_close, rounding=rounding)
    for function in functions:
        try:
            with torch.no_grad():
                recorded, out, others, mixed = (_outputs(function, one) for one in (before, first, second, between))
                alone = [_outputs(function, [one[row : row + 1] for one in first]) for row in (0, count - 1)]
        except (RuntimeError, IndexError, ValueError, TypeError):
            continue
        if [one.shape for one in out] != [(count, *one.shape[1:]) for one in results] or not (
            close(recorded, [one.detach() for one in results])
            and close([one[:1] for one in out], alone[0])
            and close([one[-1:] for one in out], alone[1])
        ):
            continue
        if not close(mixed, [torch.lerp(a, b, -1.5) for a, b in zip(out, others, strict=True)]):
            raise tape.refusal("it is not affine in the input, as where two results are multiplied")
        return function
    raise tape.refusal("it mixes the rows of the batch or moves the batch dimension")


def _outputs(function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    given = function(*inputs)
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _close(first: Sequence[Tensor], second: Sequence[Tensor], *, rounding: float) -> bool:
    """Return whether tensors are equal up to rounding, relative to the largest value of each."""
    for one, other in zip(first, second, strict=True):
        if one.shape != other.shape:
            return False
        lost = ~(one.isfinite() | other.isfinite())
        one, other = one.masked_fill(lost, 0), other.masked_fill(lost, 0)
        if one.numel() and not float((one - other).abs().max()) <= rounding * (1 + float(one.abs().max())):
            return False
    return True


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


def _elementwise(pieces_of: Callable[[Tape, Call], Pieces]) -> Callable[[Tape, Call], Any]:
    """Return the rule of a function of one variable, from its pieces."""
    return lambda tape, call: tape.record(
        call, _activation(tape, call.name, call.input, pieces_of(tape, call)), call.input
    )


def _leaky(slope: Constant) -> Pieces:
    return (0,), (slope, 1), (0, 0)


def _prelu(tape: Tape, call: Call) -> Pieces:
    weight = call.get(1, "weight")
    if tape.depends(weight):
        raise tape.refusal("its weight depends on the input")
    slope = weight.detach()
    return _leaky(slope.view(-1, *(1,) * (call.input.dim() - 2)) if slope.numel() > 1 else slope)


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


def _larger(tape: Tape, call: Call) -> Tensor:
    """Record the larger or smaller of two: ``b + relu(a - b)`` or ``a - relu(a - b)``."""
    first, second = call.input, call.get(1, "other")
    largest = call.name.startswith("max")
    if not tape.depends(second) or not tape.depends(first):
        entry, limit = (first, second) if tape.depends(first) else (second, first)
        if limit.dim() < entry.dim() or limit.shape[0] == 1:
            pieces: Pieces = ((limit,), (0, 1), (limit, 0)) if largest else ((limit,), (1, 0), (0, limit))
            return tape.record(call, _activation(tape, call.name, entry, pieces), entry)
    difference = _affine(tape, Call("sub", torch.sub, (first, second), {}))
    gate = _activation(tape, call.name, difference, _RELU)
    positive = tape.bind(difference.relu(), tape.emit(gate, tape.number(difference)))
    joined = (torch.add, (second, positive)) if largest else (torch.sub, (first, positive))
    combined = _affine(tape, Call(call.name, *joined, {}))
    return tape.bind(call.run(), tape.number(combined))


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
    number = tape.emit(_max_gate(call.name, value, result, windows, argmax), number)
    tape.bind(result, number if largest else tape.emit(AffineMap(torch.neg, (result,)), number))
    if not isinstance(out, Tensor):
        tape.make_final(out[1], _POSITIONS)
    return out


def _max_gate(name: str, x: Tensor, out: Tensor, windows: Tensor, argmax: Tensor) -> MaxGate:
    size = x.numel() // (len(x) * argmax.shape[1]) if argmax.numel() else 0
    before, after = tuple(x.shape[1:]), tuple(out.shape[1:])
    return MaxGate(name, windows, argmax.to(torch.int32), size, before, after, places_of(windows, size))


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
        padding, dilation = (
            _per_dimension(call.get(*given), dims) for given in ((3, "padding", 0), (4, "dilation", 1))
        )
        out, index = pool(x, kernel, stride, padding, dilation, call.get(5, "ceil_mode", False))
        axes = [
            [[i for i in range(w * s - p, w * s - p + d * k, d) if 0 <= i < n] for w in range(o)]
            for n, o, k, s, p, d in zip(sizes, out.shape[-dims:], kernel, stride, padding, dilation, strict=True)
        ]
    windows = _products(axes, sizes).T.contiguous().to(x.device)
    argmax = index.reshape(tape.rows, -1, windows.shape[1])
    tape.bind(out, tape.emit(_max_gate(call.name, x, out, windows, argmax), number))
    tape.make_final(index, _POSITIONS)
    with_indices = call.name.endswith("indices") or call.get(2 if adaptive else 6, "return_indices")
    return (out, index) if with_indices else out


def _products(axes: list[list[list[int]]], sizes: Sequence[int]) -> Tensor:
    """Return positions in each window ``(windows, values)`` from those along each axis; short ones repeat one."""
    whole = torch.zeros(1, 1, dtype=torch.int64)
    for windows, size in zip(axes, sizes, strict=True):
        width = max(map(len, windows), default=0)
        axis = torch.tensor([window + window[-1:] * (width - len(window)) for window in windows], dtype=torch.int64)
        grown = whole[:, None, :, None] * size + axis[None, :, None, :]
        whole = grown.reshape(grown.shape[0] * grown.shape[1], -1)
    return whole


def _reshape(tape: Tape, call: Call) -> Tensor:
    x = call.input
    number, before = tape.number(x), x.shape[1:]
    out: Tensor = call.run()
    if out.dtype != x.dtype:
        raise tape.refusal("it changes the dtype")
    after = out.shape[1:]
    step = AffineMap(
        lambda value: value.reshape(value.shape[0], *after),
        transpose=lambda gradient: (gradient.reshape(gradient.shape[0], *before),),
    )
    return tape.bind(out, tape.emit(step, number))


def _expand(tape: Tape, call: Call) -> Tensor:
    x = call.input
    out: Tensor = call.run()
    if out.dim() != x.dim():
        raise tape.refusal("it repeats rows of the batch")
    tail, number = out.shape[1:], tape.number(x)
    return tape.bind(out, tape.emit(AffineMap(lambda value: value.expand(value.shape[0], *tail), (x,)), number))


def _same(tape: Tape, call: Call) -> Any:
    x = call.input
    number = tape.number(x)
    out = call.run()
    same = out.dtype == x.dtype and out.device == x.device
    return tape.bind(out, number) if same else _affine(tape, call)


def _dropout(tape: Tape, call: Call) -> Any:
    if call.get(2, "training", True) and call.get(1, "p", 0.5) > 0:
        raise tape.refusal("it is in train mode; call eval() on the network")
    return _same(tape, call)


def _log_softmax(tape: Tape, call: Call) -> Tensor:
    """Leave out the last step of a network: differences between classes are the same without it."""
    x = call.input
    why = f"it is not the network's last step over classes; let the network return what enters {call.name}"
    if x.dim() != 2 or call.get(1, "dim") not in (1, -1) or call.get(3, "dtype") is not None:
        raise tape.refusal(why)
    number = tape.number(x)
    return tape.make_final(tape.bind(call.run(), number), why)


def _softmax(tape: Tape, call: Call) -> Tensor:
    raise tape.refusal("it is not piecewise affine; where it is the last step, let the network return what enters it")


def _batch_norm(tape: Tape, call: Call) -> Tensor:
    order = ("running_mean", "running_var", "weight", "bias")
    if call.func is torch.batch_norm or isinstance(call.func, OpOverload):
        order = ("weight", "bias", "running_mean", "running_var")
    given = {name: call.get(place, name) for place, name in enumerate(order, 1)}
    mean, variance = given["running_mean"], given["running_var"]
    if call.get(5, "training", False) or mean is None or variance is None:
        raise tape.refusal("it is in train mode; call eval() on the network")
    scale = (variance.detach() + call.get(7, "eps", 1e-5)).rsqrt()
    if given["weight"] is not None:
        scale = scale * given["weight"].detach()
    shift = -mean.detach() * scale
    if given["bias"] is not None:
        shift = shift + given["bias"].detach()
    shape = (1, -1) + (1,) * (call.input.dim() - 2)
    return tape.record(call, ChannelScale(scale.view(shape), shift.view(shape)), call.input)


def _linear(tape: Tape, call: Call) -> Tensor:
    x, weight, bias = call.input, call.get(1, "weight"), call.get(2, "bias")
    if x.dim() < 2 or tape.depends(weight) or tape.depends(bias):
        raise tape.refusal("it needs a batch, and a weight that does not depend on the input")
    return _product(tape, call, weight.detach(), None if bias is None else bias.detach())


def _matmul(tape: Tape, call: Call) -> Any:
    first, second = call.input, call.get(1, "other")
    if tape.depends(first) and not tape.depends(second) and first.dim() >= 2 and second.dim() == 2:
        return _product(tape, call, second.detach().T, None)
    return _affine(tape, call)


def _product(tape: Tape, call: Call, weight: Tensor, bias: Tensor | None) -> Tensor:
    layer = AffineMap(lambda x: F.linear(x, weight, bias), transpose=lambda gradient: (gradient @ weight,))
    return tape.record(call, layer, call.input)


def _convolution(tape: Tape, call: Call) -> Any:
    x, weight, bias = call.input, call.get(1, "weight"), call.get(2, "bias")
    dims = weight.dim() - 2
    if x.dim() != dims + 2 or tape.depends(weight) or tape.depends(bias):
        raise tape.refusal("it needs a batch, and a weight that does not depend on the input")
    stride, dilation = _per_dimension(call.get(3, "stride", 1), dims), _per_dimension(call.get(5, "dilation", 1), dims)
    padding = call.get(4, "padding", 0)
    if isinstance(padding, str):
        total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, weight.shape[2:], strict=True)]
        if any(width % 2 for width in total):
            return _affine(tape, call)
        padding = [width // 2 for width in total]
    weight, bias, groups = weight.detach(), None if bias is None else bias.detach(), call.get(6, "groups", 1)
    size = tuple(x.shape[2:])
    operation = Convolution(weight, bias, stride, _per_dimension(padding, dims), dilation, groups, size)
    return tape.record(call, operation, x)


def _per_dimension(value: Any, dims: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return tuple(int(one) for one in (values * dims if len(values) == 1 else values))


_POSITIONS = "it uses positions of largest values"
_ACTIVATIONS: dict[str, Callable[[Tape, Call], Pieces]] = {
    "relu": lambda tape, call: _RELU,
    "abs": lambda tape, call: _ABS,
    "absolute": lambda tape, call: _ABS,
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
_AFFINE = {
    *("add", "sub", "subtract", "rsub", "neg", "negative", "positive", "lerp", "diff", "cumsum", "mean", "sum"),
    *("mul", "multiply", "div", "divide", "true_divide", "addcmul", "einsum", "mm", "bmm", "mv", "addmm", "baddbmm"),
    *("inner", "tensordot", "bilinear"),
    *("avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *("interpolate", "upsample", "grid_sample", "unfold", "fold", "pad", "channel_shuffle", "pixel_shuffle"),
    *("pixel_unshuffle", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T", "mT", "repeat", "tile"),
    *("flip", "roll", "rot90", "diagonal", "tril", "triu", "repeat_interleave", "cat", "concat", "concatenate"),
    *("stack", "hstack", "vstack", "__getitem__", "narrow", "select", "index_select", "gather", "take_along_dim"),
    *("split", "chunk", "unbind", "where", "masked_fill", "index_fill", "index_copy", "index_add", "scatter"),
}

RULES: dict[str, Callable[[Tape, Call], Any]] = {
    **dict.fromkeys(_AFFINE, _affine),
    **{name: _elementwise(pieces_of) for name, pieces_of in _ACTIVATIONS.items()},
    **dict.fromkeys(("maximum", "minimum"), _larger),
    **dict.fromkeys(("max", "min", "amax", "amin"), _largest),
    **{
        f"{kind}max_pool{dims}d{ending}": _max_pool
        for kind, dims, ending in itertools.product(("", "adaptive_"), (1, 2, 3), ("", "_with_indices"))
    },
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as"), _reshape),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    **dict.fromkeys(
        ("contiguous", "clone", "detach", "to", "float", "double", "half", "bfloat16", "cpu", "cuda"), _same
    ),
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"), _dropout),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    **dict.fromkeys(("softmax", "softmin", "sigmoid"), _softmax),
    "batch_norm": _batch_norm,
    "log_softmax": _log_softmax,
    "linear": _linear,
    "matmul": _matmul,
}
