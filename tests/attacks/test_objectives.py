"""Losses against the formulas in numpy and finite differences; the ascents of MEAD against Foolbox's."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import logsumexp

from robust_ext.attacks._common.objectives import DIVERGENCES, OBJECTIVES, cross_entropy, fisher_rao, gini
from robust_ext.attacks.carlini_linf import CarliniWagnerLinf
from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.core.criteria import AIMED, MISCLASSIFICATION
from robust_ext.core.errors import AttackRefusedError
from robust_ext.core.random import stream
from robust_ext.core.threat import ThreatModel
from tests.attacks import problems
from tests.attacks.problems import MADE, Linear, Rowwise, images, predicted, rowwise_problem


def problem(seed, rows=6, classes=5, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(classes, (rows,), generator=generator)


def by_loop(name, z, y, t=-1):
    others = np.delete(z, y)
    top = np.sort(z)[::-1]
    if name == "ce":
        return float(logsumexp(z) - z[y])
    if name == "dlr":
        return float((others.max() - z[y]) / (top[0] - top[2]))
    aim = others.max() if t < 0 else z[t]
    if name.endswith("margin"):
        return float(aim - z[y])
    return float((aim - z[y]) / (top[0] - 0.5 * (top[2] + top[3])))


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), classes=st.integers(4, 12), scale=st.sampled_from([1e-3, 1.0, 50.0]))
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_values_are_those_of_the_formulas(name, seed, classes, scale):
    logits, labels = problem(seed, classes=classes, scale=scale)
    expected = np.array([by_loop(name, z, int(y)) for z, y in zip(logits.numpy(), labels, strict=True)])
    losses = OBJECTIVES[name].loss, OBJECTIVES[name].of_kind(AIMED)
    for loss, sign in zip(losses, (1, -1), strict=True):
        np.testing.assert_allclose(loss(logits, labels).numpy(), sign * expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [*OBJECTIVES, *DIVERGENCES])
@pytest.mark.parametrize("targeted", [False, True])
def test_gradients_are_those_of_finite_differences(name, targeted):
    logits, labels = problem(5, rows=12)
    natural, _ = problem(6, rows=12)

    def loss(z):
        if name in DIVERGENCES:
            return DIVERGENCES[name].value(z, natural, labels)
        return OBJECTIVES[name].of_kind(AIMED if targeted else MISCLASSIFICATION)(z, labels)

    assert torch.autograd.gradcheck(loss, logits.requires_grad_(True))


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_equal_logits_and_the_fewest_classes(name):
    objective, labels = OBJECTIVES[name], torch.tensor([0, 1])
    logits = torch.zeros(2, 5, requires_grad=True)
    value = objective.loss(logits, labels)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert bool(torch.isfinite(value).all() and torch.isfinite(gradient).all())
    assert objective.minimum_classes == {"dlr": 3, "targeted-dlr": 4}.get(name, 2)
    assert objective.loss(torch.randn(2, objective.minimum_classes), labels).shape == (2,)


@given(p=st.lists(st.floats(1e-3, 1), min_size=2, max_size=6), q=st.lists(st.floats(1e-3, 1), min_size=6, max_size=6))
def test_values_are_those_of_the_paper(p, q):
    of_p, of_q = (np.array(one[: len(p)]) / sum(one[: len(p)]) for one in (p, q))
    # What is added to the logits of a row changes nothing.
    natural, adversarial = (torch.tensor(one[None]).log() + 3.0 for one in (of_p, of_q))
    names, labels = ("kl", "gini", "fisher-rao"), torch.zeros(1, dtype=torch.int64)
    found = [float(DIVERGENCES[name].value(adversarial, natural, labels)) for name in names]
    assert torch.equal(DIVERGENCES["ace"].value(adversarial, natural, labels), cross_entropy(adversarial, labels))
    # The cosine loses half of the digits near 1: an error of 1e-15 is one of 4e-8 in the angle.
    cosine = min(float(np.sqrt(of_p * of_q).sum()), 1.0)
    paper = [float((of_p * np.log(of_p / of_q)).sum()), 1 - float(np.linalg.norm(of_q)), 2 * math.acos(cosine)]
    np.testing.assert_allclose(found, paper, rtol=1e-9, atol=2e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("name", list(DIVERGENCES))
def test_nothing_is_no_number(name, scale, dtype):
    """10,000 rows far apart, equal and nearly equal, whose probabilities underflow at the larger scales."""
    natural, labels = problem(1, rows=10_000, scale=scale)
    natural, apart = natural.to(dtype), problem(2, rows=10_000, scale=scale)[0].to(dtype)
    for points in (apart, natural, natural * (1 + 2e-7), natural + 1e-6):
        logits = points.clone().requires_grad_(True)
        value = DIVERGENCES[name].value(logits, natural, labels)
        (gradient,) = torch.autograd.grad(value.sum(), logits)
        assert bool(value.isfinite().all())
        assert bool(gradient.isfinite().all())
        assert float(value.detach().min()) > -1e-5
        if name == "fisher-rao":
            assert float(value.detach().max()) <= math.pi + 1e-5


@pytest.mark.parametrize("distance", [1e-3, 1e-6, 1e-9])
def test_fisher_rao_is_exact_for_near_distributions(distance):
    """Nearby it is the length in Fisher's metric, ``(sum dp^2 / p)^.5``, of which the cosine keeps no digit."""
    p = torch.tensor([[0.1, 0.2, 0.7]], dtype=torch.float64)
    # For logits z + d: dp = p (d - p.d), so the length is the standard deviation of d under p.
    step = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64) * distance
    length = float(((p * step.square()).sum() - (p * step).sum().square()).sqrt())
    found = float(fisher_rao(p.log() + step, p.log()))
    assert found == pytest.approx(length, rel=max(distance, 1e-6))


