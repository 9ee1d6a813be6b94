"""What a classifier may return, and which part of it are the logits: one rule, decided by one forward pass.

A tensor is taken as it is. Of an object or a dict, it is ``logits``; of a dict without, ``output`` or ``out``, else the
only tensor of shape ``(N, K)``; of a tuple or list, the first tensor of that shape, unless another one has the same
shape, as of two heads. What is left is refused: there is no telling what it means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from robust_ext.core.errors import ModelError
from robust_ext.core.warning import warn
from robust_ext.models.wrapping import Wrapped

_NAMES = ("logits", "output", "out")
_OWN = "wrap the model in a module that returns the logits alone, as robust_ext.models.outputs.LogitsOf(model, {key!r})"


class LogitsOf(Wrapped):
    """A network that returns more than logits, reduced to them.

    Args:
        module: The network.
        entry: Where its logits are: an attribute or key, or the place in a tuple or list.

    Example:
        >>> import torch
        >>> class TwoOutputs(nn.Linear):
        ...     def forward(self, x):
        ...         return {"logits": super().forward(x), "features": x}
        >>> LogitsOf(TwoOutputs(4, 3), "logits")(torch.zeros(2, 4)).shape
        torch.Size([2, 3])
    """

    def __init__(self, module: nn.Module, entry: str | int) -> None:
        super().__init__(module)
        self.entry = entry

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(N, K)`` of inputs ``(N, ...)``."""
        return logits_in(self.module(x), self.entry)

    def extra_repr(self) -> str:
        """Which entry is taken."""
        return f"entry={self.entry!r}"


def logits_in(output: Any, entry: str | int | None) -> Tensor:
    """The entry that :func:`find_entry` found of an output."""
    found: Tensor
    if entry is None:
        found = output
    elif isinstance(entry, str) and not isinstance(output, Mapping):
        found = getattr(output, entry)
    else:
        found = output[entry]
    return found


def find_entry(output: object, rows: int) -> str | int | None:
    """Where the logits of an output for so many rows are, by the rule above; None where it is a tensor.

    Raises:
        ModelError: The rule decides nothing, or several heads are averaged by nobody.
    """
    if isinstance(output, Tensor):
        return None
    if isinstance(output, Mapping):
        return _named(output, rows)
    if isinstance(getattr(output, "logits", None), Tensor):
        return "logits"
    if isinstance(output, (tuple, list)):
        return _placed(output, rows)
    raise ModelError(
        f"model: returned {type(output).__name__}, expected a tensor of logits, an object or dict that has logits, or "
        "a tuple; wrap the model in a module that returns the logits alone"
    )


def _named(output: Mapping[Any, Any], rows: int) -> str:
    for name in _NAMES:
        if isinstance(output.get(name), Tensor):
            return name
    found = [name for name, value in output.items() if isinstance(name, str) and _is_logits(value, rows)]
    if len(found) == 1:
        return found[0]
    raise ModelError(
        f"model: returned a dict with {_shown(output)}, expected an entry 'logits', 'output' or 'out', or a single one "
        f"of shape ({rows}, K); {_OWN.format(key=found[0] if found else 'name')}"
    )


def _placed(output: tuple[Any, ...] | list[Any], rows: int) -> int:
    found = [place for place, value in enumerate(output) if _is_logits(value, rows)]
    shown = _shown(dict(enumerate(output)))
    if not found:
        raise ModelError(
            f"model: returned a {type(output).__name__} with {shown}, expected a tensor of logits ({rows}, K) in it"
        )
    same = [place for place in found if output[place].shape == output[found[0]].shape]
    if len(same) > 1:
        raise ModelError(
            f"model: returned a {type(output).__name__} with {shown}, expected one tensor of that shape: of several "
            f"heads, return what the model decides by, such as their mean; or {_OWN.format(key=found[0])}"
        )
    if len(found) > 1:
        warn(f"model: returned a {type(output).__name__} with {shown}; the first is taken as logits")
    return found[0]


def _is_logits(value: object, rows: int) -> bool:
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dim() == 2
        and len(value) == rows
        and value.shape[1] > 1
    )


def _shown(entries: Mapping[Any, Any]) -> str:
    """What an output holds, in words."""
    shapes = {
        key: tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__ for key, value in entries.items()
    }
    return ", ".join(f"{key!r}: {shape}" for key, shape in shapes.items()) or "nothing"
