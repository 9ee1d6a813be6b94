"""The nearest point of a box beyond a plane, against scipy's linear programs and quadprog."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor

from robust_ext.attacks.linear_region.fab import project_beyond_plane
from robust_ext.core.threat import NORMS


def exact(norm: str, x: np.ndarray, normal: np.ndarray, height: float, bounds: tuple[float, float]) -> float | None:
    """The distance, or None where no point of the box lies beyond the plane."""
    size = len(x)
    if norm == "l2":
        quadprog = pytest.importorskip("quadprog", reason="quadprog is the oracle of the l2 problem")
        eye = np.eye(size)
        columns = np.concatenate([normal[:, None], eye, -eye], 1)
        limits = np.concatenate([[height], np.full(size, bounds[0]), np.full(size, -bounds[1])])
        try:
            return float(np.linalg.norm(quadprog.solve_qp(eye, x, columns, limits)[0] - x))
        except ValueError:
            return None
    # Variables: the parts of the offset above and below 0, and for linf the largest of them.
    low, high = x - bounds[0], bounds[1] - x
    rows = [np.concatenate([-normal, normal, [0.0]])]
    cost = np.ones(2 * size + 1)
    if norm == "linf":
        cost = np.append(np.zeros(2 * size), 1.0)
        rows += list(np.concatenate([np.eye(2 * size), -np.ones((2 * size, 1))], 1))
    right = np.append(normal @ x - height, np.zeros(len(rows) - 1))
    room = [(0, value) for value in (*high, *low)]
    solved = linprog(cost, np.array(rows), right, bounds=[*room, (0, None)])
    return None if solved.fun is None else float(solved.fun)


@settings(max_examples=80, deadline=None)
@given(
    norm=st.sampled_from(NORMS),
    values=st.integers(1, 8),
    seed=st.integers(0, 10_000),
    bounds=st.sampled_from([(0.0, 1.0), (-2.0, 3.0)]),
    zeros=st.booleans(),
)
def test_it_is_that_of_exact_solvers(
    norm: str, values: int, seed: int, bounds: tuple[float, float], zeros: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    width = bounds[1] - bounds[0]
    x = torch.rand(3, values, generator=generator, dtype=torch.float64) * width + bounds[0]
    normals = torch.randn(3, values, generator=generator, dtype=torch.float64)
    if zeros:
        normals[:, 0] = 0
    most = (torch.where(normals > 0, bounds[1], bounds[0]) * normals).sum(1)
    share = torch.rand(3, generator=generator, dtype=torch.float64) * 1.3 - 0.1
    heights = (normals * x).sum(1) + share * (most - (normals * x).sum(1))
    found = project_beyond_plane(norm, x, normals, heights, bounds=bounds)
    assert bool(((found >= bounds[0]) & (found <= bounds[1])).all())
    order = {"linf": torch.inf, "l2": 2, "l1": 1}[norm]
    for row in range(3):
        expected = exact(norm, x[row].numpy(), normals[row].numpy(), float(heights[row]), bounds)
        reached = float(normals[row] @ found[row])
        if expected is None:
            assert reached == pytest.approx(float(most[row]), abs=1e-9)
        else:
            offset = found[row] - x[row]
            assert reached >= float(heights[row]) - 1e-9
            assert float(torch.linalg.vector_norm(offset, ord=order)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_no_normal_and_no_rows_move_nothing(norm: str) -> None:
    x = torch.tensor([[0.25, 0.5]])
    assert torch.equal(project_beyond_plane(norm, x, torch.zeros(1, 2), torch.ones(1), bounds=(0, 1)), x)
    none: Tensor = torch.zeros(0, 2)
    assert project_beyond_plane(norm, none, none, torch.zeros(0), bounds=(0, 1)).shape == (0, 2)
