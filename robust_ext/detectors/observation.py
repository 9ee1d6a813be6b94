"""An observation of one forward pass of a classifier: its logits and the outputs of named layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError, ModelError


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
        output = self.layers[layer]
        if pool and output.dim() > 2:
            return output.mean(tuple(range(2, output.dim())))
        return output.flatten(1)


def observe(classifier: nn.Module, x: Tensor, layers: Sequence[str] = ()) -> Observation:
    """Run a classifier once and keep the outputs of some of its layers; gradients flow through all of them.

    Args:
        classifier: From inputs ``(N, ...)`` to logits ``(N, K)``.
        x: Inputs.
        layers: Names of layers, as in ``classifier.named_modules()``; each is to be called once.

    Raises:
        InvalidArgumentError: There is no layer of that name.
        ModelError: A layer was not called exactly once, or returned no tensor.

    Example:
        >>> import torch
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> observed = observe(network, torch.zeros(5, 2, 2), ["1", "2"])
        >>> observed.logits.shape, observed.layers["2"].shape
        (torch.Size([5, 2]), torch.Size([5, 3]))
    """
    outputs: dict[str, list[object]] = {name: [] for name in layers}
    modules = dict(classifier.named_modules())
    with ExitStack() as hooks:
        for name, kept in outputs.items():
            if name not in modules:
                known = ", ".join(entry for entry in list(modules)[-8:] if entry) or "none"
                expected = f"names of layers of the classifier (the last ones: {known})"
                raise InvalidArgumentError("layers", name, expected)
            hook = modules[name].register_forward_hook(lambda _module, _args, out, kept=kept: kept.append(out))
            hooks.enter_context(hook)
        logits = classifier(x)
    seen: dict[str, Tensor] = {}
    for name, found in outputs.items():
        if len(found) != 1:
            raise ModelError(f"layer {name!r} was called {len(found)} times in one forward pass, expected once")
        if not isinstance(found[0], Tensor):
            raise ModelError(f"layer {name!r} returned {type(found[0]).__name__}, expected a tensor")
        seen[name] = found[0]
    return Observation(x, logits, seen)
