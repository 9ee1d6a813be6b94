"""SODEF: features follow a stable differential equation before they are read out.

Source: Kang et al., "Stable Neural ODE with Lyapunov-Stable Equilibrium Points for Defending against Adversarial
Attacks" (2021); attacked in Croce et al., "Evaluating the Adversarial Robustness of Adaptive Test-time Defenses"
(2022), section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from robust_ext.core.validation import check_choice, check_number
from robust_ext.defenses.training_ode import SOLVERS, integrate, load_torchdiffeq
from robust_ext.defenses.training_sodef import StableHead
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.adaptive_solution import Solution
from robust_ext.models.row_rng import RowRNG


class SODEF(AdaptiveDefense):
    """Features, a linear map to a state, an equation solved over ``[0, time]``, a linear readout.

    Deterministic and differentiable. An answer takes one forward pass of the features and as many evaluations of the
    small field as the solver needs: with ``"rk4"`` four a step. The paper's attack transfers points from the static
    classifier, which is kept as ``classifier``.

    The input is not changed: a trace's iterates are the input, and its state is the start and the end of the equation.

    Args:
        classifier: The static classifier that the features are of, from inputs ``(N, ...)`` to ``(N, K)``.
        features: From inputs to features ``(N, F)``, see :func:`robust_ext.models.features.split`.
        head: See :func:`robust_ext.defenses.training_sodef.fit_stable_head`.
        time: Length of the interval, above 0.
        solver: ``"dopri5"`` as in the paper, needs torchdiffeq; or ``"rk4"``. See
            :func:`robust_ext.defenses.training_ode.integrate`: with dopri5 a row's logits vary with the batch by about
            the tolerance.
        steps: Of ``"rk4"``, at least 0; with 0 the state is read out as it is. dopri5 chooses its own.
        tolerance: Of dopri5, above 0.
        adjoint: Whether dopri5's gradients come from the adjoint equation, as in the authors' code.

    Raises:
        InvalidArgumentError: A setting is not accepted.
        MissingDependencyError: torchdiffeq is not installed.

    Example:
        >>> import torch
        >>> from robust_ext.defenses.training_sodef import StableHead
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        >>> SODEF(net, net[0], StableHead(4, 3), solver="rk4")(torch.zeros(2, 1, 2, 2)).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        classifier: nn.Module,
        features: nn.Module,
        head: StableHead,
        *,
        time: float = 5.0,
        solver: str = "dopri5",
        steps: int = 20,
        tolerance: float = 1e-3,
        adjoint: bool = True,
    ) -> None:
        super().__init__(classifier, steps=steps)
        self.features, self.head = features, head
        self.time = check_number("time", time, minimum=0, open_minimum=True)
        self.solver = check_choice("solver", solver, SOLVERS)
        self.tolerance = check_number("tolerance", tolerance, minimum=0, open_minimum=True)
        self.adjoint = adjoint
        if solver == "dopri5":
            load_torchdiffeq()

    def solve(self, x: Tensor, rng: RowRNG, *, record: bool) -> Solution:
        """The input as it is; with ``record`` also where the equation starts and ends."""
        if not record:
            return Solution(x, (x,))
        start = self.head.reduce(self.features(x))
        return Solution(x, (x,), {"start": start, "end": self.end(start)})

    def end(self, start: Tensor) -> Tensor:
        """The states ``(N, D)`` that the equation leads to from ``start`` ``(N, D)``."""
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
        """Logits ``(N, K)`` of inputs."""
        out: Tensor = self.head.readout(self.end(self.head.reduce(self.features(point))))
        return out
