"""The computation of a classifier behind its features, run again for other features."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import SplitError
from robust_ext.models.features.recording import Call, Place, Recording, tensors_in


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor that is computed again."""

    number: int


@dataclass(frozen=True)
class _Step:
    func: Callable[..., Any]
    args: Any
    kwargs: Any
    made: tuple[int, ...]  # Slots of the tensors that it returns.


@dataclass(frozen=True)
class _Entry:
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
        """Features ``(n, F)`` in the shape that they had; what was averaged is the same at all positions."""
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
        self._batched = False
        self.training = False
        self._batched = self._takes_batches(recording.x.device)

    def forward(self, features: Tensor) -> Tensor:
        """Logits ``(N, K)`` of features ``(N, F)``."""
        if self._batched or len(features) == 1:
            return self._replay(features)
        return torch.cat([self._replay(features[row : row + 1]) for row in range(len(features))])

    def random(self, device: torch.device) -> Tensor:
        """Large features of three rows, float32 ``(3, F)``."""
        columns = sum(entry.columns for entry in self._entries)
        drawn = torch.randn(3, columns, generator=torch.Generator().manual_seed(0))
        return 10 * drawn.to(device)

    def _takes_batches(self, device: torch.device) -> bool:
        probes = self.random(device)
        with torch.no_grad():
            rows = self(probes)
            try:
                together = self._replay(probes)
            except (RuntimeError, IndexError, TypeError, ValueError):
                return False
        # Scales of dynamic quantisation are those of a batch, and differ a little; mixed rows differ by much more.
        scale = float(rows.abs().nan_to_num(0, 0, 0).max())
        return together.shape == rows.shape and torch.allclose(together, rows, atol=0.05 * scale, equal_nan=True)

    def _replay(self, features: Tensor) -> Tensor:
        values: dict[int, Tensor] = {}
        widths = [entry.columns for entry in self._entries]
        pieces = list(zip(self._entries, torch.split(features, widths, 1), strict=True))
        narrow = nullcontext() if self._autocast is None else torch.autocast(self._kind, self._autocast)
        with narrow:
            for number, step in enumerate([*self._steps, None]):
                values.update({one.slot: one.restored(rows) for one, rows in pieces if one.before == number})
                if step is not None:
                    args, kwargs = _filled(step.args, values), _filled(step.kwargs, values)
                    out = step.func(*args, **kwargs)
                    # An assignment returns nothing, and changes its first argument.
                    values.update(zip(step.made, tensors_in(args[:1] if out is None else out), strict=True))
        return values[self._result].clone()


def _behind(recording: Recording, places: Sequence[Place]) -> tuple[list[_Entry], list[_Step], int]:
    """Return the place of the features, the operations that depend on them, and the slot of the logits."""
    slots: dict[int, int] = {}
    inside, entries, steps, used = set[int](), list[_Entry](), list[_Step](), list[Call]()
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
            args, kwargs = (_template(part, inside, slots) for part in (call.args, call.kwargs))
            made = tuple(slots.setdefault(id(one), len(slots)) for one in call.made)
            steps.append(_Step(_plain(call.func), args, kwargs, made))
            inside.update(map(id, call.made))
            used.append(call)
    _check_closed(recording, places, used, inside)
    return entries, steps, slots[id(recording.logits)]


def _check_closed(recording: Recording, places: Sequence[Place], used: Sequence[Call], inside: set[int]) -> None:
    """SplitError where the logits depend on the inputs by another way than through the places."""
    names = ", ".join(str(place.cut) for place in places)
    if id(recording.logits) not in inside:
        raise SplitError(f"layer {names}: the logits do not depend on it; name a layer on their way")
    needed = {id(recording.logits)}
    cut = {id(place.seen) for place in places}
    for call in reversed(used):
        if needed.isdisjoint(map(id, call.made)):
            continue
        for one in call.taken:
            if recording.depends(one) and id(one) not in inside:
                raise SplitError(
                    f"layer {names}: the logits depend on the inputs by another way too (it joins at {call.name}, as a "
                    "skip connection does); name a layer behind it, also the layer on that way with a comma between "
                    "them, or give a pair (features, readout)"
                )
            if id(one) not in cut:
                needed.add(id(one))


def _plain(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a step; attributes of tensors, such as ``.T``, as functions that can be copied."""
    name = str(getattr(getattr(func, "__self__", None), "__name__", ""))
    return attrgetter(name) if getattr(func, "__name__", "") == "__get__" else func


def _template(value: Any, inside: set[int], slots: dict[int, int]) -> Any:
    if isinstance(value, Tensor):
        return _Slot(slots[id(value)]) if id(value) in inside else value.detach()
    return _mapped(value, lambda part: _template(part, inside, slots))


def _filled(value: Any, values: dict[int, Tensor]) -> Any:
    if isinstance(value, _Slot):
        return values[value.number]
    return _mapped(value, lambda part: _filled(part, values))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same of each part of a list, tuple or dict; anything else as it is."""
    if isinstance(value, dict):
        return {key: change(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(change(part) for part in value)
    return [change(part) for part in value] if isinstance(value, list) else value
