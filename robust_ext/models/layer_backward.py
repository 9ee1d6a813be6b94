"""One layer of a network with another backward pass, while the network stays what it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.specification import did_you_mean
from robust_ext.models.vjp import VJP, attach, with_vjp

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
        """Handle each of torch's functions, with this mode switched off."""
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


LAYER_BACKWARDS = ("identity", "straight_through")
Backward = str | Callable[[Tensor], Tensor]
_SHOWN = 6


def find_layers(network: nn.Module, names: str, *, argument: str = "layer") -> dict[str, nn.Module]:
    """The modules of a network that names with commas between them are of, or end in: ``net.quantise`` or ``quantise``.

    Names get longer at the front where a network is wrapped. Of several that end alike it is the outermost, where all
    others lie deeper in what holds it, as ``net.head.0`` does next to ``net.0``. InvalidArgumentError: there is none,
    or there are several.
    """
    named = {full: part for full, part in network.named_modules(remove_duplicate=False) if full}
    found: dict[str, nn.Module] = {}
    for name in map(str.strip, names.split(",")):
        ends = [full for full in named if f".{full}".endswith(f".{name}")]
        if not ends:
            near = did_you_mean(name, named) or did_you_mean(name, {full.rpartition(".")[2] for full in named})
            listed = ", ".join([*named][:_SHOWN]) + (", ..." if len(named) > _SHOWN else "") or "no layers"
            raise InvalidArgumentError(argument, name, f"the name of a layer, as in named_modules() ({listed}){near}")
        first = min(ends, key=len)
        beside = first.removesuffix(name)
        if len({id(named[full]) for full in ends}) > 1 and not all(full.startswith(beside) for full in ends if beside):
            expected = f"a longer name, as there are several: {', '.join(ends[:_SHOWN])}"
            raise InvalidArgumentError(argument, name, expected)
        found[name] = named[first]
    return found


@contextmanager
def other_backward(
    network: nn.Module, layers: Mapping[str, nn.Module], backward: Backward
) -> Iterator[Callable[[], None]]:
    """Inside the block, layers have another gradient; their values and all else of the network are the same.

    Args:
        network: What gradients are wanted of: where it is called for them, the layers have one inside ``no_grad`` too.
        layers: By name, whoever calls them, and from wherever: the network itself, or parts of it.
        backward: ``"identity"``: the gradient of a layer's output is that of its input, of the same shape.
            ``"straight_through"``: its operations have those of :class:`StraightThrough`. A function or module: its
            gradient at the input.

    Yields:
        What raises ModelError where the network was called without calling one of the layers.
    """
    called, wanted = Counter[str](), False

    def enter(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal wanted
        before, wanted = wanted, torch.is_grad_enabled()
        called[""] += 1
        try:
            return original(*args, **kwargs)
        finally:
            wanted = before

    def run(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        called[name] += 1
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.requires_grad]
        if not given or not (wanted or torch.is_grad_enabled()):
            return original(*args, **kwargs)
        with torch.enable_grad():
            if backward == "straight_through":
                return straight_through(original, *args, **kwargs)
            return _approximated(original, backward, args, kwargs, name)

    def check() -> None:
        unused = [name for name in layers if not called[name]]
        if unused and called[""]:
            raise ModelError(
                f"layer {unused[0]!r}: a forward pass does not call it; name one that it calls (of compiled and "
                "scripted networks, attack the network they were made of)"
            )

    with ExitStack() as stack:
        if layers:
            stack.enter_context(forward_of(network, enter))
        for name, layer in layers.items():
            stack.enter_context(forward_of(layer, partial(run, name)))
        yield check


@contextmanager
def forward_of(module: nn.Module, replacement: Callable[..., Any]) -> Iterator[None]:
    """Inside, a module's forward pass is this function of its own forward pass and the arguments."""
    attributes = vars(module)
    before = {name: attributes[name] for name in ("forward",) if name in attributes}
    # Not assigned as usual: modules may have a __setattr__ of their own.
    attributes["forward"] = partial(replacement, module.forward)
    try:
        yield
    finally:
        del attributes["forward"]
        attributes.update(before)


def straight_through(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function inside :class:`StraightThrough`; ModelError where its tensor has no gradient all the same."""
    # A leaf cannot be worked on in place while gradients are wanted, which no_grad inside would allow.
    args = tuple(one.clone() if isinstance(one, Tensor) and one.is_leaf and one.requires_grad else one for one in args)
    with StraightThrough():
        out = function(*args, **kwargs)
    if isinstance(out, Tensor) and not out.requires_grad:
        raise ModelError(
            "BPDA: no gradient passes straight through, as it is lost to indices, comparisons, numpy, inference_mode "
            "or compiled code; choose the identity, of a layer around them, or a differentiable substitute"
        )
    return out


def approximated(value: Tensor, x: Tensor, backward: Backward, *, name: str) -> tuple[Tensor, VJP]:
    """A value computed of ``x``, and the gradient of the identity or of a substitute at ``x``.

    ModelError: shapes of value and input, or of the substitute's value, differ.
    """
    if not callable(backward):
        if value.shape != x.shape:
            raise ModelError(
                f"BPDA: {name} makes shape {tuple(value.shape)} of {tuple(x.shape)}, where the identity has no "
                "gradient; choose backward='straight_through', or give a differentiable substitute as backward"
            )
        return value, lambda cotangent: [cotangent.to(x.dtype)]
    # A copy, as the caller may change its input in place.
    return value, partial(substitute_vjp, backward, x.clone())


def substitute_vjp(substitute: Callable[[Tensor], Tensor], x: Tensor, cotangent: Tensor) -> list[Tensor | None]:
    """The gradient of a substitute at ``x``; ModelError where its value has not the shape of the cotangent."""
    value, pull = with_vjp(substitute, x)
    if value.shape != cotangent.shape:
        raise ModelError(
            f"BPDA: the substitute returned shape {tuple(value.shape)}, expected that of the output it stands for, "
            f"{tuple(cotangent.shape)}"
        )
    return list(pull(cotangent))


def _approximated(
    original: Callable[..., Any], backward: Backward, args: tuple[Any, ...], kwargs: dict[str, Any], name: str
) -> Any:
    """The layer's output with the gradient of the identity or of a substitute, of its first argument."""
    if not args or not isinstance(args[0], Tensor):
        raise ModelError(f"BPDA: layer {name!r} is not called with a tensor first; choose backward='straight_through'")

    def compute(x: Tensor) -> tuple[Tensor, VJP]:
        value = original(x, *args[1:], **kwargs)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            shown = f"dtype {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise ModelError(
                f"BPDA: layer {name!r} returned {shown}, expected a floating point tensor; name the layer around it"
            )
        return approximated(value, x, backward, name=f"layer {name!r}")

    return attach(compute, args[0])
