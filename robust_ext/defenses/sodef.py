"""SODEF: features follow a stable differential equation before they are read out.

Source: Kang et al., "Stable Neural ODE with Lyapunov-Stable Equilibrium Points for Defending against Adversarial
Attacks" (2021); attacked in Croce et al., "Evaluating the Adversarial Robustness of Adaptive Test-time Defenses"
(2022), section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.modules import module_class, positional
from robust_ext.core.settings import setting
from robust_ext.defenses.training.stable_head import (
    SOLVERS,
    StableHead,
    StableHeadTraining,
    integrate,
    load_torchdiffeq,
)
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.adaptive_solution import Solution
from robust_ext.models.features import split
from robust_ext.models.row_rng import RowRNG


@module_class
class SODEF(AdaptiveDefense):
    """Features, a linear map to a state, an equation solved over ``[0, time]``, a linear readout.

    Deterministic and differentiable. The logits take one forward pass of the features and as many evaluations of the
    small field as the solver needs: with ``"rk4"`` four a step. The paper's attack transfers points from the static
    classifier, which is kept as ``classifier``.

    The input is not changed: a trace's iterates are the input, and its state is the start and the end of the equation.

    Raises:
        MissingDependencyError: torchdiffeq is not installed.

    Example:
        >>> import torch
        >>> from robust_ext.defenses.training.stable_head import StableHead
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        >>> SODEF(net, net[0], StableHead(4, 3), solver="rk4")(torch.zeros(2, 1, 2, 2)).shape
        torch.Size([2, 3])
    """

    name = "sodef"
    part_class = StableHead
    training_class = StableHeadTraining

    classifier: nn.Module = positional(
        "The static classifier that the features are of, from inputs ``(N, ...)`` to ``(N, K)``.", kw_only=False
    )
    features: nn.Module = positional(
        "From inputs to features ``(N, F)``, see :func:`robust_ext.models.features.split`.", kw_only=False
    )
    head: StableHead = positional(
        "See :class:`~robust_ext.defenses.training.stable_head.StableHeadTraining`.", kw_only=False
    )
    time: float = setting(default=5.0, help="Length of the interval, above 0.", above=0)
    solver: str = setting(
        default="dopri5",
        help='``"dopri5"`` as in the paper, needs torchdiffeq; or ``"rk4"``. See '
        ":func:`robust_ext.defenses.training.stable_head.integrate`: with dopri5 a row's logits vary with the batch by "
        "about the tolerance.",
        choices=SOLVERS,
    )
    steps: int = setting(
        default=20,
        help='Of ``"rk4"``, at least 0; with 0 the state is read out as it is. dopri5 chooses its own.',
        minimum=0,
    )
    tolerance: float = setting(default=1e-3, help="Of dopri5, above 0.", above=0)
    adjoint: bool = setting(
        default=True, help="Whether dopri5's gradients come from the adjoint equation, as in the authors' code."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.solver == "dopri5":
            load_torchdiffeq()

    @classmethod
    def part_arguments(cls, part: Any, classifier: nn.Module, inputs: Tensor) -> dict[str, Any]:
        """Return the features of the classifier, and the head on them."""
        features = split(classifier, inputs).features
        classes, found = classifier(inputs).shape[1], part.readout(part.reduce(features(inputs))).shape[1]
        if found != classes:
            raise InvalidArgumentError("weights", f"a head of {found} classes", f"one of {classes}")
        return {"features": features, "head": part}

    @property
    def has_trajectory(self) -> bool:
        """No: the input is not changed."""
        return False

    def solve(self, x: Tensor, rng: RowRNG, *, record: bool) -> Solution:
        """Return the unchanged input; with ``record`` also where the equation starts and ends."""
        if not record:
            return Solution(x, (x,))
        start = self.head.reduce(self.features(x))
        return Solution(x, (x,), {"start": start, "end": self.end(start)})

    def end(self, start: Tensor) -> Tensor:
        """Return the states ``(N, D)`` that the equation leads to from ``start`` ``(N, D)``."""
        if self.solver == "rk4" and self.steps == 0:
            return start
        return integrate(
            self.head.field,
            start,
            time=self.time,
            solver=self.solver,
            steps=max(self.steps, 1),
            tolerance=self.tolerance,
            adjoint=self.adjoint,
        )

    def readout(self, point: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return logits ``(N, K)`` of inputs."""
        out: Tensor = self.head.readout(self.end(self.head.reduce(self.features(point))))
        return out
