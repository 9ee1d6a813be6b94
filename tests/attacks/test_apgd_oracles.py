"""APGD against optima known from linear programs, the papers' algorithm written down plainly, and other libraries."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize_scalar

from robust_ext.attacks._common.apgd_steps import checkpoints
from robust_ext.attacks._common.rows import project
from robust_ext.attacks.apgd import APGD
from robust_ext.core.guard import frozen
from robust_ext.core.random import seeded_globals, stream
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from tests.attacks.problems import Lambda, predicted, target_of

# Of 300 rows: from seed to seed the numbers of all these attacks differ by up to about this many.
LUCK = 6


def run(made, module, x, labels, threat_model, **extras):
    """The result for targets of ten classes, or of as many as ``classes``."""
    target = target_of(module, tuple(x.shape[1:]), extras.pop("classes", 10), threat_model.bounds)
    generator = stream(extras.pop("seed", 0))
    return made.run(target, x, labels, threat_model=threat_model, generator=generator, **extras)


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
@pytest.mark.parametrize("loss", ["ce", "margin"])
@pytest.mark.parametrize(
    ("norm", "epsilon"),
    [("linf", 0.03), ("linf", 0.6), ("l2", 0.5), ("l2", 2.0), ("l2", 5.0), ("l1", 0.3), ("l1", 3.0), ("l1", 20.0)],
)
def test_linear_classifiers_are_attacked_as_well_as_can_be(norm, epsilon, loss, start, bounds):
    width = bounds[1] - bounds[0]
    threat_model = ThreatModel(norm=norm, epsilon=epsilon * width, bounds=bounds)
    generator = torch.Generator().manual_seed(2)
    # Small weights, so that cross-entropy keeps its gradient.
    weights = torch.randn(90, generator=generator) / 10
    x = torch.rand(8, 90, generator=generator) * width + bounds[0]
    linear = Lambda(lambda x: torch.stack([-(x @ weights), x @ weights], 1))
    made = APGD(steps=100, loss=loss, start=start)
    result = run(made, linear, x, torch.zeros(8).long(), threat_model, classes=2)
    gains = ((result.best_points.double() - x.double()) * weights.double()).sum(1)
    best = [largest_gain(weights.double().numpy(), row.double().numpy(), threat_model) for row in x]
    # Float32 rounds the points, and for cross-entropy near its ends the loss as well.
    np.testing.assert_allclose(gains.numpy(), best, rtol=2e-3 if norm == "l2" or loss == "ce" else 2e-5)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("loss", ["ce", "margin", "dlr", "targeted-dlr"])
def test_targets_are_reached_exactly_where_a_linear_program_reaches_them(norm, loss):
    """Four classes, of which two have constant logits far below: only the decision between the others is open."""
    generator = torch.Generator().manual_seed(4)
    weights = torch.randn(40, generator=generator)
    x = torch.rand(30, 40, generator=generator)

    def logits(x):
        out = x @ weights - 0.5
        low = torch.full_like(out, -50.0)
        return torch.stack([torch.zeros_like(out), out, low, low - 1], 1)

    module = Lambda(logits)
    decided = module(x).argmax(1)
    threat_model = ThreatModel(norm=norm, epsilon={"linf": 0.06, "l2": 0.4, "l1": 1.2}[norm])
    expected = []
    for row, label in zip(x, decided, strict=True):
        sign = -1 if label == 1 else 1
        gain = largest_gain(sign * weights.double().numpy(), row.double().numpy(), threat_model)
        expected.append(gain > abs(float(row.double() @ weights.double() - 0.5)))
    assert 3 < sum(expected) < 27
    for targeted in (False, True):
        labels = 1 - decided if targeted else decided
        result = run(APGD(steps=60, loss=loss), module, x, labels, threat_model, classes=4, targeted=targeted)
        assert result.found.tolist() == expected


def test_checkpoints_follow_the_rule_of_the_paper():
    for steps in (1, 5, 10, 50, 100, 137, 1000):
        fractions = [0.0, 0.22]
        while fractions[-1] < 1:
            fractions.append(fractions[-1] + max(fractions[-1] - fractions[-2] - 0.03, 0.06))
        expected = {math.ceil(round(fraction * steps, 9)) for fraction in fractions[1:] if round(fraction, 9) < 1}
        assert set(checkpoints(steps)) == expected


def plainly(x, centre, curvature, epsilon, steps):
    """Algorithm 1 for linf on ``-sum(curvature (x - centre)^2)``, from x, with the best point's gradient kept."""

    def loss(point):
        return float(-(curvature * (point - centre) ** 2).sum())

    def nearest(point):
        return np.clip(np.clip(point, x - epsilon, x + epsilon), 0, 1)

    marks = [math.ceil(round(p * steps, 9)) for p in (0.22, 0.41, 0.57, 0.70, 0.80, 0.87, 0.93, 0.99)]
    path, size, rises, mark, halved = [x.copy()], 2 * epsilon, 0, 0, False
    point, before, best = x.copy(), None, x.copy()
    value, best_at_mark = loss(point), loss(point)
    for number in range(steps):
        if number in marks:
            few = rises < 0.75 * (number - mark)
            stuck = not halved and loss(best) == best_at_mark
            halved = few or stuck
            if halved:
                size, point = size / 2, best.copy()
                value = loss(best)
            rises, mark, best_at_mark = 0, number, loss(best)
        upward = nearest(point - size * np.sign(curvature * (point - centre)))
        following = upward
        if before is not None:
            following = nearest(point + 0.75 * (upward - point) + 0.25 * (point - before))
        point, before = following, point
        rises += loss(point) > value
        value = loss(point)
        if value > loss(best):
            best = point.copy()
        path.append(point.copy())
    return path


