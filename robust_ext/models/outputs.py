"""The possible outputs of a classifier, and the rule for its logits, decided by forward passes.

A tensor ``(N, K)`` is taken unchanged, and of an object or a dict its ``logits``, ``output`` or ``out``. Elsewhere
every float tensor with a row for each input is a candidate: a single one is taken, and of several the one that agrees
with the labels clearly better than each other one. A single column is a model of two classes where it holds
probabilities, or where the labels are 0 and 1. What is left is refused with the candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import ModelError, warn
from robust_ext.core.statistics import paired_difference
from robust_ext.core.tasks import ONLY, SIGMOIDS, name_entries, name_output
from robust_ext.models.wrapping import Wrapped

_NAMES = ("logits", "output", "out")
# Rows that decide between candidates and readings, in batches of that many.
_ROWS, _BATCH = 256, 32
_SURE = 0.05  # The p-value of one candidate's agreeing with the labels better than another one
# Operations that change no values, which may follow a sigmoid.
_SHAPING = (
    "View",
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "Select",
    "Slice",
    "Alias",
    "Clone",
    "Copy",
    "Transpose",
    "TBack",
)


class LogitsOf(Wrapped):
    """A network that returns more than logits, reduced to them.

    Args:
        module: The network.
        entry: Where its logits are: an attribute or key, or the place in a tuple or list.

    Example:
        >>> import torch
        >>> class TwoOutputs(nn.Linear):
        ...     def forward(self, x):
        ...         return {"logits": super().forward(x), "features": x}
        >>> LogitsOf(TwoOutputs(4, 3), "logits")(torch.zeros(2, 4)).shape
        torch.Size([2, 3])
    """

    def __init__(self, module: nn.Module, entry: Hashable) -> None:
        super().__init__(module)
        self.entry = entry

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(N, K)`` of inputs ``(N, ...)``."""
        return _taken(self.module(x), self.entry)

    def extra_repr(self) -> str:
        """Return the entry's name."""
        return f"entry={self.entry!r}"


