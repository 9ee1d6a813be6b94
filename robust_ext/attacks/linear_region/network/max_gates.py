"""The largest of several values as a gate, and how max pooling and largest values become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional as F

from robust_ext.attacks.linear_region.network.calls import Call, per_dimension
from robust_ext.attacks.linear_region.network.gate_rules import larger
from robust_ext.attacks.linear_region.network.gates import Gate
from robust_ext.attacks.linear_region.network.tape import Tape

POSITIONS = "it uses positions of largest values"


@dataclass(eq=False)
class MaxGate(Gate):
    """The largest of several values, as in max pooling.

    A row of constraints belongs to each window and each value in it: the largest value minus that value, which for the
    largest itself is 0. Windows at the rim, which hold fewer values, repeat one.

    ``windows`` holds positions in a channel of ``size``, int64 ``(values, windows)``; ``argmax`` that of each largest
    value, int32 ``(rows, channels, windows)``; ``before`` and ``after`` are the shapes of one row's input and result,
    its entries first; ``places`` are those of :func:`_places_of`.
    """

    name: str
    windows: Tensor
    argmax: Tensor
    size: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    places: Tensor

    def __post_init__(self) -> None:
        self.rows, self._channels = self.argmax.shape[:2]
        self.constraints = self._channels * self.windows.numel()

    @cached_property
    def _indices(self) -> Tensor:
        return self.argmax.flatten(0, 1).long()

    def apply(self, constraints: Tensor, *inputs: Tensor) -> Tensor:
        """See :class:`Gate`."""
        (x,) = inputs
        flat = x.reshape(self.rows * self._channels, self.size)
        largest = flat.gather(1, self._indices).view(self.rows, self._channels, 1, self.windows.shape[1])
        shape = (self.rows, self._channels, *self.windows.shape)
        others = flat.index_select(1, self.windows.flatten()).view(shape)
        torch.sub(largest, others, out=constraints.view(shape))
        return largest.view(self.rows * self.after[0], *self.after[1:])

    def adjoint(self, gradient: Tensor | None, multipliers: Tensor) -> tuple[Tensor, ...]:
        """See :class:`Gate`."""
        lines = self.rows * self._channels
        flat = multipliers.reshape(lines, self.windows.numel())
        largest = flat.view(lines, *self.windows.shape).sum(1)
        if gradient is not None:
            largest += gradient.reshape(largest.shape)
        if self.places.shape[0] > 1 or self.places.numel() != self.windows.numel():
            # One column of zeros more, for positions that lie in fewer windows than others.
            flat = F.pad(flat, (0, 1))
        spread = flat.index_select(1, self.places.flatten())
        out = spread.view(lines, *self.places.shape).sum(1).neg_() if self.places.shape[0] > 1 else spread.neg_()
        return (out.scatter_add_(1, self._indices, largest).view(self.rows * self.before[0], *self.before[1:]),)

    def at(self, rows: int, *inputs: Tensor) -> tuple[Gate, Tensor]:
        """See :class:`Gate`."""
        (x,) = inputs
        flat = x.reshape(rows * self._channels, self.size)
        values = flat.index_select(1, self.windows.flatten()).view(flat.shape[0], *self.windows.shape)
        largest, place = values.max(1)
        columns = torch.arange(self.windows.shape[1], device=x.device)
        argmax = self.windows[place, columns].view(rows, self._channels, self.windows.shape[1])
        return replace(self, argmax=argmax.to(torch.int32)), largest.view(rows * self.after[0], *self.after[1:])

    def select(self, rows: Tensor) -> Gate:
        """See :class:`Gate`."""
        return replace(self, argmax=self.argmax[rows])

    def agrees(self, other: Gate) -> Tensor:
        """See :class:`Gate`."""
        assert isinstance(other, MaxGate)
        same = (self.argmax == other.argmax).unsqueeze(2)
        return same.expand(-1, -1, self.windows.shape[0], -1).reshape(self.rows, self.constraints)

    def choices(self) -> Tensor:
        """See :class:`Gate`."""
        return self.argmax.flatten(1)


def _places_of(windows: Tensor, size: int) -> Tensor:
    """For each position the places in ``windows`` that hold it ``(places, size)``, filled up with one past the end."""
    flat = windows.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=size)
    starts = counts.cumsum(0) - counts
    which = torch.arange(max(1, int(counts.max())), device=flat.device)[:, None]
    places = (starts + which).clamp(max=flat.numel() - 1)
    return torch.where(which < counts, order[places], flat.numel())


def _gate(tape: Tape, name: str, x: Tensor, out: Tensor, windows: Tensor, argmax: Tensor) -> MaxGate:
    size = x.numel() // (tape.rows * argmax.shape[1]) if argmax.numel() else 0
    before, after = ((value.shape[0] // tape.rows, *value.shape[1:]) for value in (x, out))
    return MaxGate(name, windows, argmax.to(torch.int32), size, before, after, _places_of(windows, size))


def _largest(tape: Tape, call: Call) -> Any:
    """The largest or smallest along dimensions, or of two tensors."""
    if call.name in ("max", "min") and isinstance(call.get(1, "other"), Tensor):
        return larger(tape, call)
    x, dims = call.input, call.get(1, "dim", call.kwargs.get("axis"))
    dims = [] if dims is None else [dims] if isinstance(dims, int) else list(dims)
    along = sorted(dim % x.dim() for dim in dims)
    if not along or along[0] == 0:
        raise tape.refusal("it works along the batch dimension")
    largest = call.name in ("max", "amax")
    kept = [dim for dim in range(x.dim()) if dim not in along]
    order = (*kept, *along)

    def arranged(value: Tensor) -> Tensor:
        return (value if largest else -value).permute(order)

    number, value = tape.emit_function(arranged, x), arranged(x.detach())
    flat = value.flatten(len(kept))
    argmax = flat.argmax(-1).reshape(tape.rows, -1, 1)
    out = call.run()
    result = out if isinstance(out, Tensor) else out[0]
    windows = torch.arange(flat.shape[-1], device=x.device)[:, None]
    number = tape.emit(_gate(tape, call.name, value, result, windows, argmax), number)
    tape.bind(result, number)
    if not largest:
        tape.bind(result, tape.emit_function(torch.neg, result))
    if not isinstance(out, Tensor):
        tape.bind_last(out[1], POSITIONS)
    return out


def _max_pool(tape: Tape, call: Call) -> Any:
    """Max pooling, of windows of a fixed size or of a fixed number of windows."""
    x = call.input
    number = tape.affine(x)
    dims = int(call.name.split("pool")[1][0])
    sizes, adaptive = x.shape[-dims:], call.name.startswith("adaptive")
    pool = getattr(F, f"{'adaptive_' if adaptive else ''}max_pool{dims}d_with_indices")
    if adaptive:
        out, index = pool(x, call.get(1, "output_size"))
        axes = [
            [list(range(w * n // o, -(-(w + 1) * n // o))) for w in range(o)]
            for n, o in zip(sizes, out.shape[-dims:], strict=True)
        ]
    else:
        kernel = per_dimension(call.get(1, "kernel_size"), dims)
        stride = per_dimension(call.get(2, "stride") or kernel, dims)
        padding, dilation = (per_dimension(call.get(*given), dims) for given in ((3, "padding", 0), (4, "dilation", 1)))
        out, index = pool(x, kernel, stride, padding, dilation, call.get(5, "ceil_mode", False))
        axes = [
            [[i for i in range(w * s - p, w * s - p + d * k, d) if 0 <= i < n] for w in range(o)]
            for n, o, k, s, p, d in zip(sizes, out.shape[-dims:], kernel, stride, padding, dilation, strict=True)
        ]
    windows = _products(axes, sizes).T.contiguous().to(x.device)
    argmax = index.reshape(tape.rows, -1, windows.shape[1])
    tape.bind(out, tape.emit(_gate(tape, call.name, x, out, windows, argmax), number))
    tape.bind_last(index, POSITIONS)
    exported = adaptive and isinstance(call.func, OpOverload)
    with_indices = exported or call.name.endswith("indices") or call.get(2 if adaptive else 6, "return_indices")
    return (out, index) if with_indices else out


def _products(axes: list[list[list[int]]], sizes: Sequence[int]) -> Tensor:
    """Positions in each window ``(windows, values)`` from those along each axis; short windows repeat their last."""
    whole = torch.zeros(1, 1, dtype=torch.int64)
    for windows, size in zip(axes, sizes, strict=True):
        width = max(map(len, windows), default=0)
        axis = torch.tensor([window + window[-1:] * (width - len(window)) for window in windows], dtype=torch.int64)
        grown = whole[:, None, :, None] * size + axis[None, :, None, :]
        whole = grown.reshape(grown.shape[0] * grown.shape[1], -1)
    return whole


_POOLS = product(("", "adaptive_"), (1, 2, 3), ("", "_with_indices"))
RULES: dict[str, Callable[[Tape, Call], Any]] = {
    **dict.fromkeys(("max", "min", "amax", "amin"), _largest),
    **{f"{kind}max_pool{dims}d{ending}": _max_pool for kind, dims, ending in _POOLS},
}
