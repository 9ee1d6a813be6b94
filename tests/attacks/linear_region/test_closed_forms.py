"""Proximal steps, dual bounds and projections beyond a plane against general solvers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog, minimize_scalar

from robust_ext.attacks.linear_region.plane_steps import nearest_in_box, project_beyond_plane
from robust_ext.attacks.linear_region.problem import is_contradiction, lower_bound, room_towards, shrink
from robust_ext.core.threat import NORMS
from tests.attacks.linear_region.test_solver import ORDER, exact

BOUNDS = (-0.5, 1.0)
SEEDS = st.integers(0, 2**31)


def drawn(seed, inputs, *, spread):
    """A vector, and inputs of which some lie on the bounds."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.rand(1, inputs, generator=generator).double() * 2 - 0.75).clamp_(*BOUNDS)
    return spread * torch.randn(1, inputs, generator=generator).double(), x


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, inputs=st.integers(1, 8), amount=st.floats(0.01, 10), spread=st.floats(0.01, 5))
def test_linf_step(seed, inputs, amount, spread):
    wanted, x = drawn(seed, inputs, spread=spread)
    found = shrink("linf", wanted, x, torch.tensor([[amount]]).double(), BOUNDS)
    reach = torch.minimum(wanted.abs(), room_towards(wanted, x, BOUNDS)).numpy()

    def cost(radius):
        return float(0.5 * ((np.minimum(reach, radius) - wanted.abs().numpy()) ** 2).sum() + amount * radius)

    # The best offsets for a radius are known, and the cost is convex in the radius.
    least = minimize_scalar(cost, bounds=(0, reach.max() + 1e-12), method="bounded", options={"xatol": 1e-12})
    assert cost(float(found.abs().max())) <= min(least.fun + 1e-9, cost(0.0) + 1e-12)
    expected = torch.minimum(torch.from_numpy(reach), found.abs().max()) * wanted.sign()
    torch.testing.assert_close(found, expected)


@settings(max_examples=50, deadline=None)
@given(seed=SEEDS, amount=st.floats(0.01, 3))
def test_l1_step(seed, amount):
    wanted, x = drawn(seed, 3, spread=1.0)
    found = shrink("l1", wanted, x, torch.tensor([[amount]]).double(), BOUNDS)
    offsets = torch.linspace(*BOUNDS, 3001).double()[:, None] - x
    costs = 0.5 * (offsets - wanted) ** 2 + amount * offsets.abs()
    own = 0.5 * (found - wanted) ** 2 + amount * found.abs()
    assert bool((own <= costs.amin(0) + 1e-9).all())
    assert bool(((x + found >= BOUNDS[0] - 1e-12) & (x + found <= BOUNDS[1] + 1e-12)).all())


@settings(max_examples=40, deadline=None)
@given(
    seed=SEEDS,
    inputs=st.integers(1, 8),
    reward=st.floats(-1, 3),
    spread=st.floats(0.01, 3),
    norm=st.sampled_from(["linf", "l1"]),
)
def test_bounds_are_those_of_one_row(seed, inputs, reward, spread, norm):
    """With one row the bound is that of the Lagrangian, of Hölder, or 0; never above the linear program's optimum."""
    force, x = drawn(seed, inputs, spread=spread)
    rewards, weights = torch.tensor([reward]).double(), force[0].numpy()
    bound = float(lower_bound(norm, force, rewards, x, BOUNDS))
    sizes = np.ones((inputs, 1)) if norm == "linf" else np.eye(inputs)
    above = np.block([[np.eye(inputs), -sizes], [-np.eye(inputs), -sizes]])
    limits = [*((BOUNDS[0] - v, BOUNDS[1] - v) for v in x[0].tolist()), *[(0, None)] * sizes.shape[1]]
    cost = np.concatenate([-weights, np.ones(sizes.shape[1])])
    lagrangian = linprog(cost, above, np.zeros(2 * inputs), bounds=limits).fun + reward
    dual_norm = np.abs(weights).sum() if norm == "linf" else np.abs(weights).max()
    assert np.isclose(bound, max(lagrangian, reward / dual_norm, 0), atol=1e-9)
    optimum = exact(norm, weights[None], -reward - weights[None] @ x[0].numpy(), x[0].numpy(), BOUNDS)
    impossible = bool(is_contradiction(force, rewards, x, BOUNDS, 1e-9))
    most = float((force.abs() * room_towards(force, x, BOUNDS)).sum())
    # HiGHS lets a row be missed by 1e-7, which moves its optimum by that over the dual norm.
    assert impossible == np.isinf(optimum) or abs(reward - most) < 1e-6
    assert bound <= optimum + 1e-6 * max(1, 1 / dual_norm)


