"""How functions that move, copy, join or average values become steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.calls import Call, tensors_in
from robust_ext.attacks.linear_region.operations import Concatenate, Linearity, Pad, Reshape

if TYPE_CHECKING:
    from robust_ext.attacks.linear_region.recording import Recorder


def _pad(recorder: Recorder, call: Call) -> Any:
    x, widths = call.input, tuple(call.get(1, "pad"))
    if call.get(2, "mode", "constant") != "constant":
        return linear_function(recorder, call)
    if len(widths) >= 2 * x.dim():
        raise recorder.refusal("it pads the batch dimension")
    value = call.get(3, "value")
    step = recorder.emit(Pad(widths, 0.0 if value is None else float(value)), recorder.number(x))
    return recorder.bind(call.run(), step)


def _concatenate(recorder: Recorder, call: Call) -> Tensor:
    parts = list(call.get(0, "tensors"))
    out: Tensor = call.run()
    dim = call.get(1, "dim", call.kwargs.get("axis", 0)) % out.dim()
    if dim == 0:
        raise recorder.refusal("it works along the batch dimension")
    if call.name == "stack":
        shapes = [(*part.shape[:dim], 1, *part.shape[dim:]) for part in parts]
    else:
        shapes = [tuple(part.shape) for part in parts]
    constants: list[Tensor | None] = []
    numbers = []
    for part, shape in zip(parts, shapes, strict=True):
        if not recorder.depends(part):
            constants.append(one_row(recorder, part.detach().reshape(shape)))
            continue
        constants.append(None)
        number = recorder.number(part)
        same = shape == tuple(part.shape)
        numbers.append(number if same else recorder.emit(Reshape(tuple(part.shape), shape, recorder.rows), number))
    sizes = tuple(shape[dim] for shape in shapes)
    return recorder.bind(out, recorder.emit(Concatenate(tuple(constants), sizes, dim), *numbers))


def _reshape(recorder: Recorder, call: Call) -> Tensor:
    x = call.input
    number, inside = recorder.number(x), tuple(x.shape)
    out: Tensor = call.run()
    if out.dtype != x.dtype:
        raise recorder.refusal("it changes the dtype")
    if out.dim() == 0 or out.shape[0] % recorder.rows:
        raise recorder.refusal("it moves the batch dimension")
    return recorder.bind(out, recorder.emit(Reshape(inside, tuple(out.shape), recorder.rows), number))


def _same(recorder: Recorder, call: Call) -> Any:
    x = call.input
    number = recorder.number(x)
    out = call.run()
    if out.dtype == x.dtype and out.device == x.device:
        return recorder.bind(out, number)
    return linear_function(recorder, call)


def _dropout(recorder: Recorder, call: Call) -> Any:
    if call.get(2, "training", True) and call.get(1, "p", 0.5) > 0:
        raise recorder.refusal("it is in train mode; call eval() on the network")
    number = recorder.number(call.input)
    return recorder.bind(call.run(), number)


def _expand(recorder: Recorder, call: Call) -> Tensor:
    x = call.input
    number = recorder.number(x)
    out: Tensor = call.run()
    if out.dim() != x.dim() or out.shape[0] != x.shape[0]:
        raise recorder.refusal("it repeats rows of the batch")
    return recorder.bind(out, recorder.emit(repeated(x, out.shape[1:]), number))


def repeated(x: Tensor, tail: tuple[int, ...]) -> Linearity:
    """The step that repeats the entries of ``x`` along dimensions of size 1."""
    return Linearity(lambda value: value.expand(value.shape[0], *tail), tuple(x.shape), x.detach().new_empty(0))


def one_row(recorder: Recorder, value: Tensor) -> Tensor:
    """The first row of a constant that has a row for each of the batch, all the same."""
    if not bool((value == value[:1]).all()):
        raise recorder.refusal("a constant has a different value in each row of the batch")
    return value[:1].clone()


def linear_function(recorder: Recorder, call: Call) -> Any:
    """A function of one tensor that is linear and treats rows alike, without a transpose of its own here."""
    met = [t for t in tensors_in((call.args, call.kwargs)) if recorder.depends(t)]
    if len(met) != 1:
        raise recorder.refusal("it combines several results that depend on the input")
    (x,) = met
    number, function = recorder.number(x), call.function_of(x)
    given = call.run()
    results = list(given) if isinstance(given, (list, tuple)) else [given]
    if not _keeps_rows(function, x, results):
        raise recorder.refusal("it mixes the rows of the batch or moves the batch dimension")
    for place, result in enumerate(results):
        part = function if isinstance(given, Tensor) else _item(function, place)
        step = recorder.emit(Linearity(part, tuple(x.shape), x.detach().new_empty(0)), number)
        recorder.bind(result, step)
    return given


def _item(function: Callable[[Tensor], Any], place: int) -> Callable[[Tensor], Tensor]:
    def part(x: Tensor) -> Tensor:
        out: Tensor = function(x)[place]
        return out

    return part


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
    expected = [(count, *result.shape[1:]) for result in results]
    return [tuple(result.shape) for result in tried] == expected


_LINEAR = {
    *("avg_pool1d", "avg_pool2d", "avg_pool3d", "interpolate", "upsample", "mean", "sum", "einsum", "mm", "bmm"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "unfold", "fold", "channel_shuffle"),
    *("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T", "mT", "repeat"),
    *("__getitem__", "narrow", "select", "index_select", "split", "chunk", "unbind", "tensor_split"),
    *("repeat_interleave", "pixel_shuffle", "pixel_unshuffle"),
}
_RESHAPES = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"}
_SAME = {"contiguous", "clone", "detach", "to", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda"}
_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}

RULES: dict[str, Callable[[Recorder, Call], Any]] = {
    **dict.fromkeys(_LINEAR, linear_function),
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(_DROPOUTS, _dropout),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), _concatenate),
    **dict.fromkeys(("expand", "expand_as"), _expand),
    "pad": _pad,
}
