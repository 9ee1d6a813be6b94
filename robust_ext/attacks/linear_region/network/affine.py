"""Affine steps of a network and the transposes of their linear parts, for any number of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F


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
