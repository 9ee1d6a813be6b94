"""Gradients of inputs alone: inside a defense, and in place of the gradients that a defense does not have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from robust_ext.core.errors import ModelError

VJP = Callable[[Tensor], Sequence[Tensor | None]]
"""From the gradient of an output to the gradients of the inputs it was computed from."""


def wants_gradient(*inputs: Tensor) -> bool:
    """Return whether the caller may take gradients of one of the inputs."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)


def detach(tensor: Tensor) -> Tensor:
    """The tensor without its graph, also inside of :class:`robust_ext.models.layer_backward.StraightThrough`."""
    with torch._C.DisableTorchFunction():
        return tensor.detach()


def row_gradient(loss: Callable[[Tensor], Tensor], point: Tensor, *, differentiable: bool = False) -> Tensor:
    """The gradient ``(N, ...)`` of each row's own loss ``(N,)``, for the inner steps of a defense.

    It works where gradients are switched off, and leaves none behind, neither on ``point`` nor on parameters. Losses
    are summed and never averaged, so that a row's gradient does not depend on the size of the batch.

    With ``differentiable`` it can itself be differentiated where gradients are enabled, for gradients through the
    steps: a second graph, of no use before a sign, whose derivative is 0.

    Example:
        >>> row_gradient(lambda x: x.square().sum(1), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([[2., 4.],
                [6., 8.]])
    """
    keep = differentiable and wants_gradient(point)
    with torch.inference_mode(False), torch.enable_grad():
        inner = point if keep else _leaf(point)
        losses = loss(inner)
        if losses.shape != point.shape[:1]:
            raise ModelError(
                f"inner loss: got shape {tuple(losses.shape)} for {len(point)} rows, expected one loss for each row, "
                f"shape ({len(point)},); neither average nor sum over the batch"
            )
        (gradient,) = _differentiate(losses, [inner], torch.ones_like(losses), create_graph=keep, retain_graph=keep)
    if gradient is None:
        raise ModelError("inner loss: does not depend on the point; it must be computed from the argument it is given")
    return gradient


def attach(compute: Callable[..., tuple[Tensor, VJP]], *inputs: Tensor) -> Tensor:
    """A value with a gradient of your own; parameters never get one from ``backward``.

    ``compute`` maps the detached inputs to the value and to what pulls its gradients back to them. It is called once,
    with gradients switched off; the value can be differentiated once, any number of times.
    """
    value: Tensor = _Attached.apply(compute, *inputs)  # type: ignore[no-untyped-call]
    return value


def attach_checkpoint(compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """A value with its own gradient of the inputs alone, no graph held: each backward pass computes it once more."""

    def both(*detached: Tensor) -> tuple[Tensor, VJP]:
        return compute(*detached), lambda cotangent: with_vjp(compute, *detached)[1](cotangent)

    return attach(both, *inputs)


def with_vjp(compute: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, VJP]:
    """A value, detached, and what pulls gradients back through the graph it was computed by.

    The latter raises ModelError where the value depends on none of the inputs in a way that can be differentiated.
    """
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [_leaf(tensor) if tensor.is_floating_point() else tensor for tensor in inputs]
        value = compute(*leaves)

    def vjp(cotangent: Tensor) -> list[Tensor | None]:
        with torch.inference_mode(False):
            gradients = _differentiate(value, leaves, cotangent, retain_graph=True)
        if all(gradient is None for gradient in gradients):
            raise ModelError(
                "no gradient comes back to the input: the output does not depend on it in a way that can be "
                "differentiated; approximate that part, see robust_ext.models.bpda.BPDA"
            )
        return gradients

    return detach(value), vjp


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., tuple[Tensor, VJP]], *inputs: Tensor) -> Tensor:
        detached = [detach(tensor) for tensor in inputs]
        value, ctx.vjp = compute(*detached)
        # An output must not be its own input under another name, and not of inference mode.
        return value.clone() if value.is_inference() or any(value is tensor for tensor in detached) else detach(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.vjp(cotangent))


def _leaf(tensor: Tensor) -> Tensor:
    """A leaf with the tensor's values; a copy where they were made in inference mode, which autograd refuses."""
    return (tensor.clone() if tensor.is_inference() else detach(tensor)).requires_grad_()


def _differentiate(
    value: Tensor, leaves: Sequence[Tensor], cotangent: Tensor, *, create_graph: bool = False, retain_graph: bool
) -> list[Tensor | None]:
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not value.requires_grad or not wanted:
        return [None] * len(leaves)
    kept: dict[str, bool] = {"create_graph": create_graph, "retain_graph": retain_graph}
    gradients = iter(torch.autograd.grad(value, wanted, cotangent, allow_unused=True, **kept))
    return [next(gradients) if leaf.requires_grad else None for leaf in leaves]
