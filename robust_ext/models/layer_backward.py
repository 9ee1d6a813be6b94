"""One layer of a network with another backward pass, while the network stays what it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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


def find_layers(network: nn.Module, names: str, *, argument: str = "layer") -> dict[str, nn.Module]:
    """The modules that names with commas between them are of, by name; see :func:`find_layer`."""
    return {name.strip(): find_layer(network, name.strip(), argument=argument) for name in names.split(",")}


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
    """What was called inside :func:`other_backward`."""

    network: int = 0  # How often
    wanted: bool = False  # Whether the network is being called with gradients enabled, whatever it does itself
    layers: Counter[str] = field(default_factory=Counter)

    def check(self, names: Iterable[str]) -> None:
        """Raise ModelError where the network was called without calling one of these layers."""
        unused = [name for name in names if not self.layers[name]]
        if unused and self.network:
            raise ModelError(
                f"layer {unused[0]!r}: a forward pass does not call it; name one that it calls (of compiled and "
                "scripted networks, attack the network they were made of)"
            )


@contextmanager
def other_backward(network: nn.Module, layers: Mapping[str, nn.Module], backward: Backward) -> Iterator[Calls]:
    """Inside the block, layers have another gradient; their values and all else of the network are the same.

    Args:
        network: What gradients are wanted of: where it is called for them, the layers have one inside ``no_grad`` too.
        layers: By name, whoever calls them, and from wherever: the network itself, or parts of it.
        backward: ``"identity"``: the gradient of a layer's output is that of its input, of the same shape.
            ``"straight_through"``: its operations have those of :class:`StraightThrough`. A function or module: its
            gradient at the input.
    """
    calls = Calls()

    def enter(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, calls.wanted = calls.wanted, torch.is_grad_enabled()
        calls.network += 1
        try:
            return original(*args, **kwargs)
        finally:
            calls.wanted = before

    def run(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.layers[name] += 1
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.requires_grad]
        if not given or not (calls.wanted or torch.is_grad_enabled()):
            return original(*args, **kwargs)
        with torch.enable_grad():
            if backward == "straight_through":
                return straight_through(original, *args, **kwargs)
            return _approximated(original, backward, args, kwargs, name)

    with ExitStack() as stack:
        if layers:
            stack.enter_context(_forward_of(network, enter))
        for name, layer in layers.items():
            stack.enter_context(_forward_of(layer, partial(run, name)))
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
            "BPDA: no gradient passes straight through, as it is lost to indices, comparisons, numpy, inference_mode "
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
