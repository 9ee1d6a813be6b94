"""One forward and backward pass of any module, with a note of which module and operation did what to the gradient.

Hooks on modules give the name of the module that runs, a ``TorchFunctionMode`` each operation inside it, and hooks on
the nodes of the graph what a gradient is before and after each. So operations in a ``forward`` are found that no hook
on a module sees: ``x.detach()``, ``torch.round`` or a block under ``torch.no_grad()``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from robust_ext.evaluations.causes.calls import Call, Operation, Place, copied, tensors

# What takes gradients, here inside a forward.
_TAKING = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
# What takes a number or an array out of a tensor, and its graph with it.
_LEAVING = ("item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__")


class Cut(NamedTuple):
    """An operation that took a tensor with a gradient and returned one without, perhaps as gradients are off there."""

    place: Place
    moment: int
    graph_off: bool


class Killed(NamedTuple):
    """A node of the graph that a gradient went into and came out of as zero, or else as NaN or infinity.

    ``node`` is its name, as in ``RoundBackward0``; ``rows`` are those that it happened to, bool ``(N,)``.
    """

    place: Place
    node: str
    zero: bool
    rows: Tensor


def _with_gradient(value: Any) -> list[Tensor]:
    return [one for one in tensors(value) if one.requires_grad]


class PassTrace(TorchFunctionMode):
    """The trace of one pass; filled by :func:`traced`.

    Attributes:
        calls: Calls of modules that returned, those inside a module before its own.
        changed: The innermost call after which the watched tensor was no longer what it had been.
        cuts: Operations that took a tensor with a gradient and returned none with one.
        killed: Nodes that a gradient did not come out of as it went in, from the output to the input.
        failed: Where an operation raised.
        last_node: Where the backward pass came to last.
        taking: The innermost module that takes gradients of its own while it runs; None where none does.
        hooked: For hooks that a forward puts on tensors: the module, a gradient, and what the hook made of it.
    """

    def __init__(self, root: nn.Module, rows: int, watched: Tensor | None) -> None:
        super().__init__()
        self.rows = rows
        self._watched = None if watched is None else (watched, watched.clone())
        self.changed: Call | None = None
        self.calls: list[Call] = []
        self.cuts: list[Cut] = []
        self.killed: list[Killed] = []
        self.failed: Place | None = None
        self.last_node: Place | None = None
        self.taking: Call | None = None
        self.hooked: list[tuple[Call, Tensor, Tensor]] = []
        self._names = {id(module): name for name, module in root.named_modules()}
        self._stack: list[Call] = []
        self._nodes: dict[Any, Place] = {}
        self._moment = 0
        self._alive = 0

    @property
    def running(self) -> Call | None:
        """The innermost module that runs, or in which an error arose."""
        return self._stack[-1] if self._stack else None

    @property
    def first_calls(self) -> list[Call]:
        """The first call of each module, those inside a module before its own."""
        found = dict[int, Call]()
        for call in self.calls:
            found.setdefault(id(call.module), call)
        return list(found.values())

    @property
    def cut(self) -> Cut | None:
        """The operation by which the gradient was lost: the first that cut it after the last that did not."""
        return next((cut for cut in self.cuts if cut.moment > self._alive), None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note what it did to the graph."""
        name: str = getattr(func, "__name__", type(func).__name__)
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        if not self._stack:
            return func(*args, **(kwargs or {}))
        call = self._stack[-1]
        if func in _TAKING:
            self.taking = self.taking or call
        if name == "register_hook" and getattr(args[1], "func", None) != self._note_gradient:
            return func(args[0], partial(self._note_hook, call, args[1]))
        inputs, kept = _with_gradient((args, kwargs)), None
        if inputs:
            self._adopt(inputs, "")
            kept = Operation(name, func, *copied((args, kwargs or {})))
        try:
            out = func(*args, **(kwargs or {}))
        except Exception:
            self.failed = self.failed or Place(call, name)
            raise
        outputs = tensors(out)
        if outputs or isinstance(out, Tensor) or name in _LEAVING:
            self._moment += 1
            call.operations.append(name)
            if any(one.requires_grad for one in outputs):
                self._alive = self._moment
                self._adopt(_with_gradient(outputs), name)
            elif inputs and not _inside_function():
                # Where gradients are off, the outermost module that switched them off.
                off = not torch.is_grad_enabled()
                outside = [one for one in self._stack if one.grad_mode] if off else []
                self.cuts.append(Cut(Place(outside[-1] if outside else call, name), self._moment, off))
            if kept is not None and outputs:
                call.inline.append(kept)
        return out

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a module is called."""
        given = _with_gradient((args, kwargs))
        if self._stack:
            self._stack[-1].leaf = False
            # What no operation made, such as functions with a backward pass of their own, is the caller's.
            self._adopt(given, "")
        name, copies = self._names[id(module)], copied((args, kwargs))
        call = Call(name, module, copies[0], copies[1], module, torch.is_grad_enabled())
        self._stack.append(call)
        with torch._C.DisableTorchFunction():
            for tensor in given[:1]:
                tensor.register_hook(partial(self._note_gradient, call, "passed"))  # type: ignore[no-untyped-call]

    def leave(self, module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        """Note that a module returned."""
        while self._stack and self._stack[-1].module is not module:
            # It raised, and its error was caught inside.
            self._stack.pop()
        if not self._stack:
            return
        call, found = self._stack[-1], _with_gradient(output)
        self._adopt(found, "")
        self._stack.pop()
        self.calls.append(call)
        if call.leaf:
            call.inline.clear()
        with torch._C.DisableTorchFunction():
            given, returned = call.points, tensors(output)
            call.same_shape = [one.shape for one in given] == [one.shape for one in returned]
            call.finite = _finite(given), _finite(returned)
            if self._watched is not None and self.changed is None and not torch.equal(*self._watched):
                self.changed = call
        for tensor in found[:1]:
            if tensor.grad_fn is not None:
                tensor.register_hook(partial(self._note_gradient, call, "gradient"))  # type: ignore[no-untyped-call]

    def _adopt(self, found: list[Tensor], operation: str) -> None:
        """Hook the nodes behind tensors that no place is known of yet, and give them this one."""
        place, waiting = Place(self._stack[-1], operation), [one.grad_fn for one in found]
        while waiting:
            node = waiting.pop()
            if node is None or node in self._nodes or not node.next_functions:
                continue
            self._nodes[node] = place
            node.register_prehook(partial(self._begin, place))
            node.register_hook(partial(self._finish, place, node.name()))
            waiting += [following for following, _ in node.next_functions]

    def _begin(self, place: Place, _gradients: tuple[Tensor | None, ...]) -> None:
        self.last_node = place

    def _finish(self, place: Place, node: str, down: tuple[Tensor | None, ...], up: tuple[Tensor | None, ...]) -> None:
        into, out = self._states(up), self._states(down)
        if into is not None and out is not None:
            for before, after, zero in zip(into, out, (True, False), strict=True):
                if bool((rows := before & ~after).any()):
                    self.killed.append(Killed(place, node, zero, rows.cpu()))

    def _states(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor] | None:
        """Return masks of rows with any non-zero gradient, and with finite gradients only."""
        given = [one for one in gradients if one is not None]
        if not given:
            return None
        return (
            torch.stack([self._by_row(one != 0).any(1) for one in given]).any(0),
            torch.stack([self._by_row(one.isfinite()).all(1) for one in given]).all(0),
        )

    def _by_row(self, values: Tensor) -> Tensor:
        """``(N, values)``; the same for all rows where the tensor has no dimension of rows at its front."""
        if values.dim() and len(values) == self.rows:
            return values.reshape(self.rows, -1)
        return values.reshape(1, -1).expand(self.rows, -1)

    def _note_hook(self, call: Call, hook: Any, gradient: Tensor) -> Tensor | None:
        """Call a hook that is on a tensor, and note what it returns."""
        given = gradient.detach().clone()
        found: Tensor | None = hook(gradient)
        if found is not None:
            self.hooked.append((call, given, found.detach().clone()))
        return found

    def _note_gradient(self, call: Call, place: str, gradient: Tensor) -> None:
        setattr(call, place, self._by_row(gradient.detach().double()).norm(dim=1).cpu())


@contextmanager
def traced(root: nn.Module, rows: int, *, watched: Tensor | None = None) -> Iterator[PassTrace]:
    """Note what every module and operation inside does; hooks are taken off again.

    Args:
        root: Called inside, once, with as many rows.
        rows: Number of rows.
        watched: A tensor that should not change.
    """
    trace = PassTrace(root, rows, watched)
    with ExitStack() as hooks:
        for module in root.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                hooks.callback(module.register_forward_pre_hook(trace.enter, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(trace.leave, with_kwargs=True).remove)
        with trace:
            yield trace


def _finite(values: list[Tensor]) -> bool:
    return all(bool(one.isfinite().all()) for one in values)


def _inside_function() -> bool:
    """Return whether this runs in the forward of a ``torch.autograd.Function``, which has a gradient of its own."""
    if torch.is_grad_enabled():
        return False
    code = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
