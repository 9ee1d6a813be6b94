"""A module in the place of another one: what watches the other one, and counts its rows, sees the queries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from robust_ext.core.target import Counted, PassCounter
from robust_ext.models.vjp import VJP, attach, wants_gradient, with_vjp

_HOOKS = tuple(key for key in vars(nn.Module()) if key.startswith(("_forward_", "_backward_")))


class Bare(nn.Module):
    """A module without its hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = False

    def forward(self, x: Tensor) -> Tensor:
        """What the module's forward pass returns for ``(N, ...)``."""
        out: Tensor = self.module.forward(x)
        return out


class StandIn(nn.Module):
    """What is queried in the place of a module, with that module's hooks; parameters get no gradients.

    Args:
        original: Whose hooks it has, those that are registered later too.
        inside: What runs in its place, which calls the original by :class:`Bare` alone, any number of times.
        counter: Of rows, for which a queried row is one of the original's, whatever is counted inside; None to leave
            the counting to what is inside.
        temperature: What logits are divided by.
    """

    def __init__(
        self, original: nn.Module, inside: nn.Module, *, counter: PassCounter | None = None, temperature: float = 1.0
    ) -> None:
        super().__init__()
        # The registers themselves, so that hooks come and go for both.
        vars(self).update({key: vars(original)[key] for key in _HOOKS})
        self.original = original
        self.inside = inside
        self.counter = counter
        self.temperature = temperature
        self.training = False
        self._counted = any(isinstance(part, Counted) and part.counter is counter for part in original.modules())

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(N, K)`` of ``(N, ...)``."""
        if wants_gradient(x):
            return attach(self._differentiable, x)
        with torch.no_grad(), self._once("forward", len(x)):
            return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        out: Tensor = self.inside(x)
        return out if self.temperature == 1 else out / self.temperature

    def _differentiable(self, x: Tensor) -> tuple[Tensor, VJP]:
        rows = len(x)
        with self._once("forward", rows):
            value, pull = with_vjp(self._run, x)

        def vjp(cotangent: Tensor) -> Sequence[Tensor | None]:
            with self._once("backward", rows):
                return pull(cotangent)

        return value, vjp

    @contextmanager
    def _once(self, way: str, rows: int) -> Iterator[None]:
        """What is counted inside the block counts as these rows."""
        counter = self.counter
        if counter is None:
            yield
            return
        before, watch = counter.snapshot(), counter.watch
        counter.watch = None
        try:
            yield
        finally:
            spent, counter.watch = counter.since(before), watch
            counter.forward, counter.backward = before.forward, before.backward
            if self._counted or getattr(spent, way):
                getattr(counter, f"count_{way}")(rows)
