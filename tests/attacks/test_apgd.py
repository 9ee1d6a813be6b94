"""APGD against linear programs, the papers' algorithm written down plainly and torchattacks; what it promises."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog, minimize_scalar
from torch import nn

from robust_ext.attacks._common.rows import project
from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.base import Attack, AttackTraits
from robust_ext.attacks.transfer import Transfer
from robust_ext.core.errors import InvalidArgumentError, RobustExtWarning
from robust_ext.core.random import seeded_globals, stream
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.testing.networks import small_batch, small_network
from tests.attacks.problems import Lambda, Recorder, predicted, right_digits, rowwise_problem, target_of

in_norms = pytest.mark.parametrize("norm", NORMS)


def attack(parts, threat_model, watch=None, seed=0, targeted=False, **chosen):
    given = {"threat_model": threat_model, "generator": stream(seed), "watch": watch, "targeted": targeted}
    return APGD(**chosen).run(*parts, **given)


def attack_function(function, x, labels, threat_model, *, classes=2, **chosen):
    parts = target_of(Lambda(function), tuple(x.shape[1:]), classes, threat_model.bounds), x, labels
    return attack(parts, threat_model, **chosen)


def largest_gain(weights, x, threat_model):
    """The largest ``weights @ d`` that the threat model allows."""
    low, high = threat_model.bounds
    room = np.where(weights > 0, high - x, x - low)
    strength, epsilon = np.abs(weights), threat_model.epsilon
    if threat_model.norm == "l2":
        # Lagrange's dual: min over m > 0 of max_d of strength d - m (d^2 - epsilon^2) / 2, with d in its room.
        def dual(log):
            d = np.minimum(strength / math.exp(log), room)
            return float(strength @ d - math.exp(log) * (d @ d - epsilon**2) / 2)

        return float(minimize_scalar(dual, bounds=(-30, 30), method="bounded", options={"xatol": 1e-10}).fun)
    one = threat_model.norm == "l1"
    limits = [(0, value if one else min(value, epsilon)) for value in room]
    sums = {"A_ub": np.ones((1, len(x))), "b_ub": [epsilon]} if one else {}
    return -float(linprog(-strength, bounds=limits, method="highs", **sums).fun)


@pytest.mark.parametrize(("start", "bounds"), [("random", (0.0, 1.0)), ("input", (-2.5, 3.0))])
@pytest.mark.parametrize("loss", ["ce", "margin", "dlr", "targeted-margin"])
@pytest.mark.parametrize(
    ("norm", "epsilon"),
    [("linf", 0.03), ("linf", 0.6), ("l2", 0.5), ("l2", 2.0), ("l2", 5.0), ("l1", 0.3), ("l1", 3.0), ("l1", 20.0)],
)
def test_linear_classifiers_are_attacked_as_well_as_can_be(norm, epsilon, loss, start, bounds):
    width, generator = bounds[1] - bounds[0], torch.Generator().manual_seed(2)
    threat_model = ThreatModel(norm=norm, epsilon=epsilon * width, bounds=bounds)
    # Small weights, so that cross-entropy keeps its gradient.
    weights = torch.randn(90, generator=generator) / 10
    x = torch.rand(8, 90, generator=generator) * width + bounds[0]

    def linear(x):
        """The decision between two classes is open; DLR divides by what the third is below them."""
        logits = torch.stack([-(x @ weights), x @ weights, 0 * x[:, 0] - 50], 1)
        return logits if loss == "dlr" else logits[:, :2]

    chosen = {"classes": 3 if loss == "dlr" else 2, "targeted": loss == "targeted-margin"}
    labels = torch.full((8,), int(chosen["targeted"]))
    result = attack_function(linear, x, labels, threat_model, steps=100, loss=loss, start=start, **chosen)
    gains = ((result.best_points.double() - x.double()) * weights.double()).sum(1)
    best = [largest_gain(weights.double().numpy(), row.double().numpy(), threat_model) for row in x]
    # Float32 rounds the points, and for cross-entropy near its ends the loss as well.
    np.testing.assert_allclose(gains.numpy(), best, rtol=2e-3 if norm == "l2" or loss == "ce" else 2e-5)


def plainly(x, centre, curvature, epsilon, steps):
    """Algorithm 1 for linf on ``-sum(curvature (x - centre)^2)``, from x, with the best point's gradient kept."""

    def loss(point):
        return float(-(curvature * (point - centre) ** 2).sum())

    def nearest(point):
        return np.clip(np.clip(point, x - epsilon, x + epsilon), 0, 1)

    marks = [math.ceil(round(p * steps, 9)) for p in (0.22, 0.41, 0.57, 0.70, 0.80, 0.87, 0.93, 0.99)]
    path, size, rises, mark, halved = [x.copy()], 2 * epsilon, 0, 0, False
    point, before, best, best_at_mark = x.copy(), None, x.copy(), loss(x)
    for number in range(steps):
        if number in marks:
            few = rises < 0.75 * (number - mark)
            halved = few or (not halved and loss(best) == best_at_mark)
            if halved:
                size, point = size / 2, best.copy()
            rises, mark, best_at_mark = 0, number, loss(best)
        value = loss(point)
        following = nearest(point - size * np.sign(curvature * (point - centre)))
        if before is not None:
            following = nearest(point + 0.75 * (following - point) + 0.25 * (point - before))
        point, before = following, point
        rises += loss(point) > value
        best = point.copy() if loss(point) > loss(best) else best
        path.append(point.copy())
    return path


