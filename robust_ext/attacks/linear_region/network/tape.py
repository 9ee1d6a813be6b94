"""Records what a network does: its steps, and which tensors hold their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from robust_ext.attacks.linear_region.network.affine import AffineMap
from robust_ext.attacks.linear_region.network.calls import Call, name_of, tensors_in
from robust_ext.attacks.linear_region.network.chosen_map import ChosenMap
from robust_ext.attacks.linear_region.network.gates import Gate
from robust_ext.core.errors import ModelError

_SUPPORTED = (
    "linear layers, convolutions, batch normalisation in eval mode, average and max pooling, relu, leaky_relu, prelu, "
    "relu6, hardtanh, hardsigmoid, clamp, abs, threshold, maximum and minimum, comparisons, where, sort, topk, sums, "
    "products with constants and masks, means, indexing, padding, interpolation, concatenation and reshaping. "
    "robust_ext:BoundarySearch() searches any network that has gradients"
)
# Rounding to these is no affine function.
_COARSE = (torch.float16, torch.bfloat16)

# Functions that return something about a tensor, or another one of its shape, without its values.
_WITHOUT_VALUES = {
    *("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size"),
    *("dtype", "device", "layout", "is_cuda", "is_cpu", "is_mps", "is_meta", "is_sparse", "is_quantized", "get_device"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_leaf", "requires_grad", "requires_grad_", "grad_fn"),
    *("register_hook", "__len__", "__repr__", "__format__", "__hash__"),
    *("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"),
}


@dataclass(frozen=True)
class Step:
    """One operation of a network, on the values of these numbers; 0 is the network's input."""

    operation: AffineMap | Gate
    inputs: tuple[int, ...]
    output: int


