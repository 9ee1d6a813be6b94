"""The solver and its parts against exact ones: quadprog for l2, HiGHS for linf and l1."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor

from robust_ext.attacks.linear_region.plane_steps import nearest_in_box, project_beyond_plane
from robust_ext.attacks.linear_region.problem import estimate_scaling
from robust_ext.attacks.linear_region.solver import Status
from robust_ext.attacks.linear_region.solver import solve as solve_scaled
from robust_ext.core.threat import NORMS

COUNT = 25
ORDER = {"linf": torch.inf, "l2": 2, "l1": 1}
# Regions of networks: inputs, hidden widths, decision rows; polytopes: inputs, rows, half the width of the box.
FAMILIES = [
    (1, (6,), 1), (4, (8, 6), 2), (10, (16, 12), 1), (20, (12,), 3),
    (1, 3, 0.5), (6, 30, 0.5), (15, 20, 0.5), (12, 25, 10.0),
]  # fmt: skip
NETWORKS = 4
SEEDS = st.integers(0, 2**31)
in_norms = pytest.mark.parametrize("norm", NORMS)


@dataclass(frozen=True)
class DenseConstraints:
    """Small problems with explicit matrices ``(B, M, D)`` and offsets ``(B, M)``."""

    matrix: Tensor
    offset: Tensor
    decision: Tensor

    def forward(self, points):
        return torch.bmm(self.matrix, points.unsqueeze(2)).squeeze(2) + self.offset

    def adjoint(self, multipliers):
        return torch.bmm(multipliers.unsqueeze(1), self.matrix).squeeze(1)

    def select(self, rows):
        return DenseConstraints(self.matrix[rows], self.offset[rows], self.decision)


def solve(constraints, x, **given):
    scaling = estimate_scaling(constraints, x, generator=torch.Generator().manual_seed(0))
    return solve_scaled(constraints, x, scaling=scaling, **given)


def affine_region(generator, inputs, widths, decisions):
    """Rows of the region of a random point in a random ReLU network, and those of one class that wins."""

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    point = torch.rand(inputs, generator=generator, dtype=torch.float64)
    matrix, offset = torch.eye(inputs, dtype=torch.float64), torch.zeros(inputs, dtype=torch.float64)
    rows, offsets = [], []
    for width in widths:
        weight, bias = draw(width, matrix.shape[0]) / matrix.shape[0] ** 0.5, 0.3 * draw(width)
        matrix, offset = weight @ matrix, weight @ offset + bias
        sign = torch.where(matrix @ point + offset >= 0, 1.0, -1.0).double()
        rows.append(sign[:, None] * matrix)
        offsets.append(sign * offset)
        matrix, offset = matrix * (sign > 0)[:, None], offset * (sign > 0)
    weight, bias = draw(decisions + 1, matrix.shape[0]) / matrix.shape[0] ** 0.5, 0.3 * draw(decisions + 1)
    matrix, offset = weight @ matrix, weight @ offset + bias
    rows.append(matrix[:1] - matrix[1:])
    offsets.append(offset[:1] - offset[1:])
    return torch.cat(rows), torch.cat(offsets)


def polytope(generator, inputs, rows, half):
    """Random rows of very different norms that hold at a random point of the unit box, but one in ten cannot hold."""
    matrix = torch.randn(rows, inputs, generator=generator, dtype=torch.float64)
    matrix *= torch.randn(rows, 1, generator=generator, dtype=torch.float64).exp()
    inside = torch.rand(inputs, generator=generator, dtype=torch.float64)
    slack = 0.1 * torch.rand(rows, generator=generator, dtype=torch.float64) * matrix.norm(dim=1)
    if float(torch.rand(1, generator=generator)) < 0.1:
        slack[0] -= (1 + 2 * half) * matrix[0].abs().sum()
    return matrix, slack - matrix @ inside


@cache
def problems(family):
    inputs, size, extra = FAMILIES[family]
    generator, network = torch.Generator().manual_seed(family), family < NETWORKS
    make = affine_region if network else polytope
    pairs = [make(generator, inputs, size, extra) for _ in range(COUNT)]
    matrix, offset = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    decision = torch.zeros(matrix.shape[1], dtype=torch.bool)
    decision[-extra if network else -1 :] = True
    x = torch.rand(COUNT, inputs, generator=generator, dtype=torch.float64)
    return DenseConstraints(matrix, offset, decision), x, (0.0, 1.0) if network else (0.5 - extra, 0.5 + extra)


def exact(norm, matrix, offset, x, bounds):
    """The distance of the nearest feasible point, infinite if there is none; by HiGHS, and by quadprog in l2."""
    eye, inputs = np.eye(len(x)), len(x)
    if norm == "l2":
        quadprog = pytest.importorskip("quadprog", reason="quadprog is the oracle of the l2 problem")
        sizes = np.linalg.norm(matrix, axis=1)
        if (offset[sizes == 0] < 0).any():
            return np.inf
        matrix, offset, sizes = matrix[sizes > 0], offset[sizes > 0], sizes[sizes > 0]
        rows = np.concatenate([matrix / sizes[:, None], eye, -eye])
        least = np.concatenate([-offset / sizes, np.full(inputs, bounds[0]), np.full(inputs, -bounds[1])])
        try:
            return float(np.linalg.norm(quadprog.solve_qp(eye, x, rows.T, least)[0] - x))
        except ValueError as error:
            if "inconsistent" not in str(error):
                raise
            return np.inf
    # A linear program in the point, and in a radius or in the size of each offset.
    sizes = np.ones((inputs, 1)) if norm == "linf" else eye
    extra = sizes.shape[1]
    above = np.block([[-matrix, np.zeros((len(matrix), extra))], [eye, -sizes], [-eye, -sizes]])
    limits = [*[bounds] * inputs, *[(0, None)] * extra]
    cost = np.concatenate([np.zeros(inputs), np.ones(extra)])
    found = linprog(cost, above, np.concatenate([offset, x, -x]), bounds=limits, method="highs")
    assert found.status in (0, 2), found.message
    return float(found.fun) if found.status == 0 else np.inf


@cache
def optima(family, norm):
    constraints, x, bounds = problems(family)
    triples = zip(constraints.matrix.numpy(), constraints.offset.numpy(), x.numpy(), strict=True)
    return torch.tensor([exact(norm, *triple, bounds) for triple in triples], dtype=torch.float64)


def run(family, norm, dtype=torch.float64, *, rows=slice(None), **given):
    """Solve a family of problems, or some of its rows."""
    constraints, x, bounds = problems(family)
    dense = DenseConstraints(constraints.matrix.to(dtype), constraints.offset.to(dtype), constraints.decision)
    given = {"margin": 2e-5 if dtype == torch.float32 else 1e-9, "norm": norm, "bounds": bounds, **given}
    return solve(dense.select(torch.arange(COUNT)[rows]), x[rows].to(dtype), **given)


def gaps(found, optimum):
    """By how much the bounds of the feasible problems lie above the optimum, relative where that is not 0."""
    feasible = optimum.isfinite()
    return ((found.bound.double() - optimum) / optimum.clamp_min(1e-3))[feasible]


@pytest.mark.parametrize("family", range(len(FAMILIES)))
@pytest.mark.parametrize(("norm", "dtype"), [("l2", torch.float32), *((norm, torch.float64) for norm in NORMS)])
def test_problems_are_solved(family, norm, dtype):
    found = run(family, norm, dtype, iterations=300 if norm == "l2" else 1000, tolerance=1e-4)
    assert float(gaps(found, optima(family, norm)).abs().max()) <= 1e-3
    if norm == "l2":
        # A few polytopes are so narrow that they take longer.
        early = gaps(run(family, norm, dtype, iterations=100, tolerance=1e-4), optima(family, norm)).abs()
        assert float(early.max()) <= (1e-3 if family < NETWORKS else 5e-3)


@pytest.mark.parametrize("family", range(len(FAMILIES)))
@in_norms
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 2e-5), (torch.float64, 1e-9)])
def test_the_bound_never_passes_the_optimum(family, norm, dtype, allowed):
    for iterations in (1, 5, 20, 150):
        found = run(family, norm, dtype, iterations=iterations, tolerance=1e-9)
        assert bool(((found.iterations >= 1) & (found.iterations <= iterations)).all())
        assert float(gaps(found, optima(family, norm)).max()) <= allowed


@pytest.mark.parametrize("family", [0, 1, 2, 4, 5])
@in_norms
def test_statuses_are_true(family, norm):
    (constraints, x, bounds), optimum = problems(family), optima(family, norm)
    found = run(family, norm, iterations=2000, tolerance=1e-5)
    assert torch.equal(found.status == Status.INFEASIBLE, optimum.isinf())
    assert torch.equal(found.bound.isinf(), optimum.isinf())
    solved = found.status == Status.SOLVED
    assert solved[optimum.isfinite()].float().mean() >= 0.9
    assert not (found.status == Status.NO_IMPROVEMENT).any()
    assert ((found.points >= bounds[0]) & (found.points <= bounds[1])).all()
    distance = torch.linalg.vector_norm(found.points - x, ord=ORDER[norm], dim=1)
    torch.testing.assert_close(distance[solved], optimum[solved], rtol=1e-3, atol=1e-9)
    missed = constraints.forward(found.points) / constraints.matrix.norm(dim=2).clamp_min(1e-9)
    assert (missed[solved].amin(1) >= -1e-4 * distance[solved] - 1e-9).all()


@pytest.mark.parametrize("family", [0, 2, 5])
@in_norms
def test_problems_without_improvement_are_given_up(family, norm):
    optimum = optima(family, norm)
    far = optimum.isfinite() & (optimum > 0)
    full = run(family, norm, torch.float32, iterations=1000)
    beaten = run(family, norm, torch.float32, best=0.9 * optimum, iterations=1000)
    assert (beaten.status[far] == Status.NO_IMPROVEMENT).all()
    assert int(beaten.iterations[far].sum()) < int(full.iterations[far].sum())
    # A bound proves nothing within the margin.
    for close, margin in ((1.001 * optimum + 1e-6, 2e-5), (0.99 * optimum, 0.05)):
        worth = run(family, norm, torch.float32, best=close, margin=margin, iterations=1000)
        assert not (worth.status == Status.NO_IMPROVEMENT).any()


@pytest.mark.parametrize("family", [2, 5])
@in_norms
def test_from_the_solution_it_is_done_soon(family, norm):
    optimum = optima(family, norm)
    full = run(family, norm, iterations=2000, tolerance=1e-5)
    assert bool((full.multipliers >= 0).all())
    stops = {"iterations": 2000, "tolerance": 1e-4}
    there = run(family, norm, points=full.points, multipliers=full.multipliers, **stops)
    cold = run(family, norm, **stops)
    solved = optimum.isfinite() & (full.status == Status.SOLVED)
    assert bool((there.status[solved] == Status.SOLVED).all())
    assert 3 * int(there.iterations[solved].sum()) <= int(cold.iterations[solved].sum())


@pytest.mark.parametrize("family", [1, 6])
@in_norms
def test_a_problem_does_not_depend_on_its_batch(family, norm):
    together = run(family, norm, iterations=60)
    for row in (0, 7, COUNT - 1):
        alone = run(family, norm, iterations=60, rows=[row])
        assert (alone.status[0], alone.iterations[0]) == (together.status[row], together.iterations[row])
        torch.testing.assert_close(alone.points[0], together.points[row], rtol=0, atol=1e-8)
        torch.testing.assert_close(alone.bound[0], together.bound[row], rtol=1e-8, atol=1e-8)


@in_norms
def test_nothing_to_do_and_constant_rows(norm):
    for count, rows, inputs in ((0, 3, 4), (2, 0, 4), (2, 3, 4), (1, 3, 1)):
        x = torch.full((count, inputs), 0.25)
        constraints = DenseConstraints(torch.ones(count, rows, inputs), torch.ones(count, rows), torch.zeros(rows) > 0)
        found = solve(constraints, x, norm=norm, bounds=(0, 1))
        assert torch.equal(found.points, x)
        assert found.status.tolist() == [Status.SOLVED] * count
        assert found.bound.tolist() == [0] * count
    matrix = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]] * 3 + [[[0.0, 0.0], [0.0, 0.0]]])
    offset = torch.tensor([[-0.5, 0.0], [-0.5, 2.0], [-0.5, -1e-3], [0.0, 1.0]])
    found = solve(DenseConstraints(matrix, offset, torch.zeros(2) > 0), torch.zeros(4, 2), norm=norm, bounds=(0, 1))
    assert found.status.tolist() == [Status.SOLVED, Status.SOLVED, Status.INFEASIBLE, Status.SOLVED]
    torch.testing.assert_close(found.bound[[0, 1, 3]], torch.tensor([0.5, 0.5, 0.0]), rtol=1e-3, atol=0)


@settings(max_examples=80)
@given(st.sampled_from(NORMS), st.integers(1, 8), SEEDS, st.sampled_from([(0.0, 1.0), (-2.0, 3.0)]), st.booleans())
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
    unmoved = project_beyond_plane(norm, x, torch.zeros_like(x), torch.ones(3).double(), bounds=bounds)
    assert torch.equal(unmoved, x)
    assert project_beyond_plane(norm, x[:0], normals[:0], heights[:0], bounds=bounds).shape == (0, values)


@settings(max_examples=90)
@given(st.sampled_from(NORMS), st.integers(1, 8), SEEDS, st.floats(0.01, 2), st.floats(-0.1, 1.2))
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
    if share <= 0.999:  # Above, by rounding, there may be no such point for the solvers.
        rows = np.vstack([normals.numpy(), np.eye(values), -np.eye(values)])
        offsets = np.concatenate([-heights.numpy(), -low[0].numpy(), high[0].numpy()])
        optimum = exact(norm, rows, offsets, x[0].numpy(), (0.0, 1.0))
        assert float(torch.linalg.vector_norm(found - x, ord=ORDER[norm])) == pytest.approx(optimum, abs=1e-6)
