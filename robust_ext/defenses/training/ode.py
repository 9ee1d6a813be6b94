"""Ordinary differential equations of features: the stable field of SODEF, and two ways to solve for its end.

Source: Kang et al., "Stable Neural ODE with Lyapunov-Stable Equilibrium Points for Defending against Adversarial
Attacks" (2021).
"""

from __future__ import annotations

import importlib
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import MissingDependencyError
from robust_ext.core.validation import check_choice, check_integer

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
        """Velocities ``(N, dimension)`` at states ``(N, dimension)``."""
        for layer in self.layers:
            state = torch.sin(-layer(state))
        return state

    def jacobian(self, state: Tensor) -> Tensor:
        """Derivatives ``(N, dimension, dimension)`` of the velocities (rows) by the states ``(N, dimension)``."""
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
    """The state ``(N, D)`` at ``time`` of ``dz/dt = field(t, z)`` with ``z(0) = start``.

    ``"dopri5"`` is Runge-Kutta of order 5 of torchdiffeq, with steps chosen for all rows together, so that a row's
    result varies with the batch by about the tolerance (relative and absolute); its gradients come from the adjoint
    equation, solved backwards in time in constant memory, or from the graph of the steps. ``"rk4"`` is classic
    Runge-Kutta of order 4 with ``steps`` equal steps, each row on its own, differentiated through the steps.
    """
    check_choice("solver", solver, SOLVERS)
    if solver == "rk4":
        return _rk4(field, start, time, check_integer("steps", steps, minimum=1))
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


def _rk4(field: nn.Module, state: Tensor, time: float, steps: int) -> Tensor:
    width = time / steps
    for number in range(steps):
        now = torch.tensor(number * width, dtype=state.dtype, device=state.device)
        first = field(now, state)
        second = field(now + width / 2, state + width / 2 * first)
        third = field(now + width / 2, state + width / 2 * second)
        fourth = field(now + width, state + width * third)
        state = state + width / 6 * (first + 2 * second + 2 * third + fourth)
    return state
