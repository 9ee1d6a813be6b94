"""The halves of a classifier; among them its computation behind the features, run again for other features."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError, SplitError
from robust_ext.models.features.recording import Call, Place, Recording, tensors_in


@dataclass(frozen=True)
class Split:
    """A classifier as features ``(N, *shape)`` and their readout; ``layer`` names it where layers have names.

    ``kind`` is how the logits follow from the features: ``"pair"`` (the user's two modules), ``"linear"`` (an
    ``nn.Linear`` of the model), ``"replayed"`` (the operations behind the features, run again), ``"beside"`` (the
    logits are features too, next to averages of a large map), ``"logits"`` (the logits are the features).
    """

    features: nn.Module
    readout: nn.Module
    layer: str = ""
    shape: tuple[int, ...] = ()
    kind: str = "linear"


class Part(nn.Module):
    """A callable part of a classifier, such as a method of a network, as a module in eval mode."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        owner = getattr(function, "__self__", None)
        # So that its weights count as this module's.
        self.owner = owner if isinstance(owner, nn.Module) else None
        self.function = function
        self.training = self.owner is not None and self.owner.training

    def forward(self, x: Tensor) -> Tensor:
        """Return the function's output."""
        return self.function(x)


class LastColumns(nn.Module):
    """The last ``columns`` of features ``(N, F)``, read by a linear layer in its precision; without one, as logits."""

    def __init__(self, columns: int, linear: nn.Linear | None = None) -> None:
        super().__init__()
        self.columns, self.linear = columns, linear
        self.training = linear is not None and linear.training

    def forward(self, features: Tensor) -> Tensor:
        """Logits ``(N, K)`` of features ``(N, F)``."""
        last = features[:, -self.columns :]
        return last if self.linear is None else self.linear(last.to(self.linear.weight.dtype))


class InParts(nn.Sequential):
    """A classifier that consists of its features and their readout, and is split there."""


def as_parts(model: object) -> tuple[nn.Module, nn.Module] | None:
    """A pair ``(features, readout)`` as modules, each of which may be any callable; None for what is no pair."""
    if isinstance(model, InParts):
        return model[0], model[1]
    if not isinstance(model, (tuple, list)):
        return None
    if len(model) != 2 or not all(callable(part) for part in model):
        shown = ", ".join(type(part).__name__ for part in model)
        raise InvalidArgumentError("model", f"({shown})", "a pair (features, readout) of torch modules or callables")
    features, readout = (part if isinstance(part, nn.Module) else Part(part) for part in model)
    return features, readout


class _Slot(int):
    """Stands for a tensor that is computed again."""


class _Step(NamedTuple):
    func: Callable[..., Any]
    args: Any
    kwargs: Any
    made: tuple[int, ...]  # Slots of the tensors that it returns.


class _Entry(NamedTuple):
    """Features that enter before a step: their slot, shape of a row, type, and dimensions that were averaged."""

    before: int
    slot: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    means: tuple[int, ...]

    @property
    def columns(self) -> int:
        """Number of features."""
        return math.prod(size for dim, size in enumerate(self.shape, 1) if dim not in self.means)

    def restored(self, rows: Tensor) -> Tensor:
        """Features ``(n, F)`` in the shape that they had; averaged values are the same at all positions."""
        kept = [1 if dim in self.means else size for dim, size in enumerate(self.shape, 1)]
        return rows.to(self.dtype).reshape(len(rows), *kept).expand(len(rows), *self.shape).clone()


