"""Networks of which weights or operations are in integers, as ``torch.ao.quantization`` makes them."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

_PACKAGES = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")
_INTEGERS = (torch.int8, torch.uint8, torch.qint8, torch.quint8)


def is_quantised(module: nn.Module) -> bool:
    """Whether a network computes with integers in places, where no gradient flows.

    Example:
        >>> is_quantised(nn.Linear(3, 2))
        False
    """
    return any(_of_integers(part) for part in module.modules())


def is_dynamic(module: nn.Module) -> bool:
    """Whether a layer measures the scale of its inputs in each call, of all rows together."""
    return type(module).__module__.startswith(_PACKAGES) and ".dynamic" in type(module).__module__


class RowsApart(nn.Module):
    """A layer that is called with one row after another, so that none has a part in the scale of others."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # In a tuple, as no module of its own: it is called once a row, and where networks are split layers are once.
        self._layer = (layer,)
        self.training = layer.training

    def forward(self, x: Tensor) -> Tensor:
        """What the layer returns for ``(N, ...)``."""
        (layer,) = self._layer
        return torch.cat([layer(row) for row in torch.split(x, 1)]) if len(x) > 1 else layer(x)


def _of_integers(part: nn.Module) -> bool:
    if isinstance(part, RowsApart) or type(part).__module__.startswith(_PACKAGES):
        return True
    if isinstance(part, fx.GraphModule):
        return any("quantize" in str(node.target) for node in part.graph.nodes)
    tensors = (*part.parameters(recurse=False), *part.buffers(recurse=False))
    return any(one.dtype in _INTEGERS and one.dim() > 1 for one in tensors)
