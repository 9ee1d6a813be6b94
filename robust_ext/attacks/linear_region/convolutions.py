"""Convolutions and their transposes, see :mod:`robust_ext.attacks.linear_region.operations`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from robust_ext.attacks.linear_region.operations import Operation

_DIRECT = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True)
class Convolution(Operation):
    """A convolution in one to three dimensions, direct or transposed.

    Args:
        weight: As the network holds it.
        bias: One value for each channel of the result, or None.
        stride: For each dimension, as ``padding``, ``dilation`` and ``output_padding``.
        padding: Zeros at both ends.
        dilation: Distance of the taps.
        groups: Groups of channels.
        transposed: Whether it is a transposed convolution.
        output_padding: What the transposed one adds at the far end; for a direct one, that of its transpose.
    """

    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool
    output_padding: tuple[int, ...]

    @classmethod
    def direct(
        cls,
        weight: Tensor,
        bias: Tensor | None,
        *,
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
        size: Sequence[int],
    ) -> Convolution:
        """A direct convolution of inputs of spatial ``size``."""
        # Where a stride steps over the last values, the transpose must still return as many.
        over = tuple(
            (n + 2 * p - d * (k - 1) - 1) % s
            for n, k, s, p, d in zip(size, weight.shape[2:], stride, padding, dilation, strict=True)
        )
        return cls(weight, bias, stride, padding, dilation, groups, False, over)

    def apply(self, inputs: Sequence[Tensor], *, offset: bool) -> Tensor:
        """See :class:`Operation`."""
        bias = self.bias if offset else None
        return self._widened(inputs[0], bias) if self.transposed else self._direct(inputs[0], bias)

    def adjoint(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """See :class:`Operation`."""
        if self.transposed:
            return (self._direct(gradient, None),)
        return (self._folded(gradient) if self._folds(gradient) else self._widened(gradient, None),)

    def scaled(self, scale: Tensor, shift: Tensor) -> Convolution:
        """The convolution followed by ``scale * y + shift`` for each channel, both ``(C,)``."""
        shape = [1] * self.weight.dim()
        shape[0] = -1
        bias = shift if self.bias is None else torch.addcmul(shift, self.bias, scale)
        return replace(self, weight=self.weight * scale.view(shape), bias=bias)

    def _direct(self, x: Tensor, bias: Tensor | None) -> Tensor:
        function = _DIRECT[self.weight.dim() - 2]
        return function(x, self.weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def _widened(self, x: Tensor, bias: Tensor | None) -> Tensor:
        function = _TRANSPOSED[self.weight.dim() - 2]
        settings = (self.stride, self.padding, self.output_padding, self.groups, self.dilation)
        return function(x, self.weight, bias, *settings)

    def _folds(self, gradient: Tensor) -> bool:
        # The transposed kernels of CPUs are made for many channels: with one, a matrix product is three times faster.
        one = self.weight.dim() == 4 and self.weight.shape[1] == 1 and self.groups == 1
        return one and gradient.device.type == "cpu" and gradient.shape[0] > 0

    def _folded(self, gradient: Tensor) -> Tensor:
        size = tuple(
            (n - 1) * s - 2 * p + d * (k - 1) + 1 + o
            for n, k, s, p, d, o in zip(
                gradient.shape[2:],
                self.weight.shape[2:],
                self.stride,
                self.padding,
                self.dilation,
                self.output_padding,
                strict=True,
            )
        )
        columns = self.weight.flatten(1).T @ gradient.flatten(2)
        kernel = self.weight.shape[2:]
        return F.fold(columns, size, kernel, dilation=self.dilation, padding=self.padding, stride=self.stride)
