"""SODEF: features follow a stable differential equation before they are read out.

Source: Kang et al., "Stable Neural ODE with Lyapunov-Stable Equilibrium Points for Defending against Adversarial
Attacks" (2021); attacked in Croce et al., "Evaluating the Adversarial Robustness of Adaptive Test-time Defenses"
(2022), section 3.2.
"""

from __future__ import annotations

import importlib
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError, MissingDependencyError
from robust_ext.core.modules import module_class, positional
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.validation import check_choice, check_integer, check_labels
from robust_ext.defenses.training.loop import NetworkTraining, TrainedPart, check_rows
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.features import split
from robust_ext.models.rows import RowRNG, Solution, State

SOLVERS = ("dopri5", "rk4")


class StableField(nn.Module):
    """The velocity ``sin(-W3 sin(-W2 sin(-W1 z)))``, with biases; the same at all times (Kang et al. 2021)."""

    def __init__(self, dimension: int = 64, *, hidden: int = 256) -> None:
        super().__init__()
        check_integer("dimension", dimension, minimum=1)
        check_integer("hidden", hidden, minimum=1)
        sizes = (dimension, hidden, hidden, dimension)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))

    def forward(self, time: Tensor, state: Tensor) -> Tensor:
        """Return velocities ``(N, dimension)`` at states ``(N, dimension)``."""
        for layer in self.layers:
            state = torch.sin(-layer(state))
        return state

    def jacobian(self, state: Tensor) -> Tensor:
        """Return derivatives ``(N, dimension, dimension)`` of velocities (rows) by states ``(N, dimension)``."""
        product = torch.eye(state.shape[1], dtype=state.dtype, device=state.device).expand(len(state), -1, -1)
        for layer in self.layers:
            angle = -layer(state)
            weight: Tensor = layer.get_parameter("weight")
            product = -angle.cos()[:, :, None] * (weight @ product)
            state = angle.sin()
        return product


def integrate(
    field: nn.Module,
    start: Tensor,
    *,
    time: float = 5.0,
    solver: str = "dopri5",
    steps: int = 20,
    tolerance: float = 1e-3,
    adjoint: bool = True,
) -> Tensor:
    """Return the state ``(N, D)`` at ``time`` of ``dz/dt = field(t, z)`` with ``z(0) = start``.

    ``"dopri5"`` is Runge-Kutta of order 5 of torchdiffeq, with steps chosen for all rows together, so that a row's
    result varies with the batch by about the tolerance (relative and absolute); its gradients come from the adjoint
    equation, solved backwards in time in constant memory, or from the graph of the steps. ``"rk4"`` is classic
    Runge-Kutta of order 4 with ``steps`` equal steps, each row on its own, differentiated through the steps.
    """
    check_choice("solver", solver, SOLVERS)
    if solver == "rk4":
        state, width = start, time / check_integer("steps", steps, minimum=1)
        for number in range(steps):
            now = torch.tensor(number * width, dtype=state.dtype, device=state.device)
            first = field(now, state)
            second = field(now + width / 2, state + width / 2 * first)
            third = field(now + width / 2, state + width / 2 * second)
            fourth = field(now + width, state + width * third)
            state = state + width / 6 * (first + 2 * second + 2 * third + fourth)
        return state
    library = load_torchdiffeq()
    solve = library.odeint_adjoint if adjoint else library.odeint
    ends = torch.tensor([0.0, time], dtype=start.dtype, device=start.device)
    path: Tensor = solve(field, start, ends, method="dopri5", rtol=tolerance, atol=tolerance)
    return path[1]


def load_torchdiffeq() -> Any:
    """Import torchdiffeq, or raise MissingDependencyError."""
    try:
        return importlib.import_module("torchdiffeq")
    except ImportError as error:
        raise MissingDependencyError(
            'The solver dopri5 needs torchdiffeq: pip install "robust-ext[defenses]", or choose solver="rk4"'
        ) from error


# As in the authors' code: sharpness of the three penalties, and how far below 0 the Jacobian is pushed.
_DIAGONAL, _OFF_DIAGONAL, _SPEED, _SHIFT = 1.0, 0.1, 50.0, 1.0
_JACOBIANS = 8
_STEPS = 5


class StableHead(TrainedPart):
    """Linear map from features to the state ``(N, dimension)``, stable field of width ``hidden``, linear readout."""

    def __init__(self, features: int, classes: int, *, dimension: int = 64, hidden: int = 256) -> None:
        super().__init__()
        check_integer("dimension", dimension, minimum=1)
        self.reduce = nn.Linear(check_integer("features", features, minimum=1), dimension)
        self.field = StableField(dimension, hidden=hidden)
        self.readout = nn.Linear(dimension, check_integer("classes", classes, minimum=2))
        self.settings = {"features": features, "classes": classes, "dimension": dimension, "hidden": hidden}
        self.eval()


