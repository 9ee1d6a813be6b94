"""The values and the storage of a tensor at one moment."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorState:
    """What a tensor was, to be put back whatever was done to it: in place, through ``.data``, ``set_`` or its storage.

    ``kept`` is a copy of its values made before, which is used where they are still the same.
    """

    def __init__(self, tensor: Tensor, *, kept: Tensor | None = None) -> None:
        self.tensor, self._kind = tensor, type(tensor)
        # Another tensor on the same storage, which stays where it is when the first is moved.
        self._alias = tensor.detach()
        # The same as integers, which compare alike where floats do not: NaN, and zeros of either sign.
        self._bits = _as_bits(self._alias)
        self._storage = None if self._bits is None else self._bits.untyped_storage()
        self._bytes = 0 if self._storage is None else self._storage.nbytes()
        self.copy = None if self._bits is None else kept if _same(self._bits, kept) else self._bits.clone()

    def restore(self) -> bool:
        """Put type, storage and values back; whether the values had changed."""
        tensor, alias, changed = self.tensor, self._alias, False
        if type(tensor) is not self._kind:
            tensor.__class__ = self._kind
        moved = not _same_place(tensor, alias)
        if self._storage is not None and self._storage.nbytes() != self._bytes:
            self._storage.resize_(self._bytes)
            changed = True
        if moved:
            # Where it lies does not count: some attacks move networks to another device.
            held = _as_bits(tensor.detach().to(alias.device)) if _readable(tensor) else None
            changed = changed or not _same(held, self.copy)
            tensor.data = alias
        if not _same(self._bits, self.copy) and self._bits is not None and self.copy is not None:
            with torch.inference_mode(alias.is_inference()):
                self._bits.copy_(self.copy)
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


def _as_bits(tensor: Tensor) -> Tensor | None:
    """A dense tensor as integers of its width, on the same storage; None for others, whose values are not compared."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return None
    try:
        whole = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return whole.view(_BITS[whole.element_size()])
    except (NotImplementedError, RuntimeError):
        return None


def _same(bits: Tensor | None, copy: Tensor | None) -> bool:
    if bits is None or copy is None:
        return bits is copy
    if bits is copy:
        return True
    return bits.dtype == copy.dtype and bits.shape == copy.shape and bits.device == copy.device and bits.equal(copy)


def _same_place(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape or one.device != other.device or one.layout != other.layout:
        return False
    return one.layout != torch.strided or (one.stride() == other.stride() and one.data_ptr() == other.data_ptr())


def _readable(tensor: Tensor) -> bool:
    """Whether the storage holds all that shape and strides point at."""
    if tensor.layout != torch.strided or not tensor.numel():
        return tensor.layout == torch.strided
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()