class TwoClass(Wrapped):
    """A network with one output for each input, as a classifier of two classes.

    Args:
        module: A network that returns ``(N,)`` or ``(N, 1)``: a logit z of class 1, or its probability p.
        probability: Whether it is the probability. Logits are then ``[log(1 - p), log p]`` instead of ``[0, z]``. A
            sigmoid in float32 is 1 for z above 17 and no normal number for z below -87: there the logarithms have a
            floor and no gradient.

    Example:
        >>> TwoClass(nn.Sequential(nn.Flatten(0), nn.Sigmoid()), probability=True)(torch.tensor([[0.0], [2.0]]))
        tensor([[-0.6931, -0.6931],
                [-2.1269, -0.1269]])
    """

    def __init__(self, module: nn.Module, *, probability: bool = False) -> None:
        super().__init__(module)
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(N, 2)`` of inputs ``(N, ...)``."""
        one: Tensor = self.module(x).reshape(len(x))
        if not self.probability:
            return torch.stack([torch.zeros_like(one), one], 1)
        precision = torch.finfo(one.dtype)
        return torch.stack([(1 - one).clamp_min(precision.eps / 2).log(), one.clamp_min(precision.tiny).log()], 1)


def reduced(
    module: nn.Module, output: object, run: Callable[[Tensor], Any], inputs: Tensor, labels: Tensor | None, *, rows: int
) -> tuple[nn.Module, Tensor]:
    """A module reduced to its logits, itself where it returns ``(N, K)``; and the tensor of the output that it reads.

    Args:
        module: The module.
        output: What it returned for the first ``rows`` inputs.
        run: Calls it on a batch, without gradients.
        inputs: ``(N, ...)``.
        labels: int64 ``(N,)``; None without any.
        rows: At least one.

    Raises:
        ModelError: Its logits cannot be told; the text names the task, or the candidates, and how to state them.
    """
    places = _candidates(output, rows, inputs)
    entry, one_column = places[0], _width(_taken(output, places[0])) == 1
    values: dict[Any, Tensor] = {}
    if len(places) > 1 or one_column:
        labels = None if labels is None else labels[:_ROWS]
        batches = [run(batch) for batch in torch.split(inputs[:_ROWS], _BATCH)]
        values = {place: torch.cat([_taken(one, place).float() for one in batches]) for place in places}
        entry = _chosen(values, labels, output)
    seen = _taken(output, entry)
    found = module if entry is None else LogitsOf(module, entry)
    if _width(seen) == 1:
        return _two_classes(found, values[entry], labels), seen
    inside = bool(((seen >= 0) & (seen <= 1)).all())
    if inside and not _are_probabilities(seen) and _ends_in_sigmoid(found, inputs[:rows]):
        raise ModelError(f"model: {seen.shape[1]} {SIGMOIDS}")
    return found, seen


def _taken(output: Any, entry: Hashable) -> Tensor:
    found: Tensor
    if isinstance(entry, str) and not isinstance(output, Mapping):
        found = getattr(output, entry)
    else:
        found = output if entry is None else output[entry]
    return found


def _candidates(output: object, rows: int, inputs: Tensor) -> list[Any]:
    """The places of an output that may be its logits; None stands for the output itself."""

    def fits(value: object) -> bool:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() not in (1, 2):
            return False
        return len(value) == rows and value[:1].numel() > 0

    entries = _entries(output)
    if isinstance(output, Tensor):
        places: list[Any] = [None]
    elif (task := name_entries(output)) is not None:
        raise ModelError(f"model: returned {task}")
    elif isinstance(output, Mapping):
        named = [name for name in _NAMES if isinstance(output.get(name), Tensor)]
        places = named[:1] or [name for name, value in entries.items() if fits(value)]
    elif isinstance(getattr(output, "logits", None), Tensor):
        places = ["logits"]
    elif isinstance(output, (tuple, list)):
        places = [place for place, value in entries.items() if fits(value)]
    else:
        raise ModelError(
            f"model: returned {type(output).__name__}, expected a tensor of logits, an object or dict that has logits, "
            "or a tuple; wrap the model in a module that returns the logits alone"
        )
    if not places:
        raise ModelError(
            f"{_shown(output)}, expected a tensor of logits ({rows}, K) in it; wrap the model in a module that returns "
            "the logits alone"
        )
    if len(places) == 1 and not fits(_taken(output, places[0])):
        raise ModelError(f"model: {name_output(_taken(output, places[0]), rows, inputs[:rows])}")
    return places


def _chosen(values: Mapping[Any, Tensor], labels: Tensor | None, output: object) -> Any:
    """The place whose values agree with the labels clearly better than all others."""
    kept: list[Any] = []
    # Logits come before their own softmax, and of equal ones the first counts.
    for place in sorted(values, key=lambda place: _are_probabilities(values[place])):
        likely = _as_probabilities(values[place])
        others = [_as_probabilities(values[other]) for other in kept]
        if not any(one.shape == likely.shape and torch.allclose(likely, one, atol=1e-5) for one in others):
            kept.append(place)
    if len(kept) == 1:
        return kept[0]
    module = "robust_ext.models.outputs.LogitsOf(model, {!r})"
    ways = " or ".join(module.format(place) for place in sorted(kept, key=list(values).index))
    pass_one = f"pass {ways}, or of several heads a module that returns what the model decides by, such as their mean"
    if labels is None:
        raise ModelError(f"{_shown(output)}, and without labels nothing tells which are the logits: {pass_one}")
    right = {place: _predicted(values[place]) == labels for place in kept}
    best = max(kept, key=lambda place: int(right[place].sum()))
    accuracies = ", ".join(f"{place!r} {float(right[place].double().mean()):.1%}" for place in kept)
    for place in kept:
        gained, lost = int((right[best] & ~right[place]).sum()), int((right[place] & ~right[best]).sum())
        if place != best and paired_difference(gained, lost, len(labels))[2] > _SURE:
            raise ModelError(
                f"{_shown(output)}, and the labels do not tell which are the logits (clean accuracy of {accuracies}): "
                f"{pass_one}"
            )
    warn(
        f"{_shown(output)}; {best!r} is taken as the logits, which the labels agree with (clean accuracy of "
        f"{accuracies} on {len(labels)} samples). {module.format(best)} states it."
    )
    return best


def _two_classes(module: nn.Module, values: Tensor, labels: Tensor | None) -> nn.Module:
    """One column as two classes."""
    low, high = float(values.min()), float(values.max())
    shown = f"model: returned one output for each input, from {low:.3g} to {high:.3g}"
    if labels is not None and bool((labels > 1).any()):
        raise ModelError(
            f"{shown}, and labels up to {int(labels.max())}, expected logits (N, K) of K classes: one output is a "
            f"regression, or a model of two classes with labels 0 and 1. Regression is not supported: {ONLY}"
        )
    if low >= 0 and high <= 1:
        warn(
            f"{shown}; it is taken as the probability p of class 1, and the logits as [log(1 - p), log p]. Where p is "
            "rounded to 0 or 1 they are floored and have no gradient: let the model return z from before its sigmoid, "
            "as robust_ext.models.outputs.TwoClass(model)."
        )
        return TwoClass(module, probability=True)
    if labels is None:
        raise ModelError(
            f"{shown}: of a classifier of two classes, one logit z; of a regression, a value, and regression is not "
            f"supported: {ONLY}. Where it is a logit, pass robust_ext.models.outputs.TwoClass(model), which returns "
            "[0, z]"
        )
    warn(
        f"{shown}; it is taken as the logit z of class 1, and the logits as [0, z]. "
        "robust_ext.models.outputs.TwoClass(model) states it."
    )
    return TwoClass(module)


def _ends_in_sigmoid(module: nn.Module, inputs: Tensor) -> bool:
    """Return whether the graph of the outputs begins with a sigmoid."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            node = module(inputs.clone().requires_grad_()).grad_fn
    except Exception:
        return False  # Code that runs without gradients need not run with them.
    while node is not None and node.name().startswith(_SHAPING):
        node = node.next_functions[0][0] if node.next_functions else None
    return node is not None and node.name().startswith("Sigmoid")


def _width(values: Tensor) -> int:
    return 1 if values.dim() == 1 else values.shape[1]


def _predicted(values: Tensor) -> Tensor:
    if _width(values) > 1:
        return values.argmax(1)
    return (values.reshape(-1) > (0.5 if _are_probabilities(values) else 0)).long()


def _are_probabilities(values: Tensor) -> bool:
    inside = bool(((values >= 0) & (values <= 1)).all())
    return inside and (_width(values) == 1 or bool(((values.double().sum(1) - 1).abs() < 1e-4).all()))


def _as_probabilities(values: Tensor) -> Tensor:
    if _are_probabilities(values):
        return values.reshape(len(values), -1)
    return values.softmax(1) if _width(values) > 1 else values.reshape(-1, 1).sigmoid()


def _entries(output: Any) -> dict[Any, Any]:
    if isinstance(output, Mapping):
        return dict(output)
    return dict(enumerate(output)) if isinstance(output, (tuple, list)) else {}


def _shown(output: object) -> str:
    """The entries of an output with their shapes."""
    shapes = {
        key: tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        for key, value in _entries(output).items()
    }
    found = ", ".join(f"{key!r}: {shape}" for key, shape in shapes.items()) or "nothing"
    return f"model: returned a {type(output).__name__} with {found}"
