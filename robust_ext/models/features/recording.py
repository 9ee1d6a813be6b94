"""The operations of one forward pass, in order, and which of their tensors depend on the input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from robust_ext.core.errors import SplitError
from robust_ext.core.guard import frozen
from robust_ext.core.random import seeded_globals
from robust_ext.models.features.observed import Cut, first_argument, operation_name


class Call:
    """One operation that returned tensors, or changed one.

    Attributes:
        name: One name for the function, the method and the operator.
        taken: Tensors among its arguments.
        made: Tensors that it returned, or the one that it changed.
    """

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name = operation_name(func)
        self.taken = list(tensors_in((args, kwargs)))
        # An assignment returns nothing, and changes its first argument.
        self.made = list(tensors_in(out)) or (list(tensors_in(args[:1])) if self.name == "setitem" else [])


class Entered(NamedTuple):
    """A call of a module: its name, what it was called with first, and how many operations came before."""

    layer: str
    value: Any
    before: int


class Recording(TorchFunctionMode):
    """The forward pass of one row ``(1, ...)`` through a model, with weights that require no gradients meanwhile.

    Everything that was computed is held, so that identities stay apart.
    """

    def __init__(self, model: nn.Module, row: Tensor) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.entered: list[Entered] = []
        self.autocast: torch.dtype | None = None  # Of operations outside of layers.
        with ExitStack() as stack:
            for name, part in model.named_modules():
                if not isinstance(part, torch.jit.ScriptModule):  # These take no hooks.
                    stack.enter_context(
                        part.register_forward_pre_hook(
                            lambda _module, args, named, name=name: self.entered.append(
                                Entered(name, first_argument(args, named), len(self.calls))
                            ),
                            with_kwargs=True,
                        )
                    )
            for block in (frozen(model), seeded_globals(0), torch.enable_grad()):
                stack.enter_context(block)
            # No leaf, which could not be changed in place.
            self.x = row.detach().clone().requires_grad_().clone()
            self._dependent = {id(self.x)}
            with self:
                self.logits: Tensor = model(self.x)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        call = Call(func, args, kwargs or {}, out)
        if call.made:
            self.calls.append(call)
            # While weights require none, any tensor with a gradient depends on the input.
            self._dependent.update(id(one) for one in call.taken if one.requires_grad)
            if any(map(self.depends, call.taken)):
                self._dependent.update(map(id, call.made))
            kind = self.x.device.type
            if torch.is_autocast_enabled(kind):
                self.autocast = torch.get_autocast_dtype(kind)
        return out

    def depends(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends on the input: by the operations that made it, or by its gradient."""
        return id(tensor) in self._dependent

    @cached_property
    def makers(self) -> dict[int, list[int]]:
        """The numbers of the operations that returned or changed a tensor, by its identity."""
        found: dict[int, list[int]] = {}
        for number, call in enumerate(self.calls):
            for tensor in call.made:
                found.setdefault(id(tensor), []).append(number)
        return found

    def made_before(self, tensor: Tensor, number: int) -> int:
        """Count the operations before a tensor got the value with which one of them uses it."""
        return max((maker + 1 for maker in self.makers.get(id(tensor), []) if maker < number), default=0)


def tensors_in(value: object) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)


# Operations that compare or combine their input with weights: what enters the last of them is what the logits read.
# Of these the last dimension holds the channels.
_CHANNELS_LAST = {"linear", "matmul", "rmatmul", "mm", "bmm", "addmm", "linear_dynamic", "linear_relu_dynamic"}
_WEIGHTED = _CHANNELS_LAST | {
    *("baddbmm", "einsum", "tensordot", "bilinear", "cdist", "pairwise_distance"),
    *("conv1d", "conv2d", "conv3d", "convolution"),
}


