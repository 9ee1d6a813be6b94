"""An observation of one forward pass of a classifier: its logits and the outputs of named layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from robust_ext.core.errors import InvalidArgumentError, ModelError

T = TypeVar("T")


@dataclass(frozen=True)
class Observation:
    """One forward pass.

    Args:
        inputs: ``(N, ...)``.
        logits: Of the classifier, ``(N, K)``.
        layers: Outputs of layers by name, ``(N, ...)`` each.
    """

    inputs: Tensor
    logits: Tensor
    layers: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def predicted(self) -> Tensor:
        """The predicted classes, int64 ``(N,)``."""
        return self.logits.detach().argmax(1)

    def units(self, layer: str, *, pool: bool) -> Tensor:
        """The values ``(N, values)`` of a layer, or with ``pool`` the means ``(N, C)`` of its channels."""
        values = self.layers[layer]
        return values.flatten(2).mean(2) if pool and values.dim() > 2 else values.flatten(1)


def observe(classifier: nn.Module, x: Tensor, layers: Sequence[str] = ()) -> Observation:
    """Run a classifier once on ``(N, ...)`` and keep the outputs of some of its layers, with gradients.

    ``layers`` are names as in ``classifier.named_modules()``; another one raises InvalidArgumentError, and a layer that
    is not called exactly once, or returns no tensor, ModelError.

    Example:
        >>> import torch
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> observed = observe(network, torch.zeros(5, 2, 2), ["1", "2"])
        >>> observed.logits.shape, observed.layers["2"].shape
        (torch.Size([5, 2]), torch.Size([5, 3]))
    """
    with observing(classifier, layers) as passes:
        classifier(x)
    return passes[-1]


@contextmanager
def observing(network: nn.Module, layers: Sequence[str]) -> Iterator[list[Observation]]:
    """Observe every forward pass of a network inside the block; see :func:`observe`."""
    outputs: dict[str, list[Any]] = {name: [] for name in layers}
    modules, passes = dict(network.named_modules()), list[Observation]()

    def note(_module: nn.Module, args: tuple[Any, ...], logits: Tensor) -> None:
        for name, found in outputs.items():
            if len(found) != 1:
                raise ModelError(f"layer {name!r} was called {len(found)} times in one forward pass, expected once")
            if not isinstance(found[0], Tensor):
                raise ModelError(f"layer {name!r} returned {type(found[0]).__name__}, expected a tensor")
        passes.append(Observation(args[0], logits, {name: found.pop() for name, found in outputs.items()}))

    with ExitStack() as hooks:
        for name, kept in outputs.items():
            if name not in modules:
                known = ", ".join(entry for entry in list(modules)[-8:] if entry) or "none"
                expected = f"names of layers of the classifier (the last ones: {known})"
                raise InvalidArgumentError("layers", name, expected)
            hook = modules[name].register_forward_hook(lambda _module, _args, out, kept=kept: kept.append(out))
            hooks.enter_context(hook)
        hooks.enter_context(network.register_forward_hook(note))
        yield passes


def repeatable(several: bool, function: Callable[..., T], *arguments: Any) -> T:
    """Return a function's output; where it is one of several such calls, it is called again for gradients.

    So memory stays that of one call; the draws are the same.
    """
    found: T = checkpoint(function, *arguments, use_reentrant=False) if several else function(*arguments)
    return found