def plainly_l1(x, centre, curvature, epsilon, steps):
    """The sparse steps of l1 on the same loss, from x, where a step goes to the nearest point of ball and bounds."""

    def loss(point):
        return float(-(curvature * (point - centre) ** 2).sum())

    def nearest(point):
        return project(*(torch.tensor(part)[None] for part in (point, x)), ThreatModel(norm="l1", epsilon=epsilon))

    path, point, best, size, changed, kept = [x.copy()], x.copy(), x.copy(), epsilon, len(x), len(x) // 5
    for number in range(steps):
        if number and number % (steps // 25) == 0:
            before, changed = changed, int((np.abs(best - x) > 1e-6 * epsilon).sum())
            if changed < 0.95 * before:
                size, point = epsilon, best.copy()
            else:
                size = max(size / 1.5, epsilon / 10)
            kept = max(int(changed / 1.5), 1)
        gradient = -curvature * (point - centre)
        free = np.where(gradient > 0, 1 - point, point) > 1e-6
        order = np.argsort(-np.abs(gradient))
        while not free[order[:kept]].any():
            kept += 1
        step = np.zeros(len(x))
        step[order[:kept]] = np.sign(gradient[order[:kept]]) * size / free[order[:kept]].sum()
        point = nearest(point + step)[0].numpy()
        best = point if loss(point) > loss(best) else best
        path.append(point.copy())
    return path


@pytest.mark.parametrize(("norm", "epsilon", "path_of"), [("linf", 0.1, plainly), ("l1", 1.0, plainly_l1)])
def test_the_path_is_that_of_the_algorithm_written_down_plainly(norm, epsilon, path_of):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(4, 12, generator=generator)
    centre = (x + 0.2 * torch.randn(4, 12, generator=generator)).double()
    curvature = (torch.rand(12, generator=generator) + 0.5).double()

    def bowl(x):
        out = -(curvature * (x.double() - centre) ** 2).sum(1)
        return torch.stack([torch.zeros_like(out), out], 1)

    shown, chosen = [], {"steps": 50, "loss": "margin", "start": "input"}
    threat_model = ThreatModel(norm=norm, epsilon=epsilon)
    attack_function(bowl, x, torch.zeros(4).long(), threat_model, watch=shown.append, **chosen)
    assert len(shown) == 51
    last = []
    for row in range(4):
        path = path_of(x[row].double().numpy(), centre[row].numpy(), curvature.numpy(), epsilon, 50)
        for step, expected in zip(shown, path, strict=True):
            np.testing.assert_allclose(step.points[row].numpy(), expected, atol=2e-5)
        last.append(float(np.abs(path[-1] - path[-2]).max()))
    # The step sizes did shrink, so the checkpoints were put to the test.
    assert max(last) < epsilon


@pytest.mark.parametrize("loss", ["ce", "dlr"])
@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 0.1), ("l2", 0.7)])
def test_as_many_are_found_as_by_torchattacks(norm, epsilon, loss):
    torchattacks = pytest.importorskip("torchattacks")
    network, inputs, labels = right_digits(300)
    threat_model = ThreatModel(norm=norm, epsilon=epsilon)
    with seeded_globals(0):
        name = {"linf": "Linf", "l2": "L2"}[norm]
        theirs = torchattacks.APGD(network, norm=name, eps=epsilon, steps=50, loss=loss)(inputs, labels)
    # A seed that finds what six seeds find on the average.
    ours = attack((target_of(network, (1, 8, 8), 10), inputs, labels), threat_model, loss=loss, steps=50, seed=1)
    found, known = (
        int(((predicted(network, points) != labels) & threat_model.contains(points, inputs)).sum())
        for points in (ours.candidates, theirs)
    )
    assert 30 < known < 270
    # From seed to seed the numbers of both differ by up to about this many.
    assert found >= known - 6


