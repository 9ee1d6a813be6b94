"""Operations without a useful gradient, with that of the identity: straight through.

Source: Bengio, Leonard and Courville, "Estimating or Propagating Gradients Through Stochastic Neurons" (2013), section
4; the same as BPDA with the identity, Athalye et al., "Obfuscated Gradients Give a False Sense of Security" (2018),
section 4.1, of each operation on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_STEPS = ("round", "floor", "ceil", "trunc", "fix", "sign", "sgn")
_ROUNDING = {found for name in _STEPS for found in (getattr(torch, name), getattr(Tensor, name))}
_ROUNDING_IN_PLACE = {getattr(Tensor, f"{name}_") for name in _STEPS}
_DIVIDING = {torch.div, Tensor.div, torch.divide, Tensor.divide}
_FLOOR_DIVIDING = {torch.floor_divide, Tensor.floor_divide, Tensor.__floordiv__}
_DETACHING = {torch.detach, Tensor.detach, torch.detach_, Tensor.detach_, Tensor.data.__get__}  # type: ignore[attr-defined]
_CONVERTING = {Tensor.long, Tensor.int, Tensor.short, Tensor.char, Tensor.byte, Tensor.to, Tensor.type}
_LARGEST = {torch.argmax, Tensor.argmax}
# Where torch refuses tensors that require gradients, or warns of them.
_LEAVING = {Tensor.numpy, Tensor.__array__, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__format__}


class StraightThrough(TorchFunctionMode):
    """Inside, what rounds passes gradients on as they come, and nothing detaches; values are the same as without.

    ``round``, ``floor``, ``ceil``, ``trunc``, ``sign``, divisions that round and conversions to integers have the
    gradient of what they round, and ``one_hot`` of an ``argmax`` over the last axis has that of what the largest was
    sought in. ``detach`` and ``.data`` return the tensor itself, and ``no_grad`` has no effect. Comparisons, indices,
    numpy and ``inference_mode`` have no gradient here either.

    Example:
        >>> x = torch.tensor([0.4, 0.6], requires_grad=True)
        >>> with StraightThrough(), torch.no_grad():
        ...     out = (3 * x).detach().round()
        >>> out.detach(), torch.autograd.grad(out.sum(), x)[0]
        (tensor([1., 2.]), tensor([3., 3.]))
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What torch calls for each of its functions, with this mode switched off."""
        kwargs = dict(kwargs or {})
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        if not args:
            return func(**kwargs)
        if func is torch._C._set_grad_enabled and not args[0]:
            return None
        if func in _DETACHING:
            return args[0]
        if func in _LEAVING:
            return func(args[0].detach(), *args[1:], **kwargs)
        if func in _ROUNDING_IN_PLACE:
            smooth, value = args[0], func(args[0].detach().clone(), *args[1:], **kwargs)
            return smooth.copy_(_through(_same, value, smooth))
        value = func(*args, **kwargs)
        if any(hasattr(one, "source") for one in args) and isinstance(value, Tensor):
            return self._of_integers(func, value, args, kwargs)
        if func in _ROUNDING:
            return _through(_same, value, args[0])
        if func in _FLOOR_DIVIDING or (func in _DIVIDING and kwargs.get("rounding_mode")):
            return _through(torch.true_divide, value, *args[:2])
        if func is Tensor.__rfloordiv__:
            return _through(torch.true_divide, value, *args[1::-1])
        if isinstance(value, Tensor) and not value.is_floating_point():
            _keep_in_mind(func, value, args[0])
        return value

    def _of_integers(self, func: Any, value: Tensor, args: Any, kwargs: Any) -> Tensor:
        """The value with a gradient by what integers were made of; an integer value keeps in mind what that is."""
        # The same function of floating point numbers of the same values.
        made = [_through(_same, one.to(one.source), one.source) if hasattr(one, "source") else one for one in args]
        try:
            smooth = self.__torch_function__(func, (), tuple(made), kwargs)
        except (RuntimeError, TypeError, IndexError):
            # Some functions are of integers alone, as those that take indices.
            return value
        if value.is_floating_point():
            return _through(_same, value, smooth) if smooth.shape == value.shape else value
        value.source = smooth  # type: ignore[attr-defined]
        return value


def _keep_in_mind(func: Any, value: Any, first: Any) -> None:
    """Note at an integer value what it was made of, where that has a gradient."""
    if func in _LARGEST:
        value.largest_of = first
        return
    scores = getattr(first, "largest_of", None) if func is torch.nn.functional.one_hot else None
    source = first if func in _CONVERTING else scores
    if isinstance(source, Tensor) and source.requires_grad and source.shape == value.shape:
        value.source = source


def _same(x: Tensor) -> Tensor:
    return x


def _through(smooth: Callable[..., Any], value: Any, *args: Any) -> Any:
    """The value, with the gradient of a smooth function of the arguments."""
    wanted = any(isinstance(one, Tensor) and one.requires_grad for one in args)
    return _Through.apply(smooth(*args), value.detach()) if wanted else value  # type: ignore[no-untyped-call]


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, smooth: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        return cotangent, None
