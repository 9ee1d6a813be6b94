"""Targets: what an attack may see and query, with its forward and backward passes counted.

A target holds one ``nn.Module`` that maps a batch of inputs in the threat model's bounds to logits. Foolbox models
and ART classifiers become one through the adapters, which keep their preprocessing inside that module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from robust_ext.core.criteria import MISCLASSIFICATION, Criterion
from robust_ext.core.errors import OutOfTimeError
from robust_ext.core.reached import outermost_calls

if TYPE_CHECKING:
    from robust_ext.models.defended import Defended


@dataclass
class PassCounter:
    """Rows (single samples) that went ``forward``, and rows through which a gradient came ``backward``.

    ``watch`` is called after each forward pass, for progress bars. From ``deadline`` on (:func:`time.monotonic`), a
    forward pass raises OutOfTimeError.
    """

    forward: int = 0
    backward: int = 0
    watch: Callable[[PassCounter], None] | None = field(default=None, compare=False, repr=False)
    deadline: float | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        # What watches it stays in its process, as the clock does.
        return PassCounter, (self.forward, self.backward)

    def count_forward(self, rows: int) -> None:
        """Note that rows went forward."""
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise OutOfTimeError("the time that was given is over")
        self.forward += rows
        if self.watch is not None:
            self.watch(self)

    def count_backward(self, rows: int) -> None:
        """Note that gradients of rows came back."""
        self.backward += rows

    @contextmanager
    def until(self, deadline: float | None) -> Iterator[None]:
        """Forward passes inside the block end at a deadline; None for none."""
        before, self.deadline = self.deadline, deadline
        try:
            yield
        finally:
            self.deadline = before

    def snapshot(self) -> PassCounter:
        """The counts as they are now."""
        return PassCounter(self.forward, self.backward)

    def since(self, earlier: PassCounter) -> PassCounter:
        """Return the counts since ``earlier``."""
        return PassCounter(self.forward - earlier.forward, self.backward - earlier.backward)


class Counted(nn.Module):
    """A module that counts the rows through it; values and gradients are those of the module.

    ``counts`` is False where a part of the module is counted already, see :func:`count_calls`.
    """

    def __init__(self, module: nn.Module, counter: PassCounter, *, counts: bool = True) -> None:
        super().__init__()
        self.module = module
        self.counter = counter
        self.counts = counts
        self.training = module.training

    def forward(self, x: Tensor) -> Tensor:
        """Count and pass on ``(N, ...)``."""
        rows = x.shape[0]
        if self.counts:
            self.counter.count_forward(rows)
        out: Tensor = self.module(x)
        if self.counts and out.requires_grad:
            if out is x:
                # A hook on the caller's own tensor would stay on it, and count again at every later pass.
                out = out.view_as(out)
            out.register_hook(lambda _: self.counter.count_backward(rows))  # type: ignore[no-untyped-call]
        return out


@contextmanager
def count_calls(network: nn.Module, counter: PassCounter) -> Iterator[None]:
    """Count the rows ``(N, ...)`` through a network, whoever calls it and whichever of its layers they use.

    A backward pass is counted where a gradient arrives at the input.
    """

    def note(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0]
        rows = x.shape[0]
        counter.count_forward(rows)
        if x.requires_grad:
            x = x.view_as(x)
            x.register_hook(lambda _: counter.count_backward(rows))  # type: ignore[no-untyped-call]
        return (x, *args[1:])

    handle = network.register_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def count_all_calls(networks: Mapping[str, nn.Module], counter: PassCounter) -> Iterator[None]:
    """Count the rows ``(N, ...)`` through several networks; a part that is called by itself counts as its share.

    A share is that of its network's parameters. A backward pass is counted where a gradient arrives at the input.
    """
    # What is less than a row waits until it has come to one.
    waiting = {"forward": 0.0, "backward": 0.0}

    def add(way: str, count: Callable[[int], None], amount: float) -> None:
        whole = int(waiting[way] + amount + 1e-6)
        waiting[way] += amount - whole
        count(whole)

    def note(share: float, x: Tensor) -> Tensor:
        amount = share * len(x)
        add("forward", counter.count_forward, amount)
        if x.requires_grad:
            x = x.view_as(x)
            x.register_hook(lambda _: add("backward", counter.count_backward, amount))  # type: ignore[no-untyped-call]
        return x

    with outermost_calls(networks, dict.fromkeys(networks, note)):
        yield


@dataclass(frozen=True, kw_only=True)
class Target:
    """A classifier as attacks meet it.

    Args:
        module: From inputs ``(N, *input_shape)`` in ``bounds`` to logits ``(N, classes)``; in eval mode.
        bounds: Lowest and highest valid input value.
        classes: Number of columns of the logits, at least 2.
        input_shape: Shape of one input, without the batch.
        device: Where inputs must lie.
        counter: Rows sent through ``module``, kept by the module itself.
        defended: The classifier together with its detector, where there is one; ``module`` is a view of it.
        starting_points: Adversarial points to begin at, ``(N, S, *input_shape)``, S for each row.
        references: Points of other classes that the detector accepts, ``(N, R, *input_shape)``, one group a row.
        criterion: When a point is adversarial, by the labels that the attack is given.
    """

    module: nn.Module
    bounds: tuple[float, float]
    classes: int
    input_shape: tuple[int, ...]
    device: torch.device
    counter: PassCounter = field(default_factory=PassCounter)
    defended: Defended | None = None
    starting_points: Tensor | None = None
    references: Tensor | None = None
    criterion: Criterion = MISCLASSIFICATION


def module_device(module: nn.Module) -> torch.device:
    """Device of the first parameter or buffer; the CPU for a module that has none."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")
