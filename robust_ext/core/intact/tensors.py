"""The values and the storage of a tensor at one moment."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are alike to the last bit, NaN included."""
    if one.dtype != other.dtype or one.shape != other.shape or one.device != other.device:
        return False
    return torch.equal(_as_bits(one), _as_bits(other))


class TensorState:
    """What a tensor was, to be put back whatever was done to it: in place, through ``.data``, ``set_`` or its storage.

    ``kept`` is a copy of its values made before, which is used where they are still the same.
    """

    def __init__(self, tensor: Tensor, *, kept: Tensor | None = None) -> None:
        self.tensor, self._kind = tensor, type(tensor)
        # Another tensor on the same storage, which stays where it is when the first is moved.
        self._alias = tensor.detach()
        readable = self._alias.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
        self._bytes = self._alias.untyped_storage().nbytes() if readable else 0
        self.copy = _copied(self._alias, kept) if readable else None

    def restore(self) -> bool:
        """Put type, storage and copied values back; whether the values had changed."""
        tensor, alias = self.tensor, self._alias
        if type(tensor) is not self._kind:
            tensor.__class__ = self._kind
        if self.copy is None:
            if not _same_place(tensor, alias):
                tensor.data = alias
                return True
            return False
        moved, changed = not _same_place(tensor, alias), False
        storage = alias.untyped_storage()
        if storage.nbytes() != self._bytes:
            storage.resize_(self._bytes)
            changed = True
        if moved:
            changed = changed or not _readable(tensor) or not same_bits(tensor.detach(), self.copy)
            tensor.data = alias
        if not same_bits(alias, self.copy):
            with torch.inference_mode(alias.is_inference()):
                alias.copy_(self.copy)
            changed = True
        return changed


class GradientState:
    """Whether a parameter requires a gradient, and the gradient it has, kept aside where nothing can be added to it."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter, self._required, self._gradient = parameter, parameter.requires_grad, parameter.grad
        parameter.requires_grad_(False)
        parameter.grad = None

    def restore(self) -> None:
        """Put both back."""
        self._parameter.requires_grad_(self._required)
        self._parameter.grad = self._gradient


def _copied(tensor: Tensor, kept: Tensor | None) -> Tensor | None:
    """A copy of the values as they are; None where they cannot be compared, as those of other libraries' tensors."""
    try:
        return kept if kept is not None and same_bits(tensor, kept) else tensor.clone()
    except (NotImplementedError, RuntimeError):
        return None


def _as_bits(tensor: Tensor) -> Tensor:
    whole = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return whole.view(_BITS[whole.element_size()])


def _same_place(one: Tensor, other: Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.device == other.device
        and one.layout == other.layout
        and one.shape == other.shape
        and (one.layout != torch.strided or (one.stride() == other.stride() and one.data_ptr() == other.data_ptr()))
    )


def _readable(tensor: Tensor) -> bool:
    """Whether the storage holds all that shape and strides point at."""
    if tensor.layout != torch.strided or not tensor.numel():
        return tensor.layout == torch.strided
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()
