"""Affine steps of a network, applied again without the network, and the transposes of their linear parts.

A step maps tensors whose first dimension holds the rows of a batch (or a fixed number of entries for each row, such
as tokens) and never mixes rows, so it can be applied to any number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

_DIRECT = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class AffineMap:
    """An affine function of one or more results; the transpose of its linear part is its vector-Jacobian product.

    That product is the same at every point, so one graph is kept and used for all products with as many rows.
    Subclasses are functions whose transpose is faster without a graph.

    Args:
        function: The function.
        examples: Its inputs as recorded; their shapes, dtypes and devices are kept.
    """

    def __init__(self, function: Callable[..., Tensor], examples: Sequence[Tensor]) -> None:
        self._function = function
        self._shapes = [(one.detach().new_zeros(()), one.shape[1:]) for one in examples]
        self._graph: tuple[list[Tensor], Tensor] | None = None

    def apply(self, *inputs: Tensor) -> Tensor:
        """The result."""
        return self._function(*inputs)

    def adjoint(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """The transpose of the linear part, one result for each input."""
        rows = gradient.shape[0]
        if not rows:
            return tuple(zero.new_zeros(0, *tail) for zero, tail in self._shapes)
        if self._graph is None or self._graph[1].shape[0] != rows:
            with torch.enable_grad():
                points = [zero.expand(rows, *tail).requires_grad_() for zero, tail in self._shapes]
                self._graph = points, self.apply(*points)
        points, result = self._graph
        return torch.autograd.grad(result, points, gradient, retain_graph=True)


@dataclass(frozen=True)
class Reshape(AffineMap):
    """A view: every row keeps its values in their order.

    Args:
        before: Shape of the recorded input.
        after: Shape of the recorded result.
        rows: Rows of the recorded batch.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    rows: int

    def apply(self, *inputs: Tensor) -> Tensor:
        """See :class:`AffineMap`."""
        return self._shaped(inputs[0], self.before, self.after)

    def adjoint(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """See :class:`AffineMap`."""
        return (self._shaped(gradient, self.after, self.before),)

    def _shaped(self, x: Tensor, shape: tuple[int, ...], wanted: tuple[int, ...]) -> Tensor:
        rows = x.shape[0] // (shape[0] // self.rows)
        return x.reshape(rows * (wanted[0] // self.rows), *wanted[1:])


@dataclass(frozen=True)
class ChannelScale(AffineMap):
    """``scale * x + shift`` for each channel, both of shape ``(1, C, 1, ...)``; a batch normalisation."""

    scale: Tensor
    shift: Tensor

    def apply(self, *inputs: Tensor) -> Tensor:
        """See :class:`AffineMap`."""
        return torch.addcmul(self.shift, inputs[0], self.scale)

    def adjoint(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """See :class:`AffineMap`."""
        return (gradient * self.scale,)


@dataclass(frozen=True)
class Linear(AffineMap):
    """``x W' + b`` over the last dimension: weight ``(out, in)``, bias ``(out,)`` or None."""

    weight: Tensor
    bias: Tensor | None

    def apply(self, *inputs: Tensor) -> Tensor:
        """See :class:`AffineMap`."""
        return F.linear(inputs[0], self.weight, self.bias)

    def adjoint(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """See :class:`AffineMap`."""
        return (gradient @ self.weight,)


@dataclass(frozen=True)
class Convolution(AffineMap):
    """A convolution in one to three dimensions, direct or transposed.

    Args:
        weight: As the network holds it.
        bias: One value for each channel of the result, or None.
        stride: For each dimension, as ``padding``, ``dilation`` and ``output_padding``.
        padding: Zeros at both ends.
        dilation: Distance of the taps.
        groups: Groups of channels.
        size: Spatial size of the input.
        transposed: Whether it is a transposed convolution.
        output_padding: What the transposed one adds at the far end; for a direct one, that of its transpose.
    """

    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    size: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]

    def apply(self, *inputs: Tensor) -> Tensor:
        """See :class:`AffineMap`."""
        return (self._transposed if self.transposed else self._direct)(inputs[0], self.bias)

    def adjoint(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """See :class:`AffineMap`."""
        if self.transposed:
            return (self._direct(gradient, None),)
        # The transposed kernels of CPUs are made for many channels: with one, a matrix product is three times faster.
        one_channel = self.weight.dim() == 4 and self.weight.shape[1] == 1 and self.groups == 1
        if not one_channel or gradient.device.type != "cpu" or gradient.shape[0] == 0:
            return (self._transposed(gradient, None),)
        columns = self.weight.flatten(1).T @ gradient.flatten(2)
        kernel = tuple(self.weight.shape[2:])
        return (F.fold(columns, self.size, kernel, self.dilation, self.padding, self.stride),)

    def scaled(self, scale: Tensor, shift: Tensor) -> Convolution:
        """The direct convolution followed by ``scale * y + shift`` for each channel, both ``(C,)``."""
        bias = shift if self.bias is None else torch.addcmul(shift, self.bias, scale)
        return replace(self, weight=self.weight * scale.view(-1, *[1] * (self.weight.dim() - 1)), bias=bias)

    def _direct(self, x: Tensor, bias: Tensor | None) -> Tensor:
        function = _DIRECT[self.weight.dim() - 2]
        return function(x, self.weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def _transposed(self, x: Tensor, bias: Tensor | None) -> Tensor:
        function = _TRANSPOSED[self.weight.dim() - 2]
        settings = (self.stride, self.padding, self.output_padding, self.groups, self.dilation)
        return function(x, self.weight, bias, *settings)