@settings_class
class StableHeadTraining(NetworkTraining):
    """Training of a :class:`StableHead` on a classifier's features.

    First the map to the state and the readout learn to classify without the field. Then field and readout learn to
    classify with it, and the states to be stable points: the field is to be small there (``speed``), its Jacobian to
    have a negative diagonal (``diagonal``) that outweighs the rest of its column (``off_diagonal``). In training the
    equation is solved in five equal steps. Weights are those of the authors' code; data, passes and rates are not, as
    theirs are for a large network.
    """

    classes: int | None = setting(
        default=None, help="Number of logits; one more than the largest label when left out.", minimum=2
    )
    dimension: int = setting(default=64, help="Dimension of the state.", minimum=1)
    hidden: int = setting(default=256, help="Width of the field.", minimum=1)
    diagonal: float = setting(default=10.0, help="Weight of the diagonals, at least 0.", minimum=0)
    off_diagonal: float = setting(default=10.0, help="Weight of the rest of the Jacobians, at least 0.", minimum=0)
    speed: float = setting(default=0.1, help="Weight of the field at the features, at least 0.", minimum=0)
    epochs: int = setting(default=5)
    learning_rate: float = setting(default=1e-2)

    def fit(self, classifier: nn.Module, inputs: Tensor, labels: Tensor | None = None) -> StableHead:
        """Train; see :meth:`Training.fit`."""
        inputs = self.checked(classifier, inputs)
        wanted = check_labels("labels", labels, samples=len(inputs), classes=self.classes).to(inputs.device)
        check_rows(len(inputs))
        with torch.no_grad():
            seen = split(classifier, inputs[:2]).features(inputs)
        classes = max(int(wanted.max()) + 1, 2) if self.classes is None else self.classes
        with seeded_globals(derive_seed(self.seed, "head")):
            head = StableHead(seen.shape[1], classes, dimension=self.dimension, hidden=self.hidden).to(inputs.device)

        def alone(rows: Tensor) -> Tensor:
            return nn.functional.cross_entropy(head.readout(head.reduce(seen[rows])), wanted[rows])

        def together(rows: Tensor) -> Tensor:
            start = head.reduce(seen[rows])
            end = integrate(head.field, start, solver="rk4", steps=_STEPS)
            return nn.functional.cross_entropy(head.readout(end), wanted[rows]) + self._unstable(head.field, start)

        self.run(head, len(seen), alone)
        head.reduce.requires_grad_(False)
        self.run(head, len(seen), together, slower=10)
        return head.requires_grad_(False)

    def _unstable(self, field: StableField, states: Tensor) -> Tensor:
        """Return the distance of states from stable points of the field (Kang et al. 2021, section 4.2)."""
        time = torch.zeros((), device=states.device)
        velocity = field(time, states)
        jacobians = field.jacobian(states[:_JACOBIANS])
        diagonal = jacobians.diagonal(dim1=1, dim2=2)
        rest = jacobians.abs().sum(1) - 2 * diagonal.abs()
        terms = (
            self.diagonal * (_DIAGONAL * (diagonal + _SHIFT)).exp().mean(),
            self.off_diagonal * (_OFF_DIAGONAL * (rest + _SHIFT)).exp().mean(),
            self.speed * (_SPEED * velocity).square().mean(),
        )
        return torch.stack(terms).sum()


@module_class
class SODEF(AdaptiveDefense):
    """Features, a linear map to a state, an equation solved over ``[0, time]``, a linear readout.

    Deterministic and differentiable. The logits take one forward pass of the features and as many evaluations of the
    small field as the solver needs: with ``"rk4"`` four a step. The paper's attack transfers points from the static
    classifier, which is kept as ``classifier``.

    The input is not changed: a trace's iterates are the input, and its state is the start and the end of the equation.

    Example:
        >>> import torch
        >>> from robust_ext.defenses.sodef import StableHead
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        >>> SODEF(net, net[0], StableHead(4, 3), solver="rk4")(torch.zeros(2, 1, 2, 2)).shape
        torch.Size([2, 3])
    """

    name = "sodef"
    building_blocks = ("MA", "IA", "AN")
    part_class = StableHead
    training_class = StableHeadTraining

    classifier: nn.Module = positional(
        "The static classifier that the features are of, from inputs ``(N, ...)`` to ``(N, K)``.", kw_only=False
    )
    features: nn.Module = positional(
        "A module from inputs to features ``(N, F)``, see :func:`robust_ext.models.features.split`.", kw_only=False
    )
    head: StableHead = positional("See :class:`~robust_ext.defenses.sodef.StableHeadTraining`.", kw_only=False)
    time: float = setting(default=5.0, help="Length of the interval, above 0.", above=0)
    solver: str = setting(
        default="dopri5",
        help='``"dopri5"`` as in the paper, needs torchdiffeq; or ``"rk4"``. See '
        ":func:`robust_ext.defenses.sodef.integrate`: with dopri5 a row's logits vary with the batch by "
        "about the tolerance.",
        choices=SOLVERS,
    )
    steps: int = setting(
        default=20,
        help='Of ``"rk4"``, at least 0; with 0 the state is read out as it is. dopri5 chooses its own.',
        minimum=0,
    )
    tolerance: float = setting(default=1e-3, help="Tolerance of dopri5.", above=0)
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
        given: dict[str, Any] = {"time": self.time, "solver": self.solver, "steps": max(self.steps, 1)}
        return integrate(self.head.field, start, tolerance=self.tolerance, adjoint=self.adjoint, **given)

    def readout(self, point: Tensor, state: State) -> Tensor:
        """Return logits ``(N, K)`` of inputs."""
        out: Tensor = self.head.readout(self.end(self.head.reduce(self.features(point))))
        return out
