import contextlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from robust_ext.attacks.native import Step
from robust_ext.attacks.rays import RayS
from robust_ext.core.threat import ThreatModel
from tests.attacks.problems import Linear, Recorder, Rowwise, images, predicted, target_of


def network_of(values, bounds=(0.0, 1.0)):
    return Rowwise(values, 4, bounds, gain=3)


def problem(count, shape, bounds=(0.0, 1.0)):
    x = images(count, shape, bounds)
    network = network_of(x[0].numel(), bounds)
    return network, x, predicted(network, x)


def run(module, x, y, *, bounds=(0.0, 1.0), epsilon=1e-9, classes=4, watch=None, **chosen):
    threat_model = ThreatModel(norm="linf", epsilon=epsilon, bounds=bounds)
    target = target_of(module, tuple(x.shape[1:]), classes, bounds)
    return RayS(**chosen).run(target, x, y, threat_model=threat_model, watch=watch)


def by_hand(module, x, label, bounds, queries, tolerance):
    """The algorithm for one row as nested loops: the points it queries, and then what it returns."""
    flat, queried, values = x.flatten(), list[Tensor](), x.numel()
    width, best = bounds[1] - bounds[0], None

    def point(signs, radius):
        return (flat + np.float32(radius) * signs).clamp(*bounds).view(x.shape)

    def wrong(at):
        if len(queried) == queries:
            raise StopIteration
        queried.append(at)
        return int(predicted(module, at[None])) != label

    def try_ray(signs):
        nonlocal best
        known = width if best is None else best[1]
        if not wrong(point(signs, known)):
            return False
        changed = best is None
        if best is None:
            best = signs, known
        low, high = 0.0, known
        while high - low > tolerance * width / math.sqrt(values):
            middle = (low + high) / 2
            if wrong(point(signs, middle)):
                high, changed = middle, True
                best = signs, middle
            else:
                low = middle
        return changed

    with contextlib.suppress(StopIteration):
        if wrong(x):
            return [*queried, x]
        signs, parts = torch.ones(values), 1
        try_ray(signs)
        while True:
            size, changed = math.ceil(values / parts), False
            for start in range(0, values, size):
                turned = (signs if best is None else best[0]).clone()
                turned[start : start + size] *= -1
                changed |= try_ray(turned)
            if size == 1 and not changed:
                break
            parts *= 2
    return [*queried, x if best is None else point(*best)]


@given(
    shape=st.sampled_from([(1,), (2,), (5,), (7,), (1, 3, 3), (2, 3, 4)]),
    bounds=st.sampled_from([(0.0, 1.0), (-3.0, 1.5)]),
    queries=st.integers(1, 150),
    tolerance=st.sampled_from([1e-3, 0.05, 3.0]),
)
@settings(deadline=None, max_examples=30)
def test_queries_what_nested_loops_for_single_rows_query(shape, bounds, queries, tolerance):
    network, x, y = problem(5, shape, bounds)
    y[4] = (y[4] + 1) % 4
    seen = []
    found = run(network, x, y, bounds=bounds, queries=queries, tolerance=tolerance, stop=False, watch=seen.append)
    for row in range(5):
        *queried, returned = by_hand(network, x[row], int(y[row]), bounds, queries, tolerance)
        assert int(found.queries[row]) == len(queried) <= queries
        for step, expected in zip(seen, queried, strict=False):
            assert torch.equal(step.points[row], expected)
        # What is sent for finished rows is what they return.
        assert all(torch.equal(step.points[row], returned) for step in seen[len(queried) :])
        assert torch.equal(found.candidates[row], returned)
        expected_distance = (returned.double() - x[row].double()).abs().max().item()
        assert float(found.distances[row]) == (expected_distance if bool(found.found[row]) else math.inf)


@pytest.mark.parametrize("shape", [(12,), (1, 3, 5), (3, 4, 4)])
def test_distance_on_linear_models_is_the_closed_form(shape):
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(*shape, generator=generator)
    x = torch.rand(6, *shape, generator=generator) - 0.5
    network, bounds = Linear(weight), (-3.0, 3.0)
    y = predicted(network, x)
    expected = (x.double() * weight.double()).flatten(1).sum(1).abs() / weight.double().abs().sum()
    # No value of the nearest points meets a bound, so the formula holds.
    assert float(expected.max()) < 1
    found = run(network, x, y, bounds=bounds, classes=2, queries=20_000, tolerance=1e-6, stop=False)
    assert bool(found.found.all())
    assert bool((found.distances >= expected - 1e-6).all())
    # A row ends where no single sign gains more than the tolerance.
    torch.testing.assert_close(found.distances, expected, rtol=1e-3, atol=1e-5)
    early = run(network, x, y, bounds=bounds, classes=2, queries=40, stop=False)
    assert bool((early.distances >= found.distances - 1e-6).all())


@pytest.mark.parametrize("keep_rows", [True, False])
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-2.0, 3.0)])
def test_queries_are_exact_and_points_in_bounds(keep_rows, bounds):
    x = images(8, (1, 4, 5), bounds)
    x[0], x[1] = bounds
    network = Recorder(network_of(20, bounds))
    y = predicted(network.inner, x)
    y[3] = (y[3] + 1) % 4
    epsilon = 0.3 * (bounds[1] - bounds[0])
    found = run(network, x, y, bounds=bounds, epsilon=epsilon, queries=60, keep_rows=keep_rows)
    assert len(network.batches) == int(found.queries.max()) <= 60
    assert network.rows == (8 * len(network.batches) if keep_rows else int(found.queries.sum()))
    assert int(found.queries[3]) == 1
    assert len(found.queries.unique()) > 2
    for batch in (*network.batches, found.candidates):
        assert bounds[0] <= float(batch.min()) <= float(batch.max()) <= bounds[1]
    assert torch.equal(found.found, predicted(network.inner, found.candidates) != y)
    # Leaving finished rows out changes no row.
    other = run(network.inner, x, y, bounds=bounds, epsilon=epsilon, queries=60, keep_rows=not keep_rows)
    assert torch.equal(found.candidates, other.candidates)
    assert torch.equal(found.queries, other.queries)
    solved = found.distances <= epsilon + 1e-6
    assert torch.equal(solved, found.queries < 60)
    assert bool(solved.any())


def test_stopping_ends_at_the_first_point_within_epsilon():
    network, x, y = problem(6, (1, 4, 4))
    whole, stopped = list[Step](), list[Step]()
    run(network, x, y, queries=200, stop=False, watch=whole.append)
    found = run(network, x, y, queries=200, epsilon=0.2, watch=stopped.append)
    for row in range(6):
        known = [-float(step.loss[row]) for step in whole]
        within = [number for number, distance in enumerate(known) if distance <= 0.2]
        count = within[0] + 1 if within else len(whole)
        assert int(found.queries[row]) == count
        assert known == sorted(known, reverse=True)
        for step, expected in zip(stopped[:count], whole, strict=False):
            assert torch.equal(step.points[row], expected.points[row])