@pytest.mark.parametrize("gap", [1.0, 20.0, 60.0])
def test_gini_keeps_its_gradient_where_the_largest_probability_rounds_to_one(gap):
    values, slopes = [], []
    for dtype in (torch.float32, torch.float64):
        logits = torch.tensor([[gap, 0.0, -1.0]], dtype=dtype, requires_grad=True)
        values.append(gini(logits).sum())
        slopes.append(torch.autograd.grad(values[-1], logits)[0].double().numpy())
    values = [float(value.detach()) for value in values]
    # In float64, to first order where the norm itself is lost: 1 - ||q|| = sum of the other probabilities.
    assert values[0] == pytest.approx(values[1], rel=1e-4)
    if gap >= 20:
        assert values[1] == pytest.approx(math.exp(-gap) + math.exp(-gap - 1), rel=1e-4)
    np.testing.assert_allclose(*slopes, rtol=1e-4)
    assert abs(slopes[0][0, 0]) > 0


def attack(parts, threat_model, **chosen):
    given = {name: chosen.pop(name) for name in ("targeted", "watch") if name in chosen}
    return ObjectivePGD(**chosen).search(*parts, threat_model=threat_model, generator=stream(0), **given)


def foolbox_points(name, parts, epsilon, **chosen):
    foolbox = pytest.importorskip("foolbox")
    target, inputs, labels = parts
    model = foolbox.PyTorchModel(target.module, bounds=(0, 1), device="cpu")
    return getattr(foolbox.attacks, name)(random_start=False, **chosen).run(model, inputs, labels, epsilon=epsilon)