class Tail(nn.Module):
    """The recorded operations behind some places, from features ``(N, F)`` to logits ``(N, K)``.

    Batches are replayed at once where the operations take them, else row by row. It shares the model's weights.
    """

    def __init__(self, recording: Recording, places: Sequence[Place]) -> None:
        super().__init__()
        self._entries, self._steps, self._result = _behind(recording, places)
        self._kind, self._autocast = recording.x.device.type, recording.autocast
        self.training = self._batched = False
        probes = self.random(recording.x.device)
        with torch.no_grad():
            rows = self(probes)
            try:
                together = self._replay(probes)
            except (RuntimeError, IndexError, TypeError, ValueError):
                return
        # Scales of dynamic quantisation are those of a batch, and differ a little; mixed rows differ by much more.
        slack = 0.05 * float(rows.abs().nan_to_num(0, 0, 0).max())
        self._batched = together.shape == rows.shape and torch.allclose(together, rows, atol=slack, equal_nan=True)

    def forward(self, features: Tensor) -> Tensor:
        """Logits ``(N, K)`` of features ``(N, F)``."""
        if self._batched or len(features) == 1:
            return self._replay(features)
        return torch.cat([self._replay(row) for row in torch.split(features, 1)])

    def random(self, device: torch.device) -> Tensor:
        """Large features of three rows, float32 ``(3, F)``."""
        columns = sum(entry.columns for entry in self._entries)
        return 10 * torch.randn(3, columns, generator=torch.Generator().manual_seed(0)).to(device)

    def _replay(self, features: Tensor) -> Tensor:
        values: dict[int, Tensor] = {}
        widths = [entry.columns for entry in self._entries]
        pieces = list(zip(self._entries, torch.split(features, widths, 1), strict=True))
        with nullcontext() if self._autocast is None else torch.autocast(self._kind, self._autocast):
            for number, step in enumerate([*self._steps, None]):
                values.update({one.slot: one.restored(rows) for one, rows in pieces if one.before == number})
                if step is not None:
                    args, kwargs = _filled((step.args, step.kwargs), values)
                    out = step.func(*args, **kwargs)
                    # An assignment returns nothing, and changes its first argument.
                    values.update(zip(step.made, tensors_in(args[:1] if out is None else out), strict=True))
        return values[self._result].clone()


def _behind(recording: Recording, places: Sequence[Place]) -> tuple[list[_Entry], list[_Step], int]:
    """Return the place of the features, the operations that depend on them, and the slot of the logits."""
    slots: dict[int, int] = {}
    inside, entries, steps, used = set[int](), list[_Entry](), list[_Step](), list[Call]()

    def template(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _Slot(slots[id(value)]) if id(value) in inside else value.detach()
        return _mapped(value, template)

    waiting = list(places)
    for number, call in enumerate([*recording.calls, None]):
        while waiting and waiting[0].before <= number:
            place = waiting.pop(0)
            slot = slots.setdefault(id(place.seen), len(slots))
            inside.add(id(place.seen))
            if place.seen.shape[:1] != (1,):
                raise SplitError(f"{place.cut}: its input of shape {tuple(place.seen.shape)} has not the rows first")
            shape = tuple(place.seen.shape[1:])
            entries.append(_Entry(len(steps), slot, shape, place.seen.dtype, place.cut.means))
        if call is not None and any(id(one) in inside for one in call.taken):
            args, kwargs = template((call.args, call.kwargs))
            made = tuple(slots.setdefault(id(one), len(slots)) for one in call.made)
            # Attributes of tensors, such as .T, as functions that can be copied.
            attribute = str(getattr(getattr(call.func, "__self__", None), "__name__", ""))
            func = attrgetter(attribute) if getattr(call.func, "__name__", "") == "__get__" else call.func
            steps.append(_Step(func, args, kwargs, made))
            inside.update(map(id, call.made))
            used.append(call)
    _check_closed(recording, places, used, inside)
    return entries, steps, slots[id(recording.logits)]


def _check_closed(recording: Recording, places: Sequence[Place], used: Sequence[Call], inside: set[int]) -> None:
    """SplitError where the logits depend on the inputs by another way than through the places."""
    names = ", ".join(str(place.cut) for place in places)
    if id(recording.logits) not in inside:
        raise SplitError(f"layer {names}: the logits do not depend on it; name a layer on their way")
    needed, cut = {id(recording.logits)}, {id(place.seen) for place in places}
    for call in reversed(used):
        if needed.isdisjoint(map(id, call.made)):
            continue
        if any(recording.depends(one) and id(one) not in inside for one in call.taken):
            raise SplitError(
                f"layer {names}: the logits depend on the inputs by another way too (it joins at {call.name}, as a "
                "skip connection does); name a layer behind it, also the layer on that way with a comma between "
                "them, or give a pair (features, readout)"
            )
        needed.update(id(one) for one in call.taken if id(one) not in cut)


def _filled(value: Any, values: dict[int, Tensor]) -> Any:
    return values[value] if isinstance(value, _Slot) else _mapped(value, lambda part: _filled(part, values))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same of each part of a list, tuple or dict; anything else as it is."""
    if isinstance(value, dict):
        return {key: change(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [change(part) for part in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    return value
