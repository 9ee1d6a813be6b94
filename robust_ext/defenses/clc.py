"""Closed-loop control: offsets at a few layers pull activations back to where those of clean inputs lie.

Source: Chen et al., "Towards Robust Neural Networks via Close-loop Control" (2021); constants, and how it is attacked,
as in Croce et al., "Evaluating the Adversarial Robustness of Adaptive Test-time Defenses" (2022), section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.modules import given, module_class, positional
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.validation import check_bounds, check_labels
from robust_ext.defenses._common import layer_names
from robust_ext.defenses.training.loop import TrainedPart, Training
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.rows import RowRNG, Solution, State
from robust_ext.models.vjp import wants_gradient

INPUT = ""
"""Name of the input itself among layers: a module's name for itself."""
_BETAS, _EPSILON = (0.9, 0.999), 1e-8
# The square root has no derivative at 0.
_LEAST = 1e-36


class Projections(TrainedPart):
    """Linear subspaces near which the inputs of some layers lie.

    For each layer, named in the order in which they run (``""`` is the classifier's input), it has a basis of
    orthonormal columns ``(D, rank)`` and a mean ``(D,)``.
    """

    def __init__(self, layers: Sequence[str], bases: Sequence[Tensor], means: Sequence[Tensor]) -> None:
        super().__init__()
        self.layers = tuple(layers)
        if not self.layers or not len(self.layers) == len(bases) == len(means) == len(set(self.layers)):
            expected = "one or more different names, with a basis and a mean for each"
            raise InvalidArgumentError("layers", layers, expected)
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
        return self.get_buffer(f"basis_{number}")

    def of(self, layers: Sequence[str]) -> Projections:
        """Return the projections of some layers in their order; InvalidArgumentError where one is missing."""
        if not layers or not set(layers) <= set(self.layers):
            raise InvalidArgumentError("layers", list(layers), f"one or more of {', '.join(map(repr, self.layers))}")
        chosen = [number for number, name in enumerate(self.layers) if name in layers]
        means = [self.get_buffer(f"mean_{number}") for number in chosen]
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
        centred = flat - (flat.mean(0, keepdim=True) if own_mean else self.get_buffer(f"mean_{number}"))
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

            stack.enter_context(known[name].register_forward_pre_hook(hook))
        yield


@settings_class
class ProjectionsTraining(Training):
    """Finds for each layer the fewest principal axes whose singular values sum up to more than a share of all.

    Chen et al. take 6,500 inputs. With labels, only inputs that are classified right are used, as in the authors' code.
    """

    layers: tuple[str, ...] = setting(
        help="As for :class:`Projections`; the paper's are the input and the inputs of four blocks of a ResNet-20."
    )
    share: float = setting(default=0.99, help="Share of the sum of singular values that is kept.", above=0, maximum=1)
    bounds: tuple[float, float] = setting(default=(0.0, 1.0), help="Bounds of the inputs.", check=check_bounds)

    def fit(self, classifier: nn.Module, inputs: Tensor, labels: Tensor | None = None) -> Projections:
        """Find the axes; see :meth:`Training.fit`."""
        inputs = self.checked(classifier, inputs)
        seen: dict[int, Tensor] = {}
        bases, means = [], []
        with torch.no_grad():
            if labels is not None:
                labels = check_labels("labels", labels, samples=len(inputs)).to(inputs.device)
                inputs = inputs[classifier(inputs).argmax(1) == labels]
            if len(inputs) < 2:
                raise InvalidArgumentError("inputs", f"{len(inputs)} usable inputs", "at least 2 training inputs")
            with edited_inputs(classifier, self.layers, lambda number, value: seen.setdefault(number, value)):
                classifier(inputs)
            for number in range(len(self.layers)):
                rows = seen[number].flatten(1)
                mean = rows.mean(0)
                _, values, axes = torch.linalg.svd(rows - mean, full_matrices=False)
                # The first count whose sum is above the share, as the authors count.
                rank = int((values.cumsum(0) <= self.share * values.sum()).sum()) + 1
                bases.append(axes[:rank].T.contiguous())
                means.append(mean)
        return Projections(self.layers, bases, means)


