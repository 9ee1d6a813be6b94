"""The inputs of layers or operations of a network, as a module: one forward pass, without changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from robust_ext.core.errors import SplitError
from robust_ext.models.bpda import BPDA

_HALVES = (torch.float16, torch.bfloat16)
# What names of layers begin with where a BPDA stands around the network.
INSIDE = "wrapped."


@dataclass(frozen=True)
class Cut:
    """A place in a forward pass: what enters a layer, or an argument of an operation outside of layers.

    Attributes:
        layer: Name as in ``model.named_modules()``; None for an operation.
        operation: Its plain name, such as ``linear``.
        last: Which call of that operation, counted from the last, 1 (torch's faster paths without gradients make
            fewer calls, but those before).
        argument: Place or name of the argument.
        means: Dimensions that are averaged over.
    """

    layer: str | None = None
    operation: str = ""
    last: int = 1
    argument: int | str = 0
    means: tuple[int, ...] = ()

    def columns(self, seen: Tensor) -> Tensor:
        """Return the values as rows of numbers, ``(N, F)``; averages have at least single precision."""
        if self.means:
            seen = (seen.float() if seen.dtype in _HALVES else seen).mean(self.means)
        return seen.flatten(1) if seen.dim() > 2 else seen

    def __str__(self) -> str:
        words = f"{self.operation}, call {self.last} from the last" if self.layer is None else repr(self.layer)
        return f"{words}, averaged over {self.means}" if self.means else words


class Observed(nn.Module):
    """The values of a model at ``cuts``, flattened or averaged and concatenated; with ``logits`` as last columns."""

    def __init__(self, model: nn.Module, cuts: Sequence[Cut], *, logits: bool = False) -> None:
        super().__init__()
        self.model = model
        self.cuts = tuple(cuts)
        self.logits = logits
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        """Features ``(N, F)`` of inputs ``(N, ...)``, in half precision only where the inputs are."""
        if isinstance(self.model, BPDA) and self.model.through is not None:
            # What is computed inside of it is in no graph from its input: it has to stand around this.
            cuts = [replace(cut, layer=cut.layer and cut.layer.removeprefix(INSIDE)) for cut in self.cuts]
            out: Tensor = self.model.around(Observed(self.model.through, cuts, logits=self.logits))(x)
            return out
        entered: dict[str, list[Any]] = {cut.layer: [] for cut in self.cuts if cut.layer is not None}
        operations = _Operations([cut for cut in self.cuts if cut.layer is None])
        with ExitStack() as stack:
            for name, seen in entered.items():
                # The layer is looked up at each call, so that copies of this module observe their own network.
                hook = self.model.get_submodule(name).register_forward_pre_hook(
                    lambda _, args, named, seen=seen: seen.append(first_argument(args, named)), with_kwargs=True
                )
                stack.enter_context(hook)
            if operations.calls:
                stack.enter_context(operations)
            logits: Tensor = self.model(x)
        for name, seen in entered.items():
            if len(seen) != 1 or not isinstance(seen[0], Tensor):
                found = f"was called {len(seen)} times in one forward pass, expected once"
                if len(seen) == 1:
                    found = f"is entered by {type(seen[0]).__name__}, expected a tensor"
                raise SplitError(f"layer {name!r} {found}; give a pair (features, readout) instead")
        values = [operations.seen(cut) if cut.layer is None else entered[cut.layer][0] for cut in self.cuts]
        parts = [cut.columns(value) for cut, value in zip(self.cuts, values, strict=True)]
        parts += [logits] if self.logits else []
        features = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        # Of inputs of single precision, so that readouts need not be fitted in half of it.
        return features.float() if features.dtype in _HALVES and x.dtype not in _HALVES else features

    def of(self, model: nn.Module) -> Observed:
        """The same of another network with layers of the same names."""
        return Observed(model, self.cuts, logits=self.logits)

    def seen_through(self, view: BPDA) -> Observed:
        """The same of a BPDA around the network, with the gradients that it gives."""
        cuts = [replace(cut, layer=cut.layer and f"{INSIDE}{cut.layer}") for cut in self.cuts]
        return Observed(view, cuts, logits=self.logits)

    def extra_repr(self) -> str:
        """Return the places of the features."""
        return "; ".join([*map(str, self.cuts), *(["logits"] if self.logits else [])])


class LayerInput(Observed):
    """The input of one layer of a network, named as in ``model.named_modules()``, as a module.

    Of several layers, with commas between their names, it is concatenated.
    """

    def __init__(self, model: nn.Module, layer: str) -> None:
        super().__init__(model, [Cut(name) for name in layer_names(layer)])
        self.layer = layer


def layer_names(layer: str) -> list[str]:
    """Names of layers that are written with commas between them."""
    return list(dict.fromkeys(name.strip() for name in layer.split(",")))


def first_argument(args: Sequence[Any], named: dict[str, Any]) -> Any:
    """Return a module's first argument, by place or by name; None without arguments."""
    return args[0] if args else next(iter(named.values()), None)


def operation_name(func: Callable[..., Any]) -> str:
    """One name for the function, the method, the operator, what works in place, and torch.export's."""
    name = str(getattr(func, "__name__", func))
    if name == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return name.partition(".")[0].strip("_")


class _Operations(TorchFunctionMode):
    """Arguments of the last calls of the operations of some cuts."""

    def __init__(self, cuts: Sequence[Cut]) -> None:
        super().__init__()
        self.calls: dict[str, deque[tuple[Any, dict[str, Any]]]] = {
            name: deque(maxlen=max(cut.last for cut in cuts if cut.operation == name))
            for name in {cut.operation for cut in cuts}
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        calls = self.calls.get(operation_name(func))
        if calls is not None:
            calls.append((args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def seen(self, cut: Cut) -> Tensor:
        """Return the value at a cut."""
        calls = self.calls[cut.operation]
        if len(calls) < cut.last:
            raise SplitError(f"{cut}: called {len(calls)} times; give a pair (features, readout) instead")
        args, kwargs = calls[-cut.last]
        found: Tensor = args[cut.argument] if isinstance(cut.argument, int) else kwargs[cut.argument]
        return found
