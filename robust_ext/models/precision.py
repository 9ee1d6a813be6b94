"""Networks in half, bfloat16 or double precision, or under autocast, from float32 inputs to float32 logits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, fx, nn

from robust_ext.models.wrapping import Wrapped

_PACKAGES = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")
_INTEGERS = (torch.int8, torch.uint8, torch.qint8, torch.quint8)


def is_quantised(module: nn.Module) -> bool:
    """Return whether a network computes with integers in places, where no gradient flows.

    Example:
        >>> is_quantised(nn.Linear(3, 2))
        False
    """
    return any(_of_integers(part) for part in module.modules())


def is_dynamic(module: nn.Module) -> bool:
    """Return whether a layer measures the scale of its inputs in each call, of all rows together."""
    return type(module).__module__.startswith(_PACKAGES) and ".dynamic" in type(module).__module__


class RowsApart(nn.Module):
    """A layer that is called with one row after another, so that none has a part in the scale of others."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # In a tuple, as no module of its own: it is called once a row, and where networks are split layers are once.
        self._layer = (layer,)
        self.training = layer.training

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for ``(N, ...)``."""
        (layer,) = self._layer
        return torch.cat([layer(row) for row in torch.split(x, 1)]) if len(x) > 1 else layer(x)


def _of_integers(part: nn.Module) -> bool:
    if isinstance(part, RowsApart) or type(part).__module__.startswith(_PACKAGES):
        return True
    if isinstance(part, fx.GraphModule):
        return any("quantize" in str(node.target) for node in part.graph.nodes)
    tensors = (*part.parameters(recurse=False), *part.buffers(recurse=False))
    return any(one.dtype in _INTEGERS and one.dim() > 1 for one in tensors)


class InPrecision(Wrapped):
    """A network in its own precision between inputs and outputs in float32, in which threat models and attacks are.

    Gradients flow through both casts. An attack meets the network that is deployed, roundings included.

    Args:
        module: The network.
        precision: The coarsest type it computes in, which tolerances follow.
        dtype: Type that its inputs are cast to; None where it takes float32.
        autocast: Type of the ``torch.autocast`` block in which it runs, as where it was given inside one; or None.

    Example:
        >>> network = InPrecision(nn.Linear(4, 3).bfloat16(), precision=torch.bfloat16, dtype=torch.bfloat16)
        >>> network(torch.rand(2, 4)).dtype
        torch.float32
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        precision: torch.dtype,
        dtype: torch.dtype | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__(module)
        self.precision, self.dtype, self.autocast = precision, dtype, autocast

    def forward(self, x: Tensor) -> Tensor:
        """Outputs, float32, of inputs ``(N, ...)``; both of other types stay where they are no floats."""
        if self.dtype is not None and x.is_floating_point():
            x = x.to(self.dtype)
        block: AbstractContextManager[object] = nullcontext()
        if self.autocast is not None:
            block = torch.autocast(x.device.type, dtype=self.autocast)
        with block:
            out: Tensor = self.module(x)
        return out.float() if isinstance(out, Tensor) and out.is_floating_point() else out

    def extra_repr(self) -> str:
        """The types."""
        return f"precision={self.precision}, dtype={self.dtype}, autocast={self.autocast}"


def weights_type(module: nn.Module) -> torch.dtype | None:
    """Type of the first floating point parameter or buffer; None without one."""
    tensors = (tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point())
    return next((tensor.dtype for tensor in tensors), None)


def ambient_autocast(device: str) -> torch.dtype | None:
    """The type of the ``torch.autocast`` block for this kind of device around the call; None outside of one."""
    if hasattr(torch, "get_autocast_dtype"):
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if device == "cuda":
        return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
    return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
