"""Layers of a classifier, found by watching one forward pass, for detectors that look at hidden layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.validation import check_integer
from robust_ext.models.features import split_linear

# They repeat the values before them in eval mode, in another shape at most.
_SAME = (nn.modules.dropout._DropoutNd, nn.Flatten, nn.Unflatten, nn.Identity)
# They make one layer with what is before them.
_COMPLETING = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.LocalResponseNorm,
    *(
        kind
        for kind in vars(nn.modules.activation).values()
        if isinstance(kind, type) and kind.__module__ == nn.modules.activation.__name__
        if issubclass(kind, nn.Module) and kind is not nn.MultiheadAttention
    ),
)


class _Call(NamedTuple):
    """One call of a module; tensors are told apart by which object they are."""

    name: str
    module: nn.Module
    entered: object
    left: object


def activation_layers(classifier: nn.Module, inputs: Tensor, *, most: int = 30) -> tuple[str, ...]:
    """Names of the layers of a classifier whose outputs describe an input, in the order of a pass of ``(n, ...)``.

    These are modules that are called exactly once and return a float tensor with one row an input:

    - without parts: those with weights, and all of torch's but dropout, flatten and identity. One that is followed
      directly by modules of normalisation or activation is left out; the last of these stands for all of them.
    - with parts, such as residual blocks: those that return something that none of their parts does.

    Of functions, and modules that are called several times, what enters them is taken. Of more than ``most``, first the
    parts of other layers in the list are left out, and then layers are taken at even distances, the first and the last
    among them. ModelError: there is no such layer.

    Example:
        >>> network = nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3)).eval()
        >>> activation_layers(network, torch.rand(2, 1, 4, 4))
        ('1', '3')
    """
    check_integer("most", most, minimum=1)
    once = _once(_watched(classifier, inputs))
    completed = {id(call.entered) for call in once if isinstance(call.module, _COMPLETING)}
    returned: set[int] = set()
    names = []
    for call in once:
        leaf = next(call.module.children(), None) is None
        # A module without parts counts where it has weights, or is one of torch's.
        weights = next(call.module.parameters(), None) is not None
        computes = weights or type(call.module).__module__.startswith("torch.nn.")
        if not (computes if leaf else id(call.left) not in returned):
            continue
        returned.add(id(call.left))
        # In place, an activation returns what has entered it.
        in_place = isinstance(call.module, _COMPLETING) and call.left is call.entered
        part = leaf and id(call.left) in completed and not in_place
        values = call.left
        described = isinstance(values, Tensor) and values.is_floating_point() and values.dim() >= 2
        rows = values.shape[0] if isinstance(values, Tensor) and described else -1
        if rows == len(inputs) and not part and not isinstance(call.module, _SAME):
            names.append(call.name)
    if not names:
        raise ModelError(
            "classifier: no module is called exactly once in a forward pass and returns a row an input, so that no "
            "layer can be watched; name layers, or build the network of modules"
        )
    if len(names) > most:
        names = [name for name in names if not any(name.startswith(other + ".") for other in names)]
    if len(names) > most:
        step = (len(names) - 1) / max(most - 1, 1)
        names = [names[round(position * step)] for position in range(most)]
    return tuple(names)


def hidden_layer(classifier: nn.Module, inputs: Tensor) -> str | None:
    """Name of the layer whose output enters the last linear layer of a classifier, the one that makes the logits.

    None where a function makes these features, so that no module has them as its output. SplitError: no linear layer
    makes the logits of the inputs ``(n, ...)``.
    """
    readout = split_linear(classifier, inputs).layer
    calls = _watched(classifier, inputs)
    entered = next((call.entered for call in calls if call.name == readout), None)
    return next((call.name for call in _once(calls) if call.left is entered and entered is not None), None)


def _once(calls: list[_Call]) -> list[_Call]:
    counts = Counter(call.name for call in calls)
    return [call for call in calls if counts[call.name] == 1]


def _watched(classifier: nn.Module, inputs: Tensor) -> list[_Call]:
    """The calls of all parts of a classifier in one forward pass, in the order in which they return."""
    calls: list[_Call] = []
    with ExitStack() as hooks, torch.no_grad():
        for name, part in classifier.named_modules():
            if name:
                hook = part.register_forward_hook(
                    lambda module, args, out, name=name: calls.append(_Call(name, module, (*args, None)[0], out))
                )
                hooks.enter_context(hook)
        # A copy, as a module may work on its input in place.
        classifier(inputs.clone())
    return calls


def check_name(value: object) -> str:
    """Return the name of a layer, as a setting ``layer`` has it."""
    if not isinstance(value, str):
        raise InvalidArgumentError("layer", value, "the name of a layer")
    return value


def check_names(value: object) -> tuple[str, ...]:
    """Return names of layers, as a setting ``layers`` has them, as a tuple."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(name, str) for name in value):
        raise InvalidArgumentError("layers", value, "a list of names of layers")
    return tuple(value)
