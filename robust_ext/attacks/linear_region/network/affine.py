"""Affine steps with their transposes, and the rule that records any function that can be affine as such a step.

Numbers test whether a call is affine in all tensors that depend on the input together, and whether it treats rows
alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from robust_ext.attacks.linear_region.network.tape import Call, Tape, out_of_place, snapshot, tensors_in

Function = Callable[..., Any]


class AffineMap:
    """An affine function of one or more inputs ``(rows, ...)`` that treats rows alike, and its transpose.

    Without a ``transpose``, automatic differentiation computes the vector-Jacobian product at ``examples`` of the
    inputs. It is the same at every point, so all products with the same number of rows share one graph.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        examples: Sequence[Tensor] = (),
        transpose: Callable[[Tensor], tuple[Tensor, ...]] | None = None,
    ) -> None:
        self._function, self._transpose = function, transpose
        self._shapes = [(one.detach().new_zeros(()), one.shape[1:]) for one in examples]
        self._graph: tuple[list[Tensor], Tensor] | None = None

    def apply(self, *inputs: Tensor) -> Tensor:
        """Return the result."""
        return self._function(*inputs)

    def adjoint(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """Return the transpose of the linear part, one result for each input."""
        rows = gradient.shape[0]
        if self._transpose is not None:
            return self._transpose(gradient)
        if not rows:
            return tuple(zero.new_zeros(0, *tail) for zero, tail in self._shapes)
        if self._graph is None or self._graph[1].shape[0] != rows:
            with torch.enable_grad():
                points = [zero.expand(rows, *tail).requires_grad_() for zero, tail in self._shapes]
                self._graph = points, self.apply(*points)
        points, result = self._graph
        return torch.autograd.grad(result, points, gradient, retain_graph=True)


class ChannelScale(AffineMap):
    """``scale * x + shift`` for each channel, both of shape ``(1, C, 1, ...)``; a batch normalisation."""

    def __init__(self, scale: Tensor, shift: Tensor) -> None:
        super().__init__(lambda x: torch.addcmul(shift, x, scale), transpose=lambda gradient: (gradient * scale,))
        self.scale, self.shift = scale, shift


@dataclass(frozen=True)
class Convolution(AffineMap):
    """A convolution in one to three dimensions of inputs of the spatial ``size``; padded with zeros at both ends."""

    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    size: tuple[int, ...]

    def apply(self, *inputs: Tensor) -> Tensor:
        """See :class:`AffineMap`."""
        function = getattr(F, f"conv{len(self.size)}d")
        out: Tensor = function(inputs[0], self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
        return out

    def adjoint(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """See :class:`AffineMap`."""
        kernel = tuple(self.weight.shape[2:])
        # CPUs have transposed kernels for many channels: with one, a matrix product is three times faster.
        one_channel = self.weight.dim() == 4 and self.weight.shape[1] == 1 and self.groups == 1
        if one_channel and gradient.device.type == "cpu" and gradient.shape[0] > 0:
            columns = self.weight.flatten(1).T @ gradient.flatten(2)
            return (F.fold(columns, self.size, kernel, self.dilation, self.padding, self.stride),)
        # A stride may step over the last values, which the transpose must still return.
        sizes = zip(self.size, kernel, self.stride, self.padding, self.dilation, strict=True)
        over = [(n + 2 * p - d * (k - 1) - 1) % s for n, k, s, p, d in sizes]
        function = getattr(F, f"conv_transpose{len(self.size)}d")
        return (function(gradient, self.weight, None, self.stride, self.padding, over, self.groups, self.dilation),)

    def scaled(self, after: ChannelScale) -> Convolution:
        """Return the convolution followed by a scaling of its channels."""
        scale, shift = after.scale.flatten(), after.shift.flatten()
        bias = shift if self.bias is None else torch.addcmul(shift, self.bias, scale)
        return replace(self, weight=self.weight * scale.view(-1, *[1] * (self.weight.dim() - 1)), bias=bias)


AFFINE = {
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


def record_affine(tape: Tape, call: Call) -> Any:
    """Record a call that is affine in all tensors that depend on the input together, with constants held."""
    inputs = list({id(t): t for t in tensors_in((call.args, call.kwargs)) if tape.depends(t)}.values())
    numbers, before = [tape.number(one) for one in inputs], [snapshot(one) for one in inputs]
    functions = _functions(tape, call, inputs)
    given = call.run()
    results = _listed(given)
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


def _listed(given: Any) -> list[Tensor]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _functions(tape: Tape, call: Call, inputs: Sequence[Tensor]) -> list[Function]:
    """Return the call as a function of its inputs: with constants unchanged, and with the first row of each repeated.

    What a constant's first dimension means decides between the two.
    """
    leaves, spec = tree_flatten((call.args, call.kwargs))
    places, func = {id(tensor): place for place, tensor in enumerate(inputs)}, out_of_place(call.func)
    kept: list[Any] = [
        None if id(leaf) in places else snapshot(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves
    ]
    sources = [places.get(id(leaf)) for leaf in leaves]
    batched = [isinstance(one, Tensor) and one.dim() > 0 and one.shape[0] == tape.rows for one in kept]
    differ = any(flag and not bool((one == one[:1]).all()) for one, flag in zip(kept, batched, strict=True))
    first = [one[:1].clone() if flag else one for one, flag in zip(kept, batched, strict=True)]

    def function(repeat: bool, *given: Tensor) -> Any:
        if repeat and differ:
            raise tape.refusal("a constant has a different value in each row of the batch")
        held = [
            one.expand(len(given[0]), *one.shape[1:]) if repeat and flag else one
            for one, flag in zip(first if repeat else kept, batched, strict=True)
        ]
        read = [one if source is None else given[source] for one, source in zip(held, sources, strict=True)]
        args, kwargs = tree_unflatten(read, spec)
        return func(*args, **kwargs)

    return [partial(function, False), partial(function, True)]


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
                recorded, out, others, mixed = (_listed(function(*one)) for one in (before, first, second, between))
                alone = [_listed(function(*(one[row : row + 1] for one in first))) for row in (0, count - 1)]
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
