"""How affine functions become steps: most by automatic differentiation, layers with transposes of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from robust_ext.attacks.linear_region.network.affine import AffineMap, ChannelScale, Convolution
from robust_ext.attacks.linear_region.network.tape import Call, Tape, per_dimension, tensors_in

Rule = Callable[[Tape, Call], Any]


def _one_input(tape: Tape, call: Call) -> Any:
    """A function that is linear in one tensor and treats rows alike."""
    dependent = [t for t in tensors_in((call.args, call.kwargs)) if tape.depends(t)]
    if len(dependent) != 1:
        raise tape.refusal("it combines several results that depend on the input")
    (x,) = dependent
    number, function = tape.number(x), call.function_of(x)
    given = call.run()
    results = list(given) if isinstance(given, (list, tuple)) else [given]
    if not _keeps_rows(function, x, results):
        raise tape.refusal("it mixes the rows of the batch or moves the batch dimension")
    for place, result in enumerate(results):
        part = function if isinstance(given, Tensor) else lambda x, place=place: function(x)[place]
        tape.bind(result, tape.emit(AffineMap(part, (x,)), number))
    return given


def _keeps_rows(function: Callable[[Tensor], Any], x: Tensor, results: list[Tensor]) -> bool:
    """Whether the first dimension of the results follows that of ``x``, tried with a number that is no other size."""
    sizes = {*x.shape}.union(*(result.shape for result in results))
    count = next(number for number in itertools.count(2) if number not in sizes)
    try:
        with torch.no_grad():
            out = function(x.detach().new_zeros(count, *x.shape[1:]))
    except (RuntimeError, IndexError, ValueError):
        return False
    tried = list(out) if isinstance(out, (list, tuple)) else [out]
    return [tuple(one.shape) for one in tried] == [(count, *result.shape[1:]) for result in results]


def _sum_or_product(tape: Tape, call: Call) -> Tensor:
    operands = call.input, call.get(1, "other")
    dependent = [one for one in operands if tape.depends(one)]
    if call.name in _QUOTIENTS and (tape.depends(operands[1]) or call.get(2, "rounding_mode") is not None):
        raise tape.refusal("it divides by something that depends on the input, or rounds")
    if call.name not in _SUMS and len(dependent) == 2:
        raise tape.refusal("it multiplies two results that depend on the input")
    if len({(one.dim(), one.shape[0]) for one in dependent}) > 1:
        raise tape.refusal("it adds two results with different batch dimensions")
    fixed: list[Any] = [None if tape.depends(one) else _constant(tape, one, dependent[0]) for one in operands]
    function, keywords = call.out_of_place, {}
    if call.name in _QUOTIENTS:
        function, fixed[1] = torch.mul, 1 / fixed[1]
    elif (alpha := call.get(2, "alpha")) is not None:
        keywords = {"alpha": alpha}

    def combined(*inputs: Tensor) -> Tensor:
        out: Tensor = function(*_filled(fixed, inputs), **keywords)
        return out

    # A skip connection returns its gradient twice, which needs no graph.
    skip = call.name == "add" and not keywords and len({one.shape for one in dependent}) < len(dependent)
    transpose = (lambda gradient: (gradient, gradient)) if skip else None
    return tape.record(call, AffineMap(combined, dependent, transpose), *dependent)


def _filled(fixed: Sequence[Any], inputs: Sequence[Tensor]) -> list[Any]:
    """The fixed operands, with the inputs where there is None."""
    following = iter(inputs)
    return [next(following) if one is None else one for one in fixed]


def _constant(tape: Tape, value: Any, entry: Tensor) -> Any:
    """A constant that is combined with ``entry``, the same for every row."""
    if isinstance(value, (int, float)):
        return value
    # A copy, because the network may write to it afterwards.
    fixed = torch.as_tensor(value, device=entry.device).detach().clone()
    if fixed.dim() > entry.dim():
        raise tape.refusal("a constant has more dimensions than what it is combined with")
    return _one_row(tape, fixed) if fixed.dim() == entry.dim() and fixed.shape[0] != 1 else fixed


def _one_row(tape: Tape, value: Tensor) -> Tensor:
    """The first row of a constant that has a row for each of the batch, all the same."""
    if not bool((value == value[:1]).all()):
        raise tape.refusal("a constant has a different value in each row of the batch")
    return value[:1].clone()


def _concatenate(tape: Tape, call: Call) -> Tensor:
    parts = list(call.get(0, "tensors"))
    out: Tensor = call.run()
    dim = call.get(1, "dim", call.kwargs.get("axis", 0)) % out.dim()
    if dim == 0:
        raise tape.refusal("it works along the batch dimension")
    fixed = [None if tape.depends(one) else _one_row(tape, one.detach()) for one in parts]
    join = torch.stack if call.name == "stack" else torch.cat

    def joined(*inputs: Tensor) -> Tensor:
        count = inputs[0].shape[0]
        return join([one.expand(count, *one.shape[1:]) for one in _filled(fixed, inputs)], dim)

    return tape.bind(out, tape.emit_function(joined, *(one for one in parts if tape.depends(one))))


def _pad(tape: Tape, call: Call) -> Any:
    if call.get(2, "mode", "constant") == "constant" and len(call.get(1, "pad")) >= 2 * call.input.dim():
        raise tape.refusal("it pads the batch dimension")
    return _one_input(tape, call)


def _flip(tape: Tape, call: Call) -> Any:
    given = [*call.args[1:], *call.kwargs.values()]
    dims = {dim for one in given for dim in (one if isinstance(one, (list, tuple)) else [one])}
    if dims & {0, -call.input.dim()}:
        raise tape.refusal("it mixes the rows of the batch or moves the batch dimension")
    return _one_input(tape, call)


def _reshape(tape: Tape, call: Call) -> Tensor:
    x = call.input
    number, before = tape.number(x), x.shape
    out: Tensor = call.run()
    if out.dtype != x.dtype:
        raise tape.refusal("it changes the dtype")
    if out.dim() == 0 or out.shape[0] % tape.rows:
        raise tape.refusal("it moves the batch dimension")
    # Entries of one row, before and after.
    one, other = before[0] // tape.rows, out.shape[0] // tape.rows

    def forth(value: Tensor, tail: tuple[int, ...] = out.shape[1:]) -> Tensor:
        return value.reshape(value.shape[0] // one * other, *tail)

    def back(value: Tensor, tail: tuple[int, ...] = before[1:]) -> tuple[Tensor, ...]:
        return (value.reshape(value.shape[0] // other * one, *tail),)

    return tape.bind(out, tape.emit(AffineMap(forth, transpose=back), number))


def _expand(tape: Tape, call: Call) -> Tensor:
    x = call.input
    out: Tensor = call.run()
    if out.dim() != x.dim() or out.shape[0] != x.shape[0]:
        raise tape.refusal("it repeats rows of the batch")
    tail = out.shape[1:]
    return tape.bind(out, tape.emit_function(lambda value: value.expand(value.shape[0], *tail), x))


def _same(tape: Tape, call: Call) -> Any:
    x = call.input
    number = tape.number(x)
    out = call.run()
    same = out.dtype == x.dtype and out.device == x.device
    return tape.bind(out, number) if same else _one_input(tape, call)


def _dropout(tape: Tape, call: Call) -> Any:
    if call.get(2, "training", True) and call.get(1, "p", 0.5) > 0:
        raise tape.refusal("it is in train mode; call eval() on the network")
    return _same(tape, call)


def _batch_norm(tape: Tape, call: Call) -> Tensor:
    order = ("running_mean", "running_var", "weight", "bias")
    if call.func is torch.batch_norm:
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
    return _one_input(tape, call)


def _product(tape: Tape, call: Call, weight: Tensor, bias: Tensor | None) -> Tensor:
    layer = AffineMap(lambda x: F.linear(x, weight, bias), transpose=lambda gradient: (gradient @ weight,))
    return tape.record(call, layer, call.input)


def _convolution(tape: Tape, call: Call) -> Any:
    x, weight, bias = call.input, call.get(1, "weight"), call.get(2, "bias")
    dims = weight.dim() - 2
    if x.dim() != dims + 2 or tape.depends(weight) or tape.depends(bias):
        raise tape.refusal("it needs a batch, and a weight that does not depend on the input")
    stride, dilation = per_dimension(call.get(3, "stride", 1), dims), per_dimension(call.get(5, "dilation", 1), dims)
    padding = call.get(4, "padding", 0)
    if isinstance(padding, str):
        total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, weight.shape[2:], strict=True)]
        if any(width % 2 for width in total):
            return _one_input(tape, call)
        padding = [width // 2 for width in total]
    weight, bias, groups = weight.detach(), None if bias is None else bias.detach(), call.get(6, "groups", 1)
    size = tuple(x.shape[2:])
    operation = Convolution(weight, bias, stride, per_dimension(padding, dims), dilation, groups, size)
    return tape.record(call, operation, x)


_SUMS = {"add", "sub", "subtract", "rsub"}
_QUOTIENTS = {"div", "divide", "true_divide"}
_ONE_INPUT = {
    *("avg_pool1d", "avg_pool2d", "avg_pool3d", "interpolate", "upsample", "mean", "sum", "einsum", "mm", "bmm"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "unfold", "fold", "channel_shuffle"),
    *("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T", "mT", "repeat"),
    *("__getitem__", "narrow", "select", "index_select", "split", "chunk", "unbind", "tensor_split"),
    *("repeat_interleave", "pixel_shuffle", "pixel_unshuffle", "neg", "negative"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
}
_RESHAPES = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"}
_SAME = {"contiguous", "clone", "detach", "to", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda"}
_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}

RULES: dict[str, Rule] = {
    **dict.fromkeys(_ONE_INPUT, _one_input),
    **dict.fromkeys((*_SUMS, *_QUOTIENTS, "mul", "multiply"), _sum_or_product),
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(_DROPOUTS, _dropout),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), _concatenate),
    **dict.fromkeys(("expand", "expand_as"), _expand),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    "flip": _flip,
    "pad": _pad,
    "batch_norm": _batch_norm,
    "linear": _linear,
    "matmul": _matmul,
}
