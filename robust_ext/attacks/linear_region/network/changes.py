"""Which module of a network is random, keeps a state, or looks at other rows."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.attacks.linear_region.network.calls import tensors_in
from robust_ext.core.target import frozen

# What rounding makes of values, relative to the largest.
_ROUNDING = 1e-4


def changing_module(network: nn.Module, points: Tensor, *, beside: bool) -> str | None:
    """Name and class of the innermost module that first returns something else for the same; None where none does.

    Args:
        network: From ``(N, ...)``.
        points: At least two rows.
        beside: Whether the first row is looked at with another beside it, rather than all rows once more.
    """
    others = torch.cat([points[:1], points[:1].expand_as(points[1:])]) if beside else points
    calls = [_calls(network, given.clone()) for given in (points, others)]
    name: str
    for (name, before, after), (_, before_again, after_again) in zip(*calls, strict=False):
        kept = slice(1) if beside else slice(None)
        if _same(before, before_again, kept) and not _same(after, after_again, kept):
            return name
    return None


def _calls(network: nn.Module, x: Tensor) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    """Module, inputs and outputs of each call, innermost first."""
    calls: list[tuple[str, list[Tensor], list[Tensor]]] = []
    entered: list[list[Tensor]] = []

    def enter(_module: nn.Module, args: Any) -> None:
        entered.append([one.detach().clone() for one in tensors_in(list(args))])

    with ExitStack() as stack:
        stack.enter_context(frozen(network))
        stack.enter_context(torch.no_grad())
        for name, module in network.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            shown = f"{name or 'the network'} ({type(module).__name__})"

            def leave(_module: nn.Module, _args: Any, out: Any, shown: str = shown) -> None:
                calls.append((shown, entered.pop(), [one.detach().clone() for one in tensors_in(out)]))

            stack.enter_context(module.register_forward_pre_hook(enter))
            stack.enter_context(module.register_forward_hook(leave))
        network(x)
    return calls


def _same(first: list[Tensor], second: list[Tensor], rows: slice) -> bool:
    if [one.shape for one in first] != [one.shape for one in second]:
        return False
    for one, other in zip(first, second, strict=True):
        gap = (one[rows].double() - other[rows].double()).abs()
        if gap.numel() and not bool(gap.max() <= _ROUNDING * one.double().abs().max()):
            return False
    return True
