"""One layer of a network with another backward pass, while the network stays what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.specification import did_you_mean
from robust_ext.models.straight_through import StraightThrough
from robust_ext.models.vjp import VJP, attach, with_vjp

LAYER_BACKWARDS = ("identity", "straight_through")
Backward = str | Callable[[Tensor], Tensor]
_SHOWN = 6


def find_layer(network: nn.Module, name: str, *, argument: str = "layer") -> nn.Module:
    """The module of a network that goes by a name, or whose name ends in it: ``net.quantise`` or ``quantise``.

    Names get longer at the front where a network is wrapped. Of several that end alike it is the outermost, where all
    others lie deeper in what holds it, as ``net.head.0`` does beside ``net.0``.

    Raises:
        InvalidArgumentError: There is none, or there are several.
    """
    named = {full: part for full, part in network.named_modules(remove_duplicate=False) if full}
    ends = [full for full in named if f".{full}".endswith(f".{name}")]
    if ends:
        first = min(ends, key=len)
        beside = first.removesuffix(name)
        if len({id(named[full]) for full in ends}) == 1 or all(full.startswith(beside) for full in ends if beside):
            found: nn.Module = named[first]
            return found
        expected = f"a longer name, as there are several: {', '.join(ends[:_SHOWN])}"
        raise InvalidArgumentError(argument, name, expected)
    near = did_you_mean(name, named) or did_you_mean(name, {full.rpartition(".")[2] for full in named})
    listed = ", ".join([*named][:_SHOWN]) + (", ..." if len(named) > _SHOWN else "") or "no layers"
    raise InvalidArgumentError(argument, name, f"the name of a layer, as in named_modules() ({listed}){near}")


@dataclass
class Calls:
    """How often a layer was called while it had another backward pass, and what its network was called for."""

    count: int = 0
    wanted: bool = False  # Whether the network was called with gradients enabled, whatever it does itself


@contextmanager
def other_backward(network: nn.Module, layer: nn.Module, backward: Backward, *, name: str) -> Iterator[Calls]:
    """Inside the block, a layer has another gradient; its values and all else of the network are the same.

    Args:
        network: What gradients are wanted of: where it is called for them, the layer has one inside ``no_grad`` too.
        layer: Whoever calls it, and from wherever; the network itself, or a part of it.
        backward: ``"identity"``: the gradient of its output is that of its input, of the same shape.
            ``"straight_through"``: its operations have those of :class:`StraightThrough`. A function or module: its
            gradient at the input.
        name: For error texts.
    """
    calls = Calls()

    def enter(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, calls.wanted = calls.wanted, torch.is_grad_enabled()
        try:
            return original(*args, **kwargs)
        finally:
            calls.wanted = before

    def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.count += 1
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.requires_grad]
        if not given or not (calls.wanted or torch.is_grad_enabled()):
            return original(*args, **kwargs)
        with torch.enable_grad():
            if backward == "straight_through":
                return straight_through(original, *args, **kwargs)
            return _approximated(original, backward, args, kwargs, name)

    with _forward_of(network, enter), _forward_of(layer, run):
        yield calls


@contextmanager
def _forward_of(module: nn.Module, replacement: Callable[..., Any]) -> Iterator[None]:
    """Inside, a module's forward pass is this function of its own forward pass and the arguments."""
    attributes = vars(module)
    before = attributes.get("forward")
    # Not assigned as usual: modules may have a __setattr__ of their own.
    attributes["forward"] = partial(replacement, module.forward)
    try:
        yield
    finally:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before


def straight_through(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function inside :class:`StraightThrough`; ModelError where its tensor has no gradient all the same."""
    # A leaf cannot be worked on in place while gradients are wanted, which no_grad inside would allow.
    args = tuple(one.clone() if isinstance(one, Tensor) and one.is_leaf and one.requires_grad else one for one in args)
    with StraightThrough():
        out = function(*args, **kwargs)
    if isinstance(out, Tensor) and not out.requires_grad:
        raise ModelError(
            "BPDA: no gradient passes straight through, as it is lost to integers, comparisons, numpy, inference_mode "
            "or compiled code; choose the identity, of a layer around them, or a differentiable substitute"
        )
    return out


def identity_vjp(value: Tensor, x: Tensor, *, name: str) -> VJP:
    """The gradient of the identity for a value computed of ``x``; ModelError where their shapes differ."""
    if value.shape != x.shape:
        raise ModelError(
            f"BPDA: {name} makes shape {tuple(value.shape)} of {tuple(x.shape)}, where the identity has no gradient; "
            "choose backward='straight_through', or give a differentiable substitute as backward"
        )
    return lambda cotangent: [cotangent.to(x.dtype)]


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
        if callable(backward):
            return value, partial(substitute_vjp, backward, x.clone())
        return value, identity_vjp(value, x, name=f"layer {name!r}")

    return attach(compute, args[0])