@in_norms
def test_stopping_early_solves_the_same_rows_with_fewer_passes(norm):
    parts = rowwise_problem(rows=40)
    threat_model = ThreatModel(norm=norm, epsilon={"linf": 0.1, "l2": 0.4, "l1": 1.0}[norm])
    full, early = (attack(parts, threat_model, steps=20, restarts=2, stop_early=stop) for stop in (False, True))
    assert 0 < int(full.found.sum()) < 40
    assert torch.equal(full.found, early.found)
    assert early.passes.backward < full.passes.backward
    assert torch.equal(full.candidates[~full.found], early.candidates[~full.found])
    assert torch.equal(predicted(parts[0].module, early.candidates) != parts[2], early.found)


@in_norms
def test_rows_that_are_no_numbers_stay_and_harm_no_others(norm):
    target, inputs, labels = rowwise_problem(rows=4)

    def broken(x):
        out = target.module(x).clone()
        out[1] = out[1] + torch.nan
        # The root has an infinite gradient at 0, and infinity times 0 is no number.
        out[2] = out[2] + (x[2].flatten()[:1] * 0).sqrt()
        return out

    threat_model, chosen = ThreatModel(norm=norm, epsilon=0.3), {"start": "input", "steps": 10}
    with pytest.warns(RobustExtWarning, match="the gradient of some rows was zero"):
        result = attack((replace(target, module=Lambda(broken)), inputs, labels), threat_model, **chosen)
    # The input itself is a point at which nothing is robust.
    assert (result.candidates == inputs).flatten(1).all(1).tolist() == result.no_gradient.tolist() == [0, 1, 0, 0]
    plain = attack((target, inputs, labels), threat_model, **chosen)
    torch.testing.assert_close(plain.candidates[[0, 3]], result.candidates[[0, 3]])


@in_norms
def test_warm_runs_begin_at_the_given_points_within_the_ball(norm):
    target, inputs, labels = rowwise_problem(rows=4)
    threat_model, shown, again, given = ThreatModel(norm=norm, epsilon=0.05), [], [], 1 - inputs.round()
    warm = replace(target, starting_points=torch.stack([given, inputs], 1))
    attack((warm, inputs, labels), threat_model, steps=2, restarts=2, warm=True, watch=shown.append)
    first = shown[0].points
    assert bool(threat_model.contains(first, inputs).all())
    # As far towards the given points as the ball allows.
    torch.testing.assert_close(threat_model.distance(first, inputs), torch.full((4,), 0.05).double(), rtol=1e-5, atol=0)
    assert bool((((first - inputs) * (given - inputs)) >= 0).all())
    attack((target, inputs, labels), threat_model, steps=2, restarts=2, watch=again.append)
    # The restart draws what the first run of another attack draws.
    assert torch.equal(shown[3].points, again[0].points)
    with pytest.raises(InvalidArgumentError, match="starting_points"):
        attack((replace(target, starting_points=given), inputs, labels), threat_model, warm=True)


