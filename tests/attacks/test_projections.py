"""Projections against a general solver, and against what every projection must satisfy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from robust_ext.attacks._common.rows import project
from robust_ext.core.threat import NORMS, ThreatModel

BOUNDS = ((0.0, 1.0), (-2.5, 3.0))


def draw(seed, shape, threat_model, reach, edge):
    generator = torch.Generator().manual_seed(seed)
    low, high = threat_model.bounds
    x = torch.rand(shape, generator=generator, dtype=torch.float64)
    x = (x.round() if edge else x) * (high - low) + low
    return x + reach * torch.randn(shape, generator=generator, dtype=torch.float64), x


def solver(point, x, threat_model):
    """The same by sequential quadratic programming, on the parts of the offset above and below 0."""
    n, epsilon = len(x), threat_model.epsilon
    low, high = threat_model.bounds
    wanted = point - x
    above, below = (slice(n), slice(n, None))
    inside = {
        "linf": lambda v: epsilon - v[above] - v[below],
        "l2": lambda v: epsilon**2 - ((v[above] - v[below]) ** 2).sum(),
        "l1": lambda v: epsilon - v.sum(),
    }[threat_model.norm]
    limits = [(0, high - value) for value in x] + [(0, value - low) for value in x]
    within = {"bounds": limits, "constraints": {"type": "ineq", "fun": inside}}
    how = {"method": "SLSQP", "options": {"maxiter": 500, "ftol": 1e-14}}
    found = minimize(lambda v: ((v[above] - v[below] - wanted) ** 2).sum(), np.zeros(2 * n), **within, **how)
    moved = found.x[:n] - found.x[n:]
    # The solver may end outside; between there and x is a point inside.
    length = float(np.linalg.norm(moved, {"linf": np.inf, "l2": 2, "l1": 1}[threat_model.norm]))
    return x + moved * min(1.0, epsilon / max(length, 1e-300))


@settings(max_examples=40)
@given(
    norm=st.sampled_from(NORMS),
    bounds=st.sampled_from(BOUNDS),
    epsilon=st.sampled_from([0.05, 0.4, 1.5, 10.0]),
    reach=st.sampled_from([0.05, 0.5, 3.0]),
    values=st.integers(1, 6),
    edge=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_no_allowed_point_is_nearer(norm, bounds, epsilon, reach, values, edge, seed):
    threat_model = ThreatModel(norm=norm, epsilon=epsilon, bounds=bounds)
    point, x = draw(seed, (1, values), threat_model, reach, edge)
    ours = project(point, x, threat_model)
    assert float(threat_model.distance(ours, x)) <= epsilon * (1 + 1e-12)
    theirs = solver(point[0].numpy(), x[0].numpy(), threat_model)
    near, far = float((ours - point).norm()), float(np.linalg.norm(theirs - point[0].numpy()))
    assert near <= far + 1e-6
    # The angle at a projection on a convex set is not acute, so that a point inside that is as near is the same point.
    assert float(np.linalg.norm(theirs - ours[0].numpy())) ** 2 <= far**2 - near**2 + 1e-5


@settings(max_examples=60)
@given(
    norm=st.sampled_from(NORMS),
    bounds=st.sampled_from(BOUNDS),
    epsilon=st.sampled_from([1e-6, 0.01, 1.0, 50.0, 1e4]),
    reach=st.sampled_from([1e-7, 0.1, 10.0, 1e6]),
    shape=st.sampled_from([(1, 1), (3, 2), (4, 3, 5, 5), (2, 3000)]),
    seed=st.integers(0, 2**31),
)
def test_float32_points_are_allowed_and_projected_once(norm, bounds, epsilon, reach, shape, seed):
    threat_model = ThreatModel(norm=norm, epsilon=epsilon, bounds=bounds)
    point, x = (part.to(torch.float32) for part in draw(seed, shape, threat_model, reach, edge=False))
    ours = project(point, x, threat_model)
    assert (ours.shape, ours.dtype) == (x.shape, torch.float32)
    assert bool(((ours >= bounds[0]) & (ours <= bounds[1])).all())
    assert bool(threat_model.contains(ours, x).all())
    again = project(ours, x, threat_model)
    assert float(threat_model.distance(again, ours).max()) <= 2 * threat_model.tolerance(x[:1].numel())


@pytest.mark.parametrize("norm", NORMS)
def test_rows_do_not_influence_one_another_and_none_are_fine(norm):
    threat_model = ThreatModel(norm=norm, epsilon=0.7)
    point, x = draw(3, (5, 50), threat_model, 0.5, edge=False)
    point[2] = x[2]
    together = project(point, x, threat_model)
    for row in range(5):
        alone = project(point[row : row + 1], x[row : row + 1], threat_model)
        torch.testing.assert_close(alone[0], together[row], rtol=1e-12, atol=1e-12)
    assert torch.equal(together[2], x[2])
    assert project(point[:0], x[:0], threat_model).shape == (0, 50)