@pytest.mark.parametrize(
    ("norm", "name", "epsilon", "step"),
    [
        ("linf", "LinfPGD", 0.3, 0.02),
        ("linf", "LinfBasicIterativeAttack", 0.05, 0.01),
        ("l2", "L2PGD", 0.9, 0.05),
        ("l1", "L1PGD", 3.0, 0.3),
    ],
)
@pytest.mark.parametrize("algorithm", ["pgd", "bim"])
def test_cross_entropy_ascends_as_in_foolbox(norm, name, epsilon, step, algorithm):
    parts = rowwise_problem(rows=8)
    once = foolbox_points("LinfFastGradientAttack", parts, epsilon)
    fgsm = attack(parts, ThreatModel(norm="linf", epsilon=epsilon), algorithm="fgsm")
    torch.testing.assert_close(fgsm, once, rtol=0, atol=1e-7)
    theirs = foolbox_points(name, parts, epsilon, steps=40, abs_stepsize=step)
    chosen = {"algorithm": algorithm, "steps": 40, "step_size": step, "start": "input", "projection": "scaled"}
    threat_model = ThreatModel(norm=norm, epsilon=epsilon)
    ours = attack(parts, threat_model, **chosen)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-6)
    assert bool(((ours == 0) | (ours == 1)).any())
    if norm == "linf":
        assert torch.equal(attack(parts, threat_model, **{**chosen, "projection": "nearest"}), ours)


def test_best_is_the_misclassified_point_of_highest_objective():
    (target, inputs, labels), seen = rowwise_problem(rows=20), []
    # Gini leads to undecided points, on either side of the boundary.
    threat_model, chosen = ThreatModel(norm="linf", epsilon=0.12), {"objective": "gini", "steps": 25, "step_size": 0.05}
    last = attack((target, inputs, labels), threat_model, watch=seen.append, **chosen)
    best = attack((target, inputs, labels), threat_model, best=True, **chosen)
    with torch.no_grad():
        tried = torch.stack([*[step.points for step in seen], last])
        logits = torch.stack([target.module(points) for points in tried])
    values = torch.stack([DIVERGENCES["gini"].value(each, each, labels) for each in logits])
    values = values.where(logits.argmax(2) != labels, -torch.inf)
    found = values.amax(0) > -torch.inf
    expected = torch.where(found.view(-1, 1, 1, 1), tried[values.argmax(0), torch.arange(20)], last)
    assert torch.equal(best, expected)
    assert 0 < int(found.sum()) < 20
    assert int((predicted(target.module, last) != labels).sum()) < int(found.sum())


def test_aims_lower_cross_entropy_and_the_others_have_none():
    target, inputs, labels = rowwise_problem()
    aims, threat_model = (labels + 1) % 5, ThreatModel(norm="linf", epsilon=0.5)
    found = attack((target, inputs, aims), threat_model, targeted=True, best=True)
    assert int((predicted(target.module, found) == aims).sum()) >= 4
    for name in list(DIVERGENCES)[1:]:
        with pytest.raises(AttackRefusedError, match="choose objective='ace'"):
            attack((target, inputs, aims), threat_model, objective=name, targeted=True)


@pytest.mark.parametrize(
    ("norm", "algorithm", "epsilon", "expected"),
    [
        ("l1", "pgd", 40, (100, 4.0)),
        ("linf", "pgd", 0.5, (100, 0.01)),
        ("linf", "bim", 0.25, (80, 0.01)),
        ("linf", "fgsm", 0.25, (1, 0.25)),
    ],
)
def test_defaults_are_the_papers(norm, algorithm, epsilon, expected):
    wide = ThreatModel(norm=norm, epsilon=256 * epsilon, bounds=(0.0, 256.0))
    threat_model, made = ThreatModel(norm=norm, epsilon=epsilon), ObjectivePGD(algorithm=algorithm)
    assert (made.steps_for(threat_model), made.step_size_for(threat_model)) == expected
    assert made.step_size_for(wide) == 256 * expected[1] or norm != "linf"


# Few, short searches, for what does not hang on how near the points are.
SHORT = MADE["CarliniWagnerLinf"].to_dict()
# Small steps and finely spaced limits, for how near they come; few constants, as that takes long.
CLOSE = {**SHORT, "steps": 100, "learning_rate": 0.005, "initial_const": 0.02, "decrease_factor": 0.95}


def network_of(values, bounds=(0.0, 1.0)):
    return Rowwise(values, 4, bounds, gain=3, centre=0.5)