@settings(max_examples=80)
@given(
    norm=st.sampled_from(NORMS),
    bounds=st.sampled_from([(0.0, 1.0), (-2.5, 3.0)]),
    epsilon=st.sampled_from([1e-6, 0.05, 0.4, 1.5, 10.0]),
    reach=st.sampled_from([1e-7, 0.05, 0.5, 3.0, 1e6]),
    shape=st.sampled_from([(0, 3), (1, 1), (3, 2), (2, 6), (4, 3, 5, 5), (2, 3000)]),
    edge=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_no_allowed_point_is_nearer_and_those_of_float32_are_projected_once(
    norm, bounds, epsilon, reach, shape, edge, seed
):
    threat_model = ThreatModel(norm=norm, epsilon=epsilon, bounds=bounds)
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(shape, generator=generator, dtype=torch.float64)
    x = (x.round() if edge else x) * threat_model.width + bounds[0]
    point = x + reach * torch.randn(shape, generator=generator, dtype=torch.float64)
    ours = project(point, x, threat_model)
    assert bool((threat_model.distance(ours, x) <= epsilon * (1 + 1e-12) + 1e-15 * math.prod(shape)).all())
    # Seen from the nearest point of a convex set, none of its points lies any further towards the point outside.
    for one, found, middle in zip(*(part.flatten(1).numpy() for part in (point, ours, x)), strict=True):
        away = (one - found) / max(float(np.linalg.norm(one - found)), 1e-300)
        assert largest_gain(away, middle, threat_model) <= away @ (found - middle) + 1e-6 * min(epsilon, 1)
    point, x = point.float(), x.float()
    ours = project(point, x, threat_model)
    assert (ours.shape, ours.dtype) == (x.shape, torch.float32)
    assert bool(((ours >= bounds[0]) & (ours <= bounds[1])).all())
    assert bool(threat_model.contains(ours, x).all())
    again = project(ours, x, threat_model)
    assert bool((threat_model.distance(again, ours) <= 2 * threat_model.tolerance(max(x[:1].numel(), 1))).all())


SHAPE = (1, 4, 4)


class Shift(Attack):
    """Moves all values by a constant; returns NaN for the first row where ``nan``."""

    def __init__(self, by, *, nan=False):
        self.by, self.nan, self.name = by, nan, f"Shift({by:g})"
        self.traits = AttackTraits(batching="full", gradients=False)

    def search(self, target, inputs, labels, **_):
        moved = inputs + self.by
        moved[:1, ..., 0] += torch.nan if self.nan else 0
        return moved


def transfer(module, x, y, *, norm="linf", epsilon=0.15, classes=4, **chosen):
    target, ball = target_of(module, tuple(x.shape[1:]), classes), ThreatModel(norm=norm, epsilon=epsilon)
    return Transfer(**chosen).run(target, x, y, threat_model=ball, generator=torch.Generator().manual_seed(0))


def problem(count=8):
    network, x = small_network(SHAPE, 4), small_batch(count, SHAPE)
    return network, x, network(x).argmax(1)


@in_norms
def test_each_row_gets_the_worst_of_its_candidates_which_are_taken_back_into_the_ball_and_its_origin(norm):
    network, x, y = problem(24)
    threat_model, target = ThreatModel(norm=norm, epsilon={"linf": 0.15, "l2": 0.5, "l1": 2.0}[norm]), Recorder(network)
    shifts = [Shift(by, nan=by > 0.5) for by in (-0.6, -0.01, 0.01, 0.6)]
    both = {"a": network, "b": small_network(SHAPE, 4)}
    found = transfer(target, x, y, norm=norm, epsilon=threat_model.epsilon, surrogates=both, attacks=shifts)
    assert len(target.batches) == 8
    assert found.sources == tuple((name, shift.name) for name in ("a", "b") for shift in shifts)
    points, own = torch.stack(target.batches), nn.functional.one_hot(y, 4).bool()
    assert all(bool(threat_model.contains(one, x).all()) for one in points)
    assert 0 <= float(points.min()) <= float(points.max()) <= 1
    assert float(threat_model.distance(points[0], x).min()) > 0.99 * threat_model.epsilon
    # A row of which some value is no number stays.
    assert torch.equal(points[3][0], x[0])
    torch.testing.assert_close(points[2], (x + 0.01).clamp(0, 1))
    gained = torch.stack([network(one).masked_fill(own, -torch.inf).amax(1) - network(one)[own] for one in points])
    values, origin = gained[:4].detach().max(0)
    assert torch.equal(found.origin, origin)
    torch.testing.assert_close(found.losses, values.to(found.losses), rtol=1e-6, atol=1e-5)
    assert torch.equal(found.found, values > 0)
    assert torch.equal(found.candidates, points[origin, torch.arange(24)])
    assert torch.equal(found.fooled, gained > 0)
    assert 0 < int((values > 0).sum()) < 24
    assert len(found.origin.unique()) > 1


def test_misclassified_candidates_and_those_without_logits_go_before_others():
    network, x, y = problem()
    # Cross-entropy ranks the point of an unsure right class above that of a sure wrong one.
    near, far = torch.tensor([[0.0, 0.01, -50, -50], [0.01, 0.0, 0.0, 0.0]])
    two = Lambda(lambda x: torch.where(x.flatten(1)[:, :1] > 0.6, near, far))
    given = {"surrogates": {"a": network}, "attacks": [Shift(0.15), Shift(-0.15)], "loss": "ce"}
    found = transfer(two, torch.full_like(x, 0.5), y * 0, **given)
    assert found.origin.tolist() == [0] * 8
    assert bool(found.found.all())
    mute = Lambda(lambda x: x.new_full((len(x), 4), torch.nan))
    found = transfer(mute, x, y, surrogates={"a": network}, attacks=[Shift(0.1)])
    torch.testing.assert_close(found.candidates, (x + 0.1).clamp(0, 1))
    assert bool(found.found.all() and found.fooled.all())


def test_points_of_a_source_depend_on_no_other_and_on_no_train_mode():
    network, x, y = problem()
    training = small_network(SHAPE, 4).train()
    first, margin = APGD(steps=3), APGD(steps=3, loss="margin")
    alone, among = Recorder(network), Recorder(network)
    transfer(alone, x, y, surrogates={"b": small_network(SHAPE, 4)}, attacks=[first])
    transfer(among, x, y, surrogates={"a": network, "b": training}, attacks=[margin, first])
    assert torch.equal(alone.batches[0], among.batches[3])
    assert not torch.equal(alone.batches[0], among.batches[1])
    assert all(part.training for part in training.modules())