@module_class
class ClosedLoopControl(AdaptiveDefense):
    """Offsets by Adam that lower the squared distance of activations to their projections (Chen et al. 2021).

    The loss is one number for the group: for each layer the distances of the activations with their offset to a linear
    subspace, see ``reduction``, and over layers the sum. The offsets of its lowest value are kept. By default the
    projection subtracts the mean of the group, so that a group of one row has no defense.

    With ``steps`` the losses are taken that often, which costs as many forward passes and one backward pass less, and
    the logits are one more forward pass: 6 and 4 by default. A trace's iterates are the input with its own offset (one
    for each loss); the offsets of the other layers are its state, by the layer's name.
    Held controls, ``BPDA(defense, backward="frozen")``, are the paper's attack.

    Example:
        >>> from robust_ext.defenses.clc import ProjectionsTraining
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        >>> x = torch.rand(20, 1, 2, 2)
        >>> defense = ClosedLoopControl(net, ProjectionsTraining(layers=["", "1"]).fit(net, x), group_size=4)
        >>> trace = defense.trace(x[:8])
        >>> trace.logits.shape, len(trace.iterates), list(trace.state)
        (torch.Size([8, 3]), 5, ['1'])
    """

    name = "clc"
    building_blocks = ("MA", "IA", "AN")
    part_class = Projections
    training_class = ProjectionsTraining
    batch_level = True
    needs_gradients = True

    classifier: nn.Module = positional(
        "A module from inputs ``(N, ...)`` to logits ``(N, K)``, in eval mode. Layers must not depend on other rows.",
        kw_only=False,
    )
    projections: Projections = positional("See :class:`~robust_ext.defenses.clc.ProjectionsTraining`.", kw_only=False)
    layers: Any = setting(
        default=None,
        help='Which of the projections\' layers are controlled, ``""`` for the input, also with commas between them; '
        "all of them when left out.",
        check=lambda names: None if names is None else layer_names(names),
    )
    steps: int = setting(default=5, help="At least 0; with 0 there is no defense.", minimum=0)
    learning_rate: float = setting(
        default=5e-3, help="Learning rate of Adam; for the input's offset it follows the width of the bounds.", above=0
    )
    regularization: float = setting(
        default=0.0, help="Weight of the mean squared length of the offsets, at least 0.", minimum=0
    )
    centre: str = setting(
        default="batch",
        help='Centre of the activations before they are projected: ``"batch"``, the mean of the group, or '
        '``"training"``, that of the training activations.',
        choices=("batch", "training"),
    )
    reduction: str = setting(
        default="mean",
        help='``"mean"`` over all values of the group, as in the authors\' code, or the ``"sum"``.',
        choices=("mean", "sum"),
    )
    group_size: int = setting(default=16, help="Rows defended together.", minimum=1)
    pad: bool = setting(default=False, help="See :class:`~robust_ext.models.adaptive.AdaptiveDefense`.")
    bounds: tuple[float, float] = given("Of the inputs.", default=(0.0, 1.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None:
            self.projections = self.projections.of(self.layers)

    @classmethod
    def part_arguments(cls, part: Any, classifier: nn.Module, inputs: Tensor) -> dict[str, Any]:
        """Return the projections of the classifier's activations."""

        def tried(number: int, value: Tensor) -> Tensor:
            part.off_plane(number, value, own_mean=False)
            return value

        with edited_inputs(classifier, part.layers, tried):
            classifier(inputs)
        return {"projections": part}

    def solve(self, x: Tensor, rng: RowRNG, *, record: bool) -> Solution:
        """Run Adam on the offsets of one group."""
        keep, controls, moments = wants_gradient(x), list[Tensor](), list[tuple[Tensor, Tensor]]()
        best, lowest, points = controls, torch.inf, [] if self.steps else [x]
        for number in range(self.steps):
            loss, controls = self.loss(x, controls)
            points.append(self._point(x, controls))
            if float(loss.detach()) < lowest:
                lowest, best = float(loss.detach()), controls
            if number + 1 < self.steps:
                gradients = torch.autograd.grad(loss, controls, create_graph=keep)
                moments = moments or [(torch.zeros_like(gradient),) * 2 for gradient in gradients]
                controls, moments = self._adam(controls, gradients, moments, number + 1)
                controls = controls if keep else [control.detach().requires_grad_() for control in controls]
        if not keep:
            best, points = ([one.detach() for one in ones] for ones in (best, points))
        layers = self.projections.layers
        state = {name: control for name, control in zip(layers, best, strict=False) if name != INPUT}
        return Solution(self._point(x, best), tuple(points) if record else (), state)

    def readout(self, point: Tensor, state: State) -> Tensor:
        """Return logits ``(N, K)`` of a point, with the state's offsets added to the inputs of their layers."""
        names = list(state)
        with edited_inputs(self.classifier, names, lambda number, value: value + state[names[number]]):
            out: Tensor = self.classifier(point)
        return out

    def loss(self, x: Tensor, controls: Sequence[Tensor] = ()) -> tuple[Tensor, list[Tensor]]:
        """Return the loss ``()`` of one group ``(N, ...)``, and the offsets, one a layer; missing ones are 0.

        They have the shapes of the layers' inputs; that of the input is in units of [0, 1].
        """
        used: list[Tensor] = []
        losses: list[Tensor] = []

        def edit(number: int, value: Tensor) -> Tensor:
            if number != len(used):
                raise ModelError(
                    f"layers: {self.projections.layers[number]!r} ran as number {len(used)} of those controlled, "
                    f"expected number {number}; give layers that run once each, in their order"
                )
            control = controls[number] if controls else torch.zeros_like(value).requires_grad_()
            used.append(control)
            scale = self._scale(number)
            value = value + scale * control
            off = self.projections.off_plane(number, value, own_mean=self.centre == "batch") / scale
            losses.append(off.square().mean() if self.reduction == "mean" else off.square().sum())
            if self.regularization:
                losses.append(self.regularization * control.flatten(1).square().sum(1).mean())
            return value

        with edited_inputs(self.classifier, self.projections.layers, edit):
            self.classifier(x)
        return torch.stack(losses).sum(), used

    def _scale(self, number: int) -> float:
        return self.bounds[1] - self.bounds[0] if self.projections.layers[number] == INPUT else 1.0

    def _point(self, x: Tensor, controls: Sequence[Tensor]) -> Tensor:
        """Add the input's own offset to it."""
        pairs = zip(self.projections.layers, controls, strict=False)
        return x + sum((self._scale(0) * control for name, control in pairs if name == INPUT), torch.zeros_like(x))

    def _adam(
        self, controls: Sequence[Tensor], gradients: Sequence[Tensor], moments: list[tuple[Tensor, Tensor]], count: int
    ) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """Take one differentiable step of Adam; ``count`` is 1 at the first."""
        first, second = _BETAS
        moved, after = [], []
        for control, gradient, (mean, square) in zip(controls, gradients, moments, strict=True):
            mean = first * mean + (1 - first) * gradient
            square = second * square + (1 - second) * gradient.square()
            root = (square / (1 - second**count)).clamp_min(_LEAST).sqrt()
            moved.append(control - self.learning_rate * mean / (1 - first**count) / (root + _EPSILON))
            after.append((mean, square))
        return moved, after
