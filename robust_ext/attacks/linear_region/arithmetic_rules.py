"""How sums, products, linear layers, convolutions and normalisations become steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.calls import Call, spread
from robust_ext.attacks.linear_region.convolutions import Convolution
from robust_ext.attacks.linear_region.operations import Affine, Linear, Pad, Sum
from robust_ext.attacks.linear_region.shape_rules import linear_function, one_row, repeated

if TYPE_CHECKING:
    from robust_ext.attacks.linear_region.recording import Recorder


def _constant(recorder: Recorder, value: Any, entry: Tensor) -> Tensor | float:
    """A constant that is combined with ``entry``, the same for every row."""
    if isinstance(value, (int, float)):
        return float(value)
    # A copy, because the network may write to it afterwards.
    fixed = torch.as_tensor(value, device=entry.device).detach().clone()
    if fixed.dim() > entry.dim():
        raise recorder.refusal("a constant has more dimensions than what it is combined with")
    return one_row(recorder, fixed) if fixed.dim() == entry.dim() and fixed.shape[0] != 1 else fixed


def _widened(recorder: Recorder, entry: Tensor, other: Tensor | float) -> int:
    """The number of ``entry`` after it has been repeated along the dimensions in which a constant is larger."""
    number = recorder.number(entry)
    if not isinstance(other, Tensor):
        return number
    tail = torch.broadcast_shapes(entry.shape, other.shape)[1:]  # type: ignore[no-untyped-call]
    return number if tail == entry.shape[1:] else recorder.emit(repeated(entry, tail), number)


def _add(recorder: Recorder, call: Call) -> Tensor:
    first, second = call.input, call.get(1, "other")
    factor = float(call.get(2, "alpha", 1))
    if call.name == "rsub":
        first, second = second, first
    weight = factor if call.name == "add" else -factor
    if recorder.depends(first) and recorder.depends(second):
        if first.dim() != second.dim() or first.shape[0] != second.shape[0]:
            raise recorder.refusal("it adds two results with different batch dimensions")
        tails = first.shape[1:], second.shape[1:]
        number = recorder.emit(Sum(weight, tails), recorder.number(first), recorder.number(second))
    elif recorder.depends(first):
        shift = _constant(recorder, second, first)
        number = recorder.emit(Affine(None, shift * weight), _widened(recorder, first, shift))
    else:
        shift = _constant(recorder, first, second)
        number = recorder.emit(Affine(weight, shift), _widened(recorder, second, shift))
    return recorder.bind(call.run(), number)


def _multiply(recorder: Recorder, call: Call) -> Tensor:
    first, second = call.input, call.get(1, "other")
    quotient = call.name not in ("mul", "multiply")
    if quotient and (recorder.depends(second) or call.get(2, "rounding_mode") is not None):
        raise recorder.refusal("it divides by something that depends on the input, or rounds")
    if recorder.depends(first) and recorder.depends(second):
        raise recorder.refusal("it multiplies two results that depend on the input")
    entry, other = (first, second) if recorder.depends(first) else (second, first)
    scale = _constant(recorder, other, entry)
    number = recorder.emit(Affine(1 / scale if quotient else scale), _widened(recorder, entry, scale))
    return recorder.bind(call.run(), number)


def _negate(recorder: Recorder, call: Call) -> Tensor:
    number = recorder.emit(Affine(-1.0), recorder.number(call.input))
    return recorder.bind(call.run(), number)


def _batch_norm(recorder: Recorder, call: Call) -> Tensor:
    order = ("running_mean", "running_var", "weight", "bias")
    if call.func is torch.batch_norm:
        order = ("weight", "bias", "running_mean", "running_var")
    given = {name: call.get(place, name) for place, name in enumerate(order, 1)}
    mean, variance = given["running_mean"], given["running_var"]
    if call.get(5, "training", False) or mean is None or variance is None:
        raise recorder.refusal("it is in train mode; call eval() on the network")
    x = call.input
    scale = (variance.detach() + call.get(7, "eps", 1e-5)).rsqrt()
    if given["weight"] is not None:
        scale = scale * given["weight"].detach()
    shift = -mean.detach() * scale
    if given["bias"] is not None:
        shift = shift + given["bias"].detach()
    shape = (1, -1) + (1,) * (x.dim() - 2)
    step = recorder.emit(Affine(scale.view(shape), shift.view(shape)), recorder.number(x))
    return recorder.bind(call.run(), step)


def _linear(recorder: Recorder, call: Call) -> Tensor:
    x, weight, bias = call.input, call.get(1, "weight"), call.get(2, "bias")
    if x.dim() < 2 or recorder.depends(weight) or recorder.depends(bias):
        raise recorder.refusal("it needs a batch, and a weight that does not depend on the input")
    step = recorder.emit(Linear(weight.detach(), None if bias is None else bias.detach()), recorder.number(x))
    return recorder.bind(call.run(), step)


def _matmul(recorder: Recorder, call: Call) -> Any:
    first, second = call.input, call.get(1, "other")
    if recorder.depends(first) and not recorder.depends(second) and first.dim() >= 2 and second.dim() == 2:
        step = recorder.emit(Linear(second.detach().T, None), recorder.number(first))
        return recorder.bind(call.run(), step)
    return linear_function(recorder, call)


def _convolution(recorder: Recorder, call: Call) -> Tensor:
    x, weight, bias = call.input, call.get(1, "weight"), call.get(2, "bias")
    dims = weight.dim() - 2
    if x.dim() != dims + 2 or recorder.depends(weight) or recorder.depends(bias):
        raise recorder.refusal("it needs a batch, and a weight that does not depend on the input")
    number = recorder.number(x)
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    stride = spread(call.get(3, "stride", 1), dims)
    padding = call.get(4, "padding", 0)
    if call.name.startswith("conv_transpose"):
        groups, dilation = call.get(6, "groups", 1), spread(call.get(7, "dilation", 1), dims)
        more = spread(call.get(5, "output_padding", 0), dims)
        operation = Convolution(weight, bias, stride, spread(padding, dims), dilation, groups, True, more)
        return recorder.bind(call.run(), recorder.emit(operation, number))
    dilation, size = spread(call.get(5, "dilation", 1), dims), list(x.shape[2:])
    if isinstance(padding, str):
        total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, weight.shape[2:], strict=True)]
        if any(width % 2 for width in total):
            widths = tuple(width for one in reversed(total) for width in (one // 2, one - one // 2))
            number = recorder.emit(Pad(widths, 0.0), number)
            size = [n + width for n, width in zip(size, total, strict=True)]
            total = [0] * dims
        padding = tuple(width // 2 for width in total)
    operation = Convolution.direct(
        weight,
        bias,
        stride=stride,
        padding=spread(padding, dims),
        dilation=dilation,
        groups=call.get(6, "groups", 1),
        size=size,
    )
    return recorder.bind(call.run(), recorder.emit(operation, number))


RULES: dict[str, Callable[[Recorder, Call], Any]] = {
    **dict.fromkeys(("add", "sub", "subtract", "rsub"), _add),
    **dict.fromkeys(("mul", "multiply", "div", "divide", "true_divide"), _multiply),
    **dict.fromkeys(("neg", "negative"), _negate),
    **{f"{name}{dims}d": _convolution for name in ("conv", "conv_transpose") for dims in (1, 2, 3)},
    "batch_norm": _batch_norm,
    "linear": _linear,
    "matmul": _matmul,
}
