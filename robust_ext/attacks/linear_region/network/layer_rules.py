"""How layers and changes of shape become steps, with transposes of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional as F

from robust_ext.attacks.linear_region.network.affine import AffineMap, ChannelScale, Convolution
from robust_ext.attacks.linear_region.network.affine_rules import affine_call
from robust_ext.attacks.linear_region.network.calls import Call, per_dimension
from robust_ext.attacks.linear_region.network.tape import Tape


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

    return tape.bind(out, tape.emit(AffineMap(forth, transpose=back), number, chosen=tape.is_chosen(x)))


def _expand(tape: Tape, call: Call) -> Tensor:
    x = call.input
    out: Tensor = call.run()
    if out.dim() != x.dim() or out.shape[0] != x.shape[0]:
        raise tape.refusal("it repeats rows of the batch")
    tail, number = out.shape[1:], tape.number(x)
    wider = AffineMap(lambda value: value.expand(value.shape[0], *tail), (x,))
    return tape.bind(out, tape.emit(wider, number, chosen=tape.is_chosen(x)))


def _chosen(tape: Tape, call: Call) -> Any:
    """Any function of choices alone; those of which the arguments hold the number of rows are made for any."""
    if call.name in _RESHAPES:
        return _reshape(tape, call)
    return _expand(tape, call) if call.name in _EXPANSIONS else affine_call(tape, call)


def _same(tape: Tape, call: Call) -> Any:
    x = call.input
    number = tape.affine(x)
    out = call.run()
    same = out.dtype == x.dtype and out.device == x.device
    return tape.bind(out, number) if same else affine_call(tape, call)


def _dropout(tape: Tape, call: Call) -> Any:
    if call.get(2, "training", True) and call.get(1, "p", 0.5) > 0:
        raise tape.refusal("it is in train mode; call eval() on the network")
    return _same(tape, call)


def _log_softmax(tape: Tape, call: Call) -> Tensor:
    """The last step of a network: left out, as differences between classes are the same without it."""
    x = call.input
    why = f"it is not the network's last step over classes; let the network return what enters {call.name}"
    dim = call.get(1, "dim")
    if x.dim() != 2 or dim not in (1, -1) or call.get(3, "dtype") is not None:
        raise tape.refusal(why)
    return tape.bind_last(call.run(), why, tape.affine(x))


def _softmax(tape: Tape, call: Call) -> Tensor:
    raise tape.refusal("it is not piecewise affine; where it is the last step, let the network return what enters it")


def _batch_norm(tape: Tape, call: Call) -> Tensor:
    """Batch normalisation, or that of instances, by running statistics."""
    order = ("running_mean", "running_var", "weight", "bias")
    instances, exported = call.name == "instance_norm", isinstance(call.func, OpOverload)
    if call.func in (torch.batch_norm, torch.instance_norm) or exported:
        order = ("weight", "bias", "running_mean", "running_var")
    given = {name: call.get(place, name) for place, name in enumerate(order, 1)}
    mean, variance = given["running_mean"], given["running_var"]
    trained = call.get(5, "use_input_stats", True) if instances else call.get(5, "training", False)
    if instances and (trained or mean is None or variance is None):
        raise tape.refusal("it takes statistics of its input; running ones (track_running_stats=True) are affine")
    if trained or mean is None or variance is None:
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
    return affine_call(tape, call)


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
            return affine_call(tape, call)
        padding = [width // 2 for width in total]
    weight, bias, groups = weight.detach(), None if bias is None else bias.detach(), call.get(6, "groups", 1)
    size = tuple(x.shape[2:])
    operation = Convolution(weight, bias, stride, per_dimension(padding, dims), dilation, groups, size)
    return tape.record(call, operation, x)


_RESHAPES = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"}
_EXPANSIONS = {"expand", "expand_as", "broadcast_to"}
_SAME = {"contiguous", "clone", "detach", "to", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda"}
_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}

RULES: dict[str, Callable[[Tape, Call], Any]] = {
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(_DROPOUTS, _dropout),
    **dict.fromkeys(_EXPANSIONS, _expand),
    "": _chosen,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    **dict.fromkeys(("batch_norm", "instance_norm"), _batch_norm),
    **dict.fromkeys(("softmax", "softmin", "sigmoid"), _softmax),
    "log_softmax": _log_softmax,
    "linear": _linear,
    "matmul": _matmul,
}
