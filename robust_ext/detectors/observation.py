"""What one forward pass of a classifier shows: its logits and the outputs of named layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        """The units of a layer: its values, or with ``pool`` its channels, each the mean over all positions.

        Returns:
            ``(N, C)`` when pooled, ``(N, values)`` otherwise.
        """
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
    handles = []
    for name in outputs:
        if name not in modules:
            known = ", ".join(entry for entry in list(modules)[-8:] if entry) or "none"
            raise InvalidArgumentError("layers", name, f"names of layers of the classifier (the last ones: {known})")
        handles.append(
            modules[name].register_forward_hook(lambda _module, _args, out, kept=outputs[name]: kept.append(out))
        )
    try:
        logits = classifier(x)
    finally:
        for handle in handles:
            handle.remove()
    kept: dict[str, Tensor] = {}
    for name, found in outputs.items():
        if len(found) != 1:
            raise ModelError(f"layer {name!r} was called {len(found)} times in one forward pass, expected once")
        if not isinstance(found[0], Tensor):
            raise ModelError(f"layer {name!r} returned {type(found[0]).__name__}, expected a tensor")
        kept[name] = found[0]
    return Observation(x, logits, kept)