@dataclass(frozen=True)
class Place:
    """A cut in a recorded pass: the tensor there, and how many operations came before."""

    cut: Cut
    seen: Tensor
    before: int
    channels_last: bool

    @property
    def positions(self) -> tuple[int, ...]:
        """Dimensions of positions, as of an image or of tokens, where there is more than one position."""
        if self.seen.dim() < 3:
            return ()
        tokens = self.channels_last or self.seen.dim() == 3
        dims = tuple(range(1, self.seen.dim() - 1) if tokens else range(2, self.seen.dim()))
        return dims if any(self.seen.shape[dim] > 1 for dim in dims) else ()


def head_places(recording: Recording) -> list[Place]:
    """Return the inputs of the last operations with weights, from the logits back; SplitError where a path has none."""
    makers = recording.makers
    waiting, done, found = [recording.logits], set[int](), dict[int, tuple[int, Tensor]]()
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in done:
            continue
        done.add(id(tensor))
        if id(tensor) not in makers:
            raise SplitError(
                "model: the logits come from operations that cannot be seen (a scripted or traced module, a function "
                "with a backward pass of its own), or from the inputs past all weights"
            )
        for number in makers[id(tensor)]:
            call = recording.calls[number]
            taken = {id(one): one for one in call.taken if recording.depends(one)}
            (entering, *others) = taken.values() or [tensor]
            if not others and _reads(call, entering):
                first = min(number, found.get(id(entering), (number,))[0])
                found[id(entering)] = first, entering
            else:
                waiting += taken.values()
    if not found:
        raise SplitError("model: no operation with weights is on the way from the inputs to the logits")
    return [_place(recording, *one) for one in sorted(found.values(), key=lambda one: one[0])]


def layer_places(recording: Recording, layers: Sequence[str], model: nn.Module) -> list[Place]:
    """Return the inputs of named layers; SplitError for names of no module, or modules without one call on a tensor."""
    modules, found = dict(model.named_modules()), []
    for name in layers:
        calls = [one for one in recording.entered if one.layer == name]
        if name not in modules or not name:
            known = ", ".join(list(modules)[-5:])
            raise SplitError(
                f"layer: got {name!r}, expected the name of a module of the model, see named_modules() (the last ones: "
                f"{known})"
            )
        if isinstance(modules[name], torch.jit.ScriptModule):
            raise SplitError(
                f"layer {name!r} is scripted or traced, where nothing can be observed; give the module that it was "
                "made of, or a pair (features, readout); without a layer, the logits are the features"
            )
        if len(calls) != 1:
            raise SplitError(
                f"layer {name!r} was called {len(calls)} times in one forward pass, expected once; "
                "name another layer, or give a pair (features, readout) instead"
            )
        value = calls[0].value
        if not isinstance(value, Tensor):
            shown = type(value).__name__
            raise SplitError(f"layer {name!r} is entered by {shown}, expected a tensor; name a layer inside of it")
        last = isinstance(modules[name], (nn.Linear, nn.LayerNorm))
        found.append(Place(Cut(name), value, recording.made_before(value, calls[0].before), last))
    return sorted(found, key=lambda place: place.before)


def _reads(call: Call, entering: Tensor) -> bool:
    """Return whether an operation compares or combines its one input with weights."""
    if call.name in ("sub", "rsub"):
        # Differences from each of several points.
        return sum(made.numel() for made in call.made) > entering.numel()
    return call.name in _WEIGHTED


def _place(recording: Recording, number: int, entering: Tensor) -> Place:
    call, counts = recording.calls[number], Counter(one.layer for one in recording.entered)
    before, last = recording.made_before(entering, number), call.name in _CHANNELS_LAST
    # The innermost module that is entered by this very tensor, where it is called once.
    for one in reversed(recording.entered):
        if one.value is entering and one.before <= number and counts[one.layer] == 1:
            return Place(Cut(one.layer), entering, before, last)
    named: list[tuple[int | str, object]] = [*enumerate(call.args), *call.kwargs.items()]
    argument = next((name for name, value in named if value is entering), None)
    if argument is None:
        raise SplitError(f"model: {call.name} takes its input inside of a list")
    later = sum(one.name == call.name for one in recording.calls[number:])
    return Place(Cut(None, call.name, later, argument), entering, before, last)