class Tape(TorchFunctionMode):
    """Records every function that a network calls and that depends on the input ``x``, while it is entered.

    A value is *chosen* where it depends on the input through choices alone, such as a comparison, so that it is
    constant in each linear region. ``rules`` record a function, by its plain name; that of ``""`` records any function
    of chosen values. ``name`` is that of the function being called.
    """

    def __init__(self, x: Tensor, rules: Mapping[str, Callable[[Tape, Call], Any]]) -> None:
        super().__init__()
        self._rules = rules
        self.rows = x.shape[0]
        self.steps: list[Step] = []
        self.name = ""
        # Number and version of each result. Tensors are held, so that no other can get their identity.
        self._results = {id(x): (x, 0, x._version)}
        self._last_only: dict[int, tuple[Tensor, str]] = {}
        self._views: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._chosen: set[int] = set()
        self._count = 1

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, name_of(func)
        dependent = [t for t in tensors_in((args, kwargs)) if self.depends(t)]
        if not dependent or name in _WITHOUT_VALUES:
            return func(*args, **kwargs)
        chosen = name != "__setitem__" and all(self.is_chosen(t) for t in dependent)
        self.name = name
        if not chosen and name not in self._rules:
            raise self.refusal("it is not among the piecewise affine functions that can be followed")
        for tensor in dependent:
            if id(tensor) in self._last_only:
                raise self.refusal(self._last_only[id(tensor)][1])
        if kwargs.get("out") is not None:
            raise self.refusal("it writes to a tensor given as out")
        return self._rules["" if chosen else name](self, Call(name, func, args, kwargs))

    def depends(self, value: object) -> bool:
        """Whether a value depends on the input."""
        if not isinstance(value, Tensor):
            return False
        return value.requires_grad or id(value) in self._results or id(value) in self._last_only

    def is_chosen(self, tensor: Tensor) -> bool:
        """Whether a value depends on the input through choices alone."""
        return id(tensor) in self._results and self._results[id(tensor)][1] in self._chosen

    def number(self, tensor: Tensor) -> int:
        """The number of a value that depends on the input, of any kind."""
        if id(tensor) not in self._results:
            hidden = "a step that cannot be seen, such as a scripted or compiled part; use the plain module"
            raise self.refusal(f"its input comes from {hidden}")
        _, number, version = self._results[id(tensor)]
        if version != tensor._version:
            raise self.refusal("its input was changed in place through a view")
        return number

    def number_before(self, tensor: Tensor) -> int:
        """The number of a value as it was recorded, whatever changed it since."""
        return self._results[id(tensor)][1]

    def affine(self, tensor: Tensor) -> int:
        """The number of a value as an affine function of the input: one that is chosen becomes a constant."""
        number = self.number(tensor)
        if number not in self._chosen:
            return number
        return self.emit(ChosenMap(lambda value: value, (), (tensor.detach().clone(),), self.rows), number)

    def emit(self, operation: AffineMap | Gate, *inputs: int, chosen: bool = False) -> int:
        """Record a step on values of these numbers, and return the number of its result."""
        number = self._count
        self._count += 1
        self.steps.append(Step(operation, inputs, number))
        if chosen:
            self._chosen.add(number)
        return number

    def emit_function(self, function: Callable[..., Tensor], *inputs: Tensor) -> int:
        """Record an affine function of tensors that depend on the input, and return the number of its result."""
        return self.emit(AffineMap(function, inputs), *map(self.affine, inputs))

    def record(self, call: Call, operation: AffineMap | Gate, *inputs: Tensor) -> Tensor:
        """Record a call as a step on tensors that depend on the input, and then carry it out: it may change them."""
        number = self.emit(operation, *map(self.affine, inputs))
        return self.bind(call.run(), number)

    def bind(self, tensor: Tensor, number: int) -> Tensor:
        """Record that a tensor holds a value, and return it."""
        self.check_kind(tensor)
        if tensor.dim() == 0 or tensor.shape[0] % self.rows:
            raise self.refusal(f"its result of shape {tuple(tensor.shape)} does not have the batch first")
        self._results[id(tensor)] = tensor, number, tensor._version
        return tensor

    def check_kind(self, tensor: Tensor) -> None:
        """Raise where a result is of a kind that cannot be followed, whatever made it."""
        if tensor.is_inference():
            raise self.refusal("it runs in inference mode, in which changes in place cannot be seen")
        if tensor.dtype in _COARSE:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise self.refusal(f"it computes in {kind}, whose rounding is not affine; give a float32 copy of it")

    def bind_last(self, tensor: Tensor, why: str, number: int | None = None) -> Tensor:
        """Record that no function may use a tensor, and why; with the number of what it stands for as the result."""
        self._last_only[id(tensor)] = tensor, why
        return tensor if number is None else self.bind(tensor, number)

    def bind_view(self, tensor: Tensor, base: Tensor) -> None:
        """Record that a tensor was taken from another, whose memory it may share."""
        self._views[id(tensor)] = tensor, base, base._version

    def changed_through(self, view: Tensor, base: Tensor) -> bool:
        """Whether all changes of a tensor since it was recorded went through this view, as ``x[i] += 1`` does it."""
        if id(view) not in self._views or id(base) not in self._results or id(view) not in self._results:
            return False
        _, origin, version = self._views[id(view)]
        return origin is base and self._results[id(base)][2] == version and self._results[id(view)][2] == view._version

    def number_of_logits(self, logits: object) -> int:
        """The number of the network's result."""
        if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[0] != self.rows:
            shown = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            raise ModelError(f"the network returned {shown}, expected logits of shape ({self.rows}, classes)")
        if not self.depends(logits):
            raise ModelError("the network's logits do not depend on its input in a way that can be followed")
        self.name = "the network's result"
        if id(logits) in self._last_only and id(logits) not in self._results:
            raise self.refusal(self._last_only[id(logits)][1])
        return self.affine(logits)

    def refusal(self, why: str) -> ModelError:
        """The error for the function being called."""
        return ModelError(f"linear regions cannot be followed through {self.name}: {why}; supported are {_SUPPORTED}")
