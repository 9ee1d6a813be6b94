"""Principal components of a classifier's activations, for closed-loop control.

Source: Chen et al., "Towards Robust Neural Networks via Close-loop Control" (2021).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.validation import check_bounds, check_labels
from robust_ext.defenses.training.loop import TrainedPart, Training

INPUT = ""
"""Name of the input itself among layers: a module's name for itself."""


class Projections(TrainedPart):
    """Linear subspaces near which the inputs of some layers lie.

    For each layer, named in the order in which they run (``""`` is the classifier's input), it has a basis of
    orthonormal columns ``(D, rank)`` and a mean ``(D,)``.
    """

    def __init__(self, layers: Sequence[str], bases: Sequence[Tensor], means: Sequence[Tensor]) -> None:
        super().__init__()
        self.layers = tuple(layers)
        if not self.layers or not len(self.layers) == len(bases) == len(means) == len(set(self.layers)):
            raise InvalidArgumentError(
                "layers", layers, "one or more different names, with a basis and a mean for each"
            )
        for number, (basis, mean) in enumerate(zip(bases, means, strict=True)):
            self.register_buffer(f"basis_{number}", basis)
            self.register_buffer(f"mean_{number}", mean)
        self.settings = {"layers": list(self.layers), "shapes": [list(basis.shape) for basis in bases]}

    @classmethod
    def untrained(cls, *, layers: list[str], shapes: list[list[int]]) -> Projections:  # type: ignore[override]
        """See :meth:`TrainedPart.untrained`."""
        return cls(layers, [torch.zeros(shape) for shape in shapes], [torch.zeros(shape[0]) for shape in shapes])

    def basis(self, number: int) -> Tensor:
        """Return the basis ``(D, rank)`` of one layer."""
        found: Tensor = getattr(self, f"basis_{number}")
        return found

    def of(self, layers: Sequence[str]) -> Projections:
        """Return the projections of some layers in their order; InvalidArgumentError where one is missing."""
        missing = [name for name in layers if name not in self.layers]
        if missing or not layers:
            raise InvalidArgumentError("layers", list(layers), f"one or more of {', '.join(map(repr, self.layers))}")
        chosen = [number for number, name in enumerate(self.layers) if name in layers]
        means = [getattr(self, f"mean_{number}") for number in chosen]
        return Projections([self.layers[number] for number in chosen], [self.basis(n) for n in chosen], means)

    def off_plane(self, number: int, activations: Tensor, *, own_mean: bool) -> Tensor:
        """Return the part of a layer's inputs ``(N, ...)`` that its projection leaves out, ``(N, D)``.

        They are centred by their own mean, or by that of the training activations.
        """
        flat, basis = activations.flatten(1), self.basis(number)
        if flat.shape[1] != len(basis):
            raise ModelError(
                f"layer {self.layers[number]!r}: got {flat.shape[1]} values a row, expected the {len(basis)} that its "
                "projection was fitted to"
            )
        centred = flat - (flat.mean(0, keepdim=True) if own_mean else getattr(self, f"mean_{number}"))
        return centred - centred @ basis @ basis.T


@contextmanager
def edited_inputs(
    classifier: nn.Module, layers: Sequence[str], edit: Callable[[int, Tensor], Tensor]
) -> Iterator[None]:
    """Replace what goes into some layers (``""`` is the input) while a classifier runs inside, once each.

    ``edit`` maps a layer's number and its input to what it gets instead.
    """
    known = dict(classifier.named_modules())
    with ExitStack() as stack:
        for number, name in enumerate(layers):
            if name not in known:
                raise InvalidArgumentError("layers", repr(name), f"names of layers, such as {list(known)[-5:]}")

            def hook(_: nn.Module, args: tuple[Any, ...], number: int = number) -> tuple[Any, ...]:
                return (edit(number, args[0]), *args[1:])

            handle = known[name].register_forward_pre_hook(hook)
            stack.callback(handle.remove)
        yield


@settings_class
class ProjectionsTraining(Training):
    """Finds for each layer the fewest principal axes whose singular values sum up to more than a share of all.

    Chen et al. take 6,500 inputs. With labels, only inputs that are classified right are used, as in the authors' code.
    """

    layers: tuple[str, ...] = setting(
        help="As for :class:`Projections`; the paper's are the input and the inputs of four blocks of a ResNet-20."
    )
    share: float = setting(default=0.99, help="Of the sum of singular values, in (0, 1].", above=0, maximum=1)
    bounds: tuple[float, float] = setting(default=(0.0, 1.0), help="Of the inputs.", check=check_bounds)

    def fit(self, classifier: nn.Module, inputs: Tensor, labels: Tensor | None = None) -> Projections:
        """Find the axes; see :meth:`Training.fit`."""
        inputs = self.checked(classifier, inputs)
        with torch.no_grad():
            if labels is not None:
                labels = check_labels("labels", labels, samples=len(inputs)).to(inputs.device)
                inputs = inputs[classifier(inputs).argmax(1) == labels]
            if len(inputs) < 2:
                raise InvalidArgumentError("inputs", f"{len(inputs)} usable inputs", "at least 2 training inputs")
            seen: dict[int, Tensor] = {}
            with edited_inputs(classifier, self.layers, lambda number, value: seen.setdefault(number, value)):
                classifier(inputs)
            found = [_axes(seen[number].flatten(1), self.share) for number in range(len(self.layers))]
        bases, means = zip(*found, strict=True)
        return Projections(self.layers, bases, means)


def _axes(rows: Tensor, share: float) -> tuple[Tensor, Tensor]:
    mean = rows.mean(0)
    _, values, axes = torch.linalg.svd(rows - mean, full_matrices=False)
    # The first count whose sum is above the share, as the authors count.
    rank = int((values.cumsum(0) <= share * values.sum()).sum()) + 1
    return axes[:rank].T.contiguous(), mean