def test_l2_bound_is_the_distance_to_a_plane():
    force, reward = torch.tensor([[3.0, 4.0]]), torch.tensor([2.5])
    assert float(lower_bound("l2", force, reward, torch.zeros(1, 2), (-9, 9))) == 0.5


@settings(max_examples=80, deadline=None)
@given(
    norm=st.sampled_from(NORMS),
    values=st.integers(1, 8),
    seed=SEEDS,
    bounds=st.sampled_from([(0.0, 1.0), (-2.0, 3.0)]),
    zeros=st.booleans(),
)
def test_projections_beyond_a_plane_are_those_of_exact_solvers(norm, values, seed, bounds, zeros):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(3, values, generator=generator, dtype=torch.float64) * (bounds[1] - bounds[0]) + bounds[0]
    normals = torch.randn(3, values, generator=generator, dtype=torch.float64)
    if zeros:
        normals[:, 0] = 0
    most = (torch.where(normals > 0, bounds[1], bounds[0]) * normals).sum(1)
    share = torch.rand(3, generator=generator, dtype=torch.float64) * 1.3 - 0.1
    heights = (normals * x).sum(1) + share * (most - (normals * x).sum(1))
    found = project_beyond_plane(norm, x, normals, heights, bounds=bounds)
    assert bool(((found >= bounds[0]) & (found <= bounds[1])).all())
    for row in range(3):
        expected = exact(norm, normals[row : row + 1].numpy(), -heights[row : row + 1].numpy(), x[row].numpy(), bounds)
        reached = float(normals[row] @ found[row])
        if np.isinf(expected):
            assert reached == pytest.approx(float(most[row]), abs=1e-9)
        else:
            assert reached >= float(heights[row]) - 1e-9
            distance = float(torch.linalg.vector_norm(found[row] - x[row], ord=ORDER[norm]))
            assert distance == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_no_normal_and_no_rows_move_nothing(norm):
    x, none = torch.tensor([[0.25, 0.5]]), torch.zeros(0, 2)
    assert torch.equal(project_beyond_plane(norm, x, torch.zeros(1, 2), torch.ones(1), bounds=(0, 1)), x)
    assert project_beyond_plane(norm, none, none, torch.zeros(0), bounds=(0, 1)).shape == (0, 2)


@settings(max_examples=90, deadline=None)
@given(
    norm=st.sampled_from(NORMS),
    values=st.integers(1, 8),
    seed=SEEDS,
    radius=st.floats(0.01, 2),
    share=st.floats(-0.1, 1.2),
)
def test_nearest_in_box_is_the_optimum_of_general_solvers(norm, values, seed, radius, share):
    generator = torch.Generator().manual_seed(seed)
    points, x = torch.rand(2, 1, values, generator=generator, dtype=torch.float64)
    # Some values were not changed.
    points = torch.where(torch.rand(1, values, generator=generator) < 0.5, x, points)
    normals = torch.randn(1, values, generator=generator, dtype=torch.float64)
    low, high = (points - radius).clamp_min(0), (points + radius).clamp_max(1)
    least, most = (torch.where((normals > 0) == up, high, low) @ normals[0] for up in (False, True))
    heights = least + share * (most - least)
    radii = torch.full((1, 1), radius, dtype=torch.float64)
    found = nearest_in_box(norm, points, x, normals, heights, radius=radii, bounds=(0.0, 1.0))
    assert bool(((found >= low) & (found <= high)).all())
    if share > 1:
        assert float(found @ normals[0]) == pytest.approx(float(most), abs=1e-9)
        return
    assert float(found @ normals[0]) >= float(heights) - 1e-9
    if share > 0.999:
        # For the solvers there may be no such point, by rounding.
        return
    eye = np.eye(values)
    rows = np.vstack([normals.numpy(), eye, -eye])
    offsets = np.concatenate([-heights.numpy(), -low[0].numpy(), high[0].numpy()])
    optimum = exact(norm, rows, offsets, x[0].numpy(), (0.0, 1.0))
    assert float(torch.linalg.vector_norm(found - x, ord=ORDER[norm])) == pytest.approx(optimum, abs=1e-6)
