"""Proximal steps and dual bounds against general solvers."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog, minimize_scalar
from torch import Tensor

from robust_ext.attacks.linear_region.solver.norms import is_contradiction, lower_bound, room_towards, shrink

BOUNDS = (-0.5, 1.0)


def drawn(seed: int, inputs: int, *, spread: float) -> tuple[Tensor, Tensor]:
    """A vector, and inputs of which some lie on the bounds."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.rand(1, inputs, generator=generator).double() * 2 - 0.75).clamp_(*BOUNDS)
    return spread * torch.randn(1, inputs, generator=generator).double(), x


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), inputs=st.integers(1, 8), amount=st.floats(0.01, 10), spread=st.floats(0.01, 5))
def test_linf_step(seed, inputs, amount, spread):
    wanted, x = drawn(seed, inputs, spread=spread)
    found = shrink("linf", wanted, x, torch.tensor([[amount]]).double(), BOUNDS)
    reach = torch.minimum(wanted.abs(), room_towards(wanted, x, BOUNDS)).numpy()

    def cost(radius: float) -> float:
        return float(0.5 * ((np.minimum(reach, radius) - wanted.abs().numpy()) ** 2).sum() + amount * radius)

    # The best offsets for a radius are known, and the cost is convex in the radius.
    exact = minimize_scalar(cost, bounds=(0, reach.max() + 1e-12), method="bounded", options={"xatol": 1e-12})
    assert cost(float(found.abs().max())) <= exact.fun + 1e-9
    assert cost(float(found.abs().max())) <= cost(0.0) + 1e-12
    expected = torch.minimum(torch.from_numpy(reach), found.abs().max()) * wanted.sign()
    torch.testing.assert_close(found, expected)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), amount=st.floats(0.01, 3))
def test_l1_step(seed, amount):
    wanted, x = drawn(seed, 3, spread=1.0)
    found = shrink("l1", wanted, x, torch.tensor([[amount]]).double(), BOUNDS)
    grid = torch.linspace(*BOUNDS, 3001).double()
    for i in range(3):
        offsets = grid - x[0, i]
        costs = 0.5 * (offsets - wanted[0, i]) ** 2 + amount * offsets.abs()
        own = 0.5 * (found[0, i] - wanted[0, i]) ** 2 + amount * found[0, i].abs()
        assert float(own) <= float(costs.min()) + 1e-9
        assert BOUNDS[0] - 1e-12 <= float(x[0, i] + found[0, i]) <= BOUNDS[1] + 1e-12


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    inputs=st.integers(1, 8),
    reward=st.floats(-1, 3),
    spread=st.floats(0.01, 3),
    norm=st.sampled_from(["linf", "l1"]),
)
def test_bounds_are_those_of_one_row(seed, inputs, reward, spread, norm):
    """With one row the bound is that of the Lagrangian, of Hölder, or 0; never above the linear program's optimum."""
    force, x = drawn(seed, inputs, spread=spread)
    bound = float(lower_bound(norm, force, torch.tensor([reward]).double(), x, BOUNDS))
    sizes = np.ones((inputs, 1)) if norm == "linf" else np.eye(inputs)
    eye, extra = np.eye(inputs), sizes.shape[1]
    above = np.block([[eye, -sizes], [-eye, -sizes]])
    zeros = np.zeros(2 * inputs)
    limits = [*((BOUNDS[0] - v, BOUNDS[1] - v) for v in x[0].tolist()), *[(0, None)] * extra]
    weights = force[0].numpy()
    lagrangian = linprog(np.concatenate([-weights, np.ones(extra)]), above, zeros, bounds=limits).fun + reward
    dual_norm = np.abs(weights).sum() if norm == "linf" else np.abs(weights).max()
    assert np.isclose(bound, max(lagrangian, reward / dual_norm, 0), atol=1e-9)
    row = np.concatenate([-weights, np.zeros(extra)])
    cost = np.concatenate([np.zeros(inputs), np.ones(extra)])
    primal = linprog(cost, np.vstack([above, row]), np.append(zeros, -reward), bounds=limits)
    impossible = bool(is_contradiction(force, torch.tensor([reward]).double(), x, BOUNDS, 1e-9))
    most = float((force.abs() * room_towards(force, x, BOUNDS)).sum())
    # HiGHS lets a row be missed by 1e-7, which moves its optimum by that over the dual norm.
    assert impossible == (primal.status == 2) or abs(reward - most) < 1e-6
    if primal.status == 0:
        assert bound <= primal.fun + 1e-6 * max(1, 1 / dual_norm)


def test_l2_bound_is_the_distance_to_a_plane():
    force, reward = torch.tensor([[3.0, 4.0]]), torch.tensor([2.5])
    assert float(lower_bound("l2", force, reward, torch.zeros(1, 2), (-9, 9))) == 0.5