def plainly_l1(x, centre, curvature, epsilon, steps):
    """The sparse steps of l1 on the same loss, from x, where a step goes to the nearest point of ball and bounds."""

    def loss(point):
        return float(-(curvature * (point - centre) ** 2).sum())

    def nearest(point):
        ball = ThreatModel(norm="l1", epsilon=epsilon)
        return project(torch.tensor(point)[None], torch.tensor(x)[None], ball)[0].numpy()

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
        point = nearest(point + step)
        best = point if loss(point) > loss(best) else best
        path.append(point.copy())
    return path


@pytest.mark.parametrize(("norm", "epsilon", "path_of"), [("linf", 0.1, plainly), ("l1", 1.0, plainly_l1)])
def test_the_path_is_that_of_the_algorithm_written_down_plainly(norm, epsilon, path_of):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(4, 12, generator=generator)
    centre = x + 0.2 * torch.randn(4, 12, generator=generator)
    curvature = torch.rand(12, generator=generator) + 0.5

    def bowl(x):
        out = -(curvature.double() * (x.double() - centre.double()) ** 2).sum(1)
        return torch.stack([torch.zeros_like(out), out], 1)

    shown = []
    made, threat_model = APGD(steps=50, loss="margin", start="input"), ThreatModel(norm=norm, epsilon=epsilon)
    run(made, Lambda(bowl), x, torch.zeros(4).long(), threat_model, classes=2, watch=shown.append)
    assert len(shown) == 51
    sizes = set()
    for row in range(4):
        path = path_of(x[row].double().numpy(), centre[row].double().numpy(), curvature.double().numpy(), epsilon, 50)
        for step, expected in zip(shown, path, strict=True):
            np.testing.assert_allclose(step.points[row].numpy(), expected, atol=2e-5)
        sizes.add(round(float(np.abs(path[-1] - path[-2]).max()), 3))
    # The step sizes did shrink, so the checkpoints were put to the test.
    assert max(sizes) < epsilon


@pytest.fixture(scope="module")
def digits():
    pytest.importorskip("sklearn")
    network = digits_network()
    inputs, _ = load_dataset("digits").take(range(300))
    return network, inputs, predicted(network, inputs)


def left(network, candidates, inputs, labels, threat_model):
    found = (predicted(network, candidates) != labels) & threat_model.contains(candidates, inputs)
    return int((~found).sum())


def ours(digits, threat_model, loss):
    with frozen(digits[0]):
        # Of a seed with what six have on the average: 160 with the infinity norm and DLR, where they lie in 157 to 163.
        result = run(APGD(steps=50, loss=loss), *digits, threat_model, seed=1)
    return left(digits[0], result.candidates, *digits[1:], threat_model)


@pytest.mark.parametrize("loss", ["ce", "dlr"])
@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 0.1), ("l2", 0.7)])
def test_as_many_are_found_as_by_torchattacks(digits, norm, epsilon, loss):
    torchattacks = pytest.importorskip("torchattacks")
    network, inputs, labels = digits
    threat_model = ThreatModel(norm=norm, epsilon=epsilon)
    name = {"linf": "Linf", "l2": "L2"}[norm]
    with seeded_globals(0):
        theirs = torchattacks.APGD(network, norm=name, eps=epsilon, steps=50, loss=loss)(inputs, labels)
    count = left(network, theirs, inputs, labels, threat_model)
    assert 30 < count < 270
    assert ours(digits, threat_model, loss) <= count + LUCK