def search(module, x, y, *, bounds=(0.0, 1.0), classes=4, targeted=False, **chosen):
    threat_model = ThreatModel(norm="linf", epsilon=0.1, bounds=bounds)
    given = {"module": module, "classes": classes, "targeted": targeted}
    return problems.search(CarliniWagnerLinf(**chosen), x, y, threat_model, **given)


def distances(out, x):
    return (out.double() - x.double()).abs().flatten(1).amax(1)


@pytest.mark.parametrize(("low", "width"), [(0.0, 1.0), (-3.0, 8.0)])
@pytest.mark.parametrize("label", [0, 1])
def test_distance_to_a_plane_from_points_at_the_bounds_is_the_closed_form(low, width, label):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(1, 4, 5, generator=generator, dtype=torch.float64) * (2 * label - 1)
    x = torch.randint(0, 2, (3, 1, 4, 5), generator=generator).float() * width + low
    along = (x.double() * weight).flatten(1).sum(1)
    module, y = Linear(weight, float(along.min()) - 1.5 * width), torch.full((3,), label)
    if not label:
        module.threshold = float(along.max()) + 1.5 * width
    found = search(module, x, y, bounds=(low, low + width), classes=2, **CLOSE).out
    assert bool((predicted(module, found) != y).all())
    for row in range(3):
        # Values with positive weights can go down, the others up: the smallest move of them all that is enough.
        room = torch.where((weight > 0) == bool(label), x[row].double() - low, low + width - x[row].double())
        margin = abs(float(along[row]) - module.threshold)
        nearest = brentq(lambda r, room=room, m=margin: m - float((weight.abs() * room.clamp_max(r)).sum()), 0, width)
        assert nearest * (1 - 1e-5) <= float(distances(found, x)[row]) <= nearest * 1.06


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    bounds=st.sampled_from([(0.0, 1.0), (-3.0, 1.5), (0.1, 0.7)]),
    targeted=st.booleans(),
    steps=st.integers(1, 12),
    seed=st.integers(0, 99),
)
@settings(max_examples=8)
def test_returns_the_nearest_that_it_queried_and_never_leaves_the_bounds(shape, bounds, targeted, steps, seed):
    x, module = images(3, shape, bounds, seed), network_of(math.prod(shape), bounds)
    x.view(3, -1)[0, 0], x.view(3, -1)[1, 0] = lowest, highest = torch.tensor(bounds)
    y, before, chosen = module(x).argsort(1)[:, 2 if targeted else 3], x.clone(), {**SHORT, "steps": steps}
    out, passes, seen = search(module, x, y, bounds=bounds, targeted=targeted, **chosen)
    assert torch.equal(x, before)
    assert passes.forward == passes.backward <= 3 * len(seen)
    assert len(seen) <= seen[0].total == CarliniWagnerLinf(**chosen).most_steps
    for row in range(3):
        kept, nearest = x[row], math.inf
        for step in seen:
            point = step.points[row]
            assert lowest <= point.min() <= point.max() <= highest
            won = (int(predicted(module, point[None])) == int(y[row])) == targeted
            distance = float((point - x[row]).abs().max())
            if won and distance < nearest:
                kept, nearest = point, distance
        assert torch.equal(out[row], kept)


@pytest.mark.parametrize("targeted", [False, True])
def test_confidence_is_the_least_margin(targeted):
    x, module = images(4, (4, 4)), network_of(16)
    y = module(x).argsort(1)[:, 2 if targeted else 3]
    near = search(module, x, y, targeted=targeted, **SHORT).out
    # Finished rows are left out.
    assert module.sizes[1:] == sorted(module.sizes[1:], reverse=True)
    assert module.sizes[-1] < 4
    assert bool(((predicted(module, near) == y) == targeted).all())
    far = search(module, x, y, targeted=targeted, **{**SHORT, "confidence": 0.7}).out
    for row, logits in enumerate(module(far).tolist()):
        own = logits.pop(int(y[row]))
        assert (own - max(logits) if targeted else max(logits) - own) >= 0.7 - 1e-6
    assert bool((distances(far, x) > distances(near, x)).all())
