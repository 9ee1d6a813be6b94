"""Where a classifier is cut: the last operations with weights on each way to the logits, or named layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robust_ext.core.errors import SplitError
from robust_ext.models.features.observed import Cut
from robust_ext.models.features.recording import Call, Recording

# Operations that compare or combine their input with weights: what enters the last of them is what the logits read.
_WEIGHTED = {
    *("linear", "matmul", "rmatmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "tensordot", "bilinear", "cdist"),
    *("conv1d", "conv2d", "conv3d", "convolution", "linear_dynamic", "linear_relu_dynamic", "pairwise_distance"),
}
# Of these the last dimension holds the channels.
_CHANNELS_LAST = {"linear", "matmul", "rmatmul", "mm", "bmm", "addmm", "linear_dynamic", "linear_relu_dynamic"}


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
    """What enters the last operations with weights, from the logits back; SplitError where a way has none."""
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
                found[id(entering)] = min(found.get(id(entering), (number, entering)), (number, entering), key=_first)
            else:
                waiting += taken.values()
    if not found:
        raise SplitError("model: no operation with weights is on the way from the inputs to the logits")
    return [_place(recording, number, entering) for number, entering in sorted(found.values(), key=_first)]


def layer_places(recording: Recording, layers: Sequence[str], model: nn.Module) -> list[Place]:
    """What enters named layers; SplitError where one is no module, or is not called once with a tensor."""
    modules = dict(model.named_modules())
    found = []
    for name in layers:
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
        calls = [one for one in recording.entered if one.layer == name]
        if len(calls) != 1:
            raise SplitError(
                f"layer {name!r} was called {len(calls)} times in one forward pass, expected once; "
                "name another layer, or give a pair (features, readout) instead"
            )
        if not isinstance(calls[0].value, Tensor):
            shown = type(calls[0].value).__name__
            raise SplitError(f"layer {name!r} is entered by {shown}, expected a tensor; name a layer inside of it")
        last = isinstance(modules[name], (nn.Linear, nn.LayerNorm))
        found.append(Place(Cut(name), calls[0].value, recording.made_before(calls[0].value, calls[0].before), last))
    return sorted(found, key=lambda place: place.before)


def _reads(call: Call, entering: Tensor) -> bool:
    """Whether an operation compares or combines its one input with weights."""
    if call.name in ("sub", "rsub"):
        # Differences from each of several points.
        return sum(made.numel() for made in call.made) > entering.numel()
    return call.name in _WEIGHTED


def _first(found: tuple[int, Tensor]) -> int:
    return found[0]


def _place(recording: Recording, number: int, entering: Tensor) -> Place:
    call, counts = recording.calls[number], Counter(one.layer for one in recording.entered)
    before = recording.made_before(entering, number)
    last = call.name in _CHANNELS_LAST
    # The innermost module that is entered by this very tensor, where it is called once.
    inside = [one for one in recording.entered if one.value is entering and one.before <= number]
    for one in reversed(inside):
        if counts[one.layer] == 1:
            return Place(Cut(one.layer), entering, before, last)
    later = sum(one.name == call.name for one in recording.calls[number:])
    return Place(Cut(None, call.name, later, _argument(call, entering)), entering, before, last)


def _argument(call: Call, entering: Tensor) -> int | str:
    named: list[tuple[int | str, object]] = [*enumerate(call.args), *call.kwargs.items()]
    for name, value in named:
        if value is entering:
            return name
    raise SplitError(f"model: {call.name} takes its input inside of a list")
