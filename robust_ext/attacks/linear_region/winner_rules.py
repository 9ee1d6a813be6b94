"""How max pooling and largest values become gates, with the winners they have now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from robust_ext.attacks.linear_region.calls import Call, spread
from robust_ext.attacks.linear_region.gate_rules import larger
from robust_ext.attacks.linear_region.operations import Affine, Linearity
from robust_ext.attacks.linear_region.winners import Winner

if TYPE_CHECKING:
    from robust_ext.attacks.linear_region.recording import Recorder


def _largest(recorder: Recorder, call: Call) -> Any:
    """The largest or smallest along dimensions, or of two tensors."""
    if call.name in ("max", "min") and isinstance(call.get(1, "other"), Tensor):
        return larger(recorder, call)
    x, dims = call.input, call.get(1, "dim", call.kwargs.get("axis"))
    dims = [] if dims is None else [dims] if isinstance(dims, int) else list(dims)
    along = sorted(dim % x.dim() for dim in dims)
    if not along or along[0] == 0:
        raise recorder.refusal("it works along the batch dimension")
    number, sign = recorder.number(x), 1.0 if call.name in ("max", "amax") else -1.0
    if sign < 0:
        number = recorder.emit(Affine(-1.0), number)
    kept = [dim for dim in range(x.dim()) if dim not in along]
    value = (x.detach() * sign).permute(*kept, *along)
    order = tuple(kept + along)
    if order != tuple(range(x.dim())):
        rearranged = Linearity(lambda one: one.permute(order), tuple(x.shape), x.detach().new_empty(0))
        number = recorder.emit(rearranged, number)
    flat = value.flatten(len(kept))
    winners = flat.argmax(-1).reshape(recorder.rows, -1, 1)
    out = call.run()
    result = out if isinstance(out, Tensor) else out[0]
    windows = torch.arange(flat.shape[-1], device=x.device)[:, None]
    number = recorder.emit(_winner(recorder, call.name, value, result, windows, winners), number)
    if sign < 0:
        number = recorder.emit(Affine(-1.0), number)
    recorder.bind(result, number)
    if not isinstance(out, Tensor):
        recorder.bind_positions(out[1])
    return out


def _winner(recorder: Recorder, name: str, x: Tensor, out: Tensor, windows: Tensor, winners: Tensor) -> Winner:
    rows = recorder.rows
    size = x.numel() // (rows * winners.shape[1]) if winners.numel() else 0
    return Winner(
        name,
        windows=windows,
        winners=winners.to(torch.int32),
        size=size,
        inside=(x.shape[0] // rows, *x.shape[1:]),
        outside=(out.shape[0] // rows, *out.shape[1:]),
    )


_MAX_POOLS: dict[int, Callable[..., tuple[Tensor, Tensor]]] = {
    1: F.max_pool1d_with_indices,
    2: F.max_pool2d_with_indices,
    3: F.max_pool3d_with_indices,
}
_ADAPTIVE_POOLS: dict[int, Callable[..., tuple[Tensor, Tensor]]] = {
    1: F.adaptive_max_pool1d_with_indices,
    2: F.adaptive_max_pool2d_with_indices,
    3: F.adaptive_max_pool3d_with_indices,
}


def _max_pool(recorder: Recorder, call: Call) -> Any:
    """Max pooling, of windows of a fixed size or of a fixed number of windows."""
    x = call.input
    number = recorder.number(x)
    dims = int(call.name.split("pool")[1][0])
    sizes = x.shape[-dims:]
    if call.name.startswith("adaptive"):
        out, index = _ADAPTIVE_POOLS[dims](x, call.get(1, "output_size"))
        axes = [
            [list(range(w * n // o, -(-(w + 1) * n // o))) for w in range(o)]
            for n, o in zip(sizes, out.shape[-dims:], strict=True)
        ]
    else:
        kernel = spread(call.get(1, "kernel_size"), dims)
        stride = spread(call.get(2, "stride") or kernel, dims)
        padding, dilation = spread(call.get(3, "padding", 0), dims), spread(call.get(4, "dilation", 1), dims)
        out, index = _MAX_POOLS[dims](x, kernel, stride, padding, dilation, call.get(5, "ceil_mode", False))
        axes = [
            [[i for i in range(w * s - p, w * s - p + d * k, d) if 0 <= i < n] for w in range(o)]
            for n, o, k, s, p, d in zip(sizes, out.shape[-dims:], kernel, stride, padding, dilation, strict=True)
        ]
    windows = _products(axes, sizes).T.contiguous().to(x.device)
    winners = index.reshape(recorder.rows, -1, windows.shape[1])
    recorder.bind(out, recorder.emit(_winner(recorder, call.name, x, out, windows, winners), number))
    recorder.bind_positions(index)
    asked = call.name.endswith("indices") or call.get(2 if call.name.startswith("adaptive") else 6, "return_indices")
    return (out, index) if asked else out


def _products(axes: list[list[list[int]]], sizes: Sequence[int]) -> Tensor:
    """Positions in each window ``(windows, values)`` from those along each axis; short windows repeat their last."""
    whole = torch.zeros(1, 1, dtype=torch.int64)
    for windows, size in zip(axes, sizes, strict=True):
        width = max(map(len, windows), default=0)
        axis = torch.tensor([window + window[-1:] * (width - len(window)) for window in windows], dtype=torch.int64)
        grown = whole[:, None, :, None] * size + axis[None, :, None, :]
        whole = grown.reshape(grown.shape[0] * grown.shape[1], -1)
    return whole


RULES: dict[str, Callable[[Recorder, Call], Any]] = {
    **dict.fromkeys(("max", "min", "amax", "amin"), _largest),
    **{
        f"{kind}max_pool{dims}d{ending}": _max_pool
        for kind in ("", "adaptive_")
        for dims in (1, 2, 3)
        for ending in ("", "_with_indices")
    },
}
