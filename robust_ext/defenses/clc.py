"""Closed-loop control: offsets at a few layers pull activations back to where those of clean inputs lie.

Source: Chen et al., "Towards Robust Neural Networks via Close-loop Control" (2021); constants, and how it is attacked,
as in Croce et al., "Evaluating the Adversarial Robustness of Adaptive Test-time Defenses" (2022), section 3.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import ModelError
from robust_ext.core.modules import given, module_class, positional
from robust_ext.core.settings import setting
from robust_ext.defenses._common import layer_names
from robust_ext.defenses.training.projections import INPUT, Projections, ProjectionsTraining, edited_inputs
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.adaptive_solution import Solution
from robust_ext.models.row_rng import RowRNG
from robust_ext.models.vjp import wants_gradient

_BETAS, _EPSILON = (0.9, 0.999), 1e-8
# The square root has no derivative at 0.
_LEAST = 1e-36


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
        >>> from robust_ext.defenses.training.projections import ProjectionsTraining
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        >>> x = torch.rand(20, 1, 2, 2)
        >>> defense = ClosedLoopControl(net, ProjectionsTraining(layers=["", "1"]).fit(net, x), group_size=4)
        >>> trace = defense.trace(x[:8])
        >>> trace.logits.shape, len(trace.iterates), list(trace.state)
        (torch.Size([8, 3]), 5, ['1'])
    """

    name = "clc"
    part_class = Projections
    training_class = ProjectionsTraining
    batch_level = True
    needs_gradients = True

    classifier: nn.Module = positional(
        "From inputs ``(N, ...)`` to logits ``(N, K)``, in eval mode. Layers must not depend on other rows.",
        kw_only=False,
    )
    projections: Projections = positional(
        "See :class:`~robust_ext.defenses.training.projections.ProjectionsTraining`.", kw_only=False
    )
    layers: Any = setting(
        default=None,
        help='Which of the projections\' layers are controlled, ``""`` for the input, also with commas between them; '
        "all of them when left out.",
        check=lambda names: None if names is None else layer_names(names),
    )
    steps: int = setting(default=5, help="At least 0; with 0 there is no defense.", minimum=0)
    learning_rate: float = setting(
        default=5e-3, help="Of Adam, above 0; for the input's offset it follows the width of the bounds.", above=0
    )
    regularization: float = setting(
        default=0.0, help="Weight of the mean squared length of the offsets, at least 0.", minimum=0
    )
    centre: str = setting(
        default="batch",
        help='What activations are centred by before they are projected: ``"batch"``, the mean of the group, or '
        '``"training"``, that of the training activations.',
        choices=("batch", "training"),
    )
    reduction: str = setting(
        default="mean",
        help='``"mean"`` over all values of the group, as in the authors\' code, or the ``"sum"``.',
        choices=("mean", "sum"),
    )
    group_size: int = setting(default=16, help="At least 1.", minimum=1)
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
        keep = wants_gradient(x)
        controls: list[Tensor] = []
        moments: list[tuple[Tensor, Tensor]] = []
        best, lowest, points = controls, torch.inf, [] if self.steps else [x]
        for number in range(self.steps):
            loss, controls = self.loss(x, controls)
            points.append(self._point(x, controls))
            if float(loss.detach()) < lowest:
                lowest, best = float(loss.detach()), controls
            if number + 1 < self.steps:
                gradients = torch.autograd.grad(loss, controls, create_graph=keep)
                controls, moments = self._adam(controls, gradients, moments, number + 1)
                controls = controls if keep else [control.detach().requires_grad_() for control in controls]
        best = best if keep else [control.detach() for control in best]
        points = points if keep else [point.detach() for point in points]
        layers = self.projections.layers
        state = {name: control for name, control in zip(layers, best, strict=False) if name != INPUT}
        return Solution(self._point(x, best), tuple(points) if record else (), state)

    def readout(self, point: Tensor, state: Mapping[str, Tensor]) -> Tensor:
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
        zeros = [(torch.zeros_like(gradient),) * 2 for gradient in gradients]
        moments = [
            (first * mean + (1 - first) * gradient, second * square + (1 - second) * gradient.square())
            for (mean, square), gradient in zip(moments or zeros, gradients, strict=True)
        ]
        moved = []
        for control, (mean, square) in zip(controls, moments, strict=True):
            root = (square / (1 - second**count)).clamp_min(_LEAST).sqrt()
            moved.append(control - self.learning_rate * mean / (1 - first**count) / (root + _EPSILON))
        return moved, moments
