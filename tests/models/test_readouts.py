"""Fitted directions against scikit-learn, closed forms and an independent solver of the margin."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression

from robust_ext.models.readouts.linear import KINDS, fit_directions


def problem(seed, n, F, planted, shift):
    """Correlated features; the planted rows are moved along a random direction."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, F, generator=generator) @ torch.randn(F, F, generator=generator) / F**0.5
    direction = torch.randn(F, generator=generator)
    classes = torch.arange(n) >= n - planted
    return rows + shift * classes[:, None] * direction / direction.norm() + 5, classes


def scaled(rows):
    x = rows.double().numpy()
    x = x - x.mean(0)
    return x / np.sqrt((x**2).mean())


def cosine(a, b):
    return float(a.numpy() @ b / np.linalg.norm(a.numpy()) / np.linalg.norm(b))


@pytest.mark.parametrize("C", [1e-2, 1.0, 10.0, 1e4])
@pytest.mark.parametrize(("n", "F"), [(60, 2), (200, 10), (40, 39), (30, 80)])
@pytest.mark.parametrize(("planted", "shift"), [(1, 6.0), (7, 3.0), (7, 0.1)])
def test_logistic_agrees_with_scikit_learn(C, n, F, planted, shift):
    rows, classes = problem(n + planted, n, F, planted, shift)
    found = fit_directions(rows[None], classes, C=C)
    oracle = LogisticRegression(C=C, solver="newton-cholesky", tol=1e-10, max_iter=1000)
    coefficients = oracle.fit(scaled(rows), classes.numpy()).coef_[0]
    assert bool(found.converged.all())
    assert cosine(found.weight[0], coefficients) > 0.9999
    assert float(found.weight.norm()) == pytest.approx(1, abs=1e-12)
    assert found.weight.dtype == torch.float64


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=3, max_size=3), st.lists(st.floats(-3, 3), min_size=3, max_size=3))
def test_two_points_are_separated_along_their_difference(kind, a, b):
    rows = torch.tensor([a, b], dtype=torch.float64)
    difference = rows[1] - rows[0]
    if float(difference.norm()) < 1e-3:
        return
    found = fit_directions(rows[None], torch.tensor([False, True]), kind=kind)
    torch.testing.assert_close(found.weight[0], difference / difference.norm(), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.center[0], rows.mean(0))


@pytest.mark.parametrize(("seed", "n", "F"), [(0, 12, 2), (1, 15, 3), (2, 10, 5), (3, 8, 12)])
def test_maximum_margin_agrees_with_a_general_solver(seed, n, F):
    rows, classes = problem(seed, n, F, 3, 8.0)
    found = fit_directions(rows[None], classes, kind="max-margin")
    x, y = scaled(rows), np.where(classes.numpy(), 1.0, -1.0)
    solution = minimize(
        lambda p: p[:-1] @ p[:-1] / 2,
        np.append(found.weight[0].numpy() * 0 + y @ x / n, 0.0),
        jac=lambda p: np.append(p[:-1], 0.0),
        constraints={
            "type": "ineq",
            "fun": lambda p: y * (x @ p[:-1] + p[-1]) - 1,
            "jac": lambda p: y[:, None] * np.column_stack([x, np.ones(n)]),
        },
        method="SLSQP",
        options={"maxiter": 1000, "ftol": 1e-12},
    )
    assert solution.success
    assert bool(found.converged.all())
    assert cosine(found.weight[0], solution.x[:-1]) > 0.99999
    along = rows.double() @ found.weight[0]
    gap = float(along[classes].min() - along[~classes].max())
    scale = float(found.scale[0])
    assert gap == pytest.approx(2 * scale / np.linalg.norm(solution.x[:-1]), rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_inseparable_data_end_in_a_direction(kind):
    generator = torch.Generator().manual_seed(0)
    rows, classes = torch.randn(1, 120, 2, generator=generator), torch.arange(120) % 2 == 0
    found = fit_directions(rows, classes, kind=kind)
    assert float(found.weight.norm()) == pytest.approx(1)
    along = (rows[0].double() @ found.weight[0]).numpy()
    assert along[classes].min() < along[~classes].max()
    # The capped solver states that it was stopped; logistic regression has a minimum all the same.
    assert found.converged.tolist() == [kind == "logistic"]


@pytest.mark.parametrize("kind", KINDS)
def test_features_that_do_not_vary_are_left_out(kind):
    rows, classes = problem(4, 50, 3, 2, 7.0)
    padded = torch.cat([rows, torch.full((50, 2), 0.1)], 1)
    alone, with_constants = (fit_directions(r[None], classes, kind=kind).weight[0] for r in (rows, padded))
    assert float(with_constants[3:].abs().max()) < 1e-9
    assert cosine(alone, with_constants[:3].numpy()) > 0.99


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e5])
def test_units_and_origin_of_the_features_do_not_matter(kind, factor):
    rows, classes = problem(9, 40, 5, 2, 4.0)
    first = fit_directions(rows[None].double(), classes, kind=kind)
    moved = fit_directions(factor * (rows[None].double() + 100), classes, kind=kind)
    torch.testing.assert_close(moved.weight, first.weight, rtol=0, atol=1e-5)
    torch.testing.assert_close(moved.scale, factor * first.scale)
