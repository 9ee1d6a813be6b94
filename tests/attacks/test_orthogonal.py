"""Orthogonal and selective PGD: the geometry of their steps, and what they reach on linear problems."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_ext.attacks._common.objectives import cross_entropy, margin
from robust_ext.attacks.orthogonal import OrthogonalPGD, SelectivePGD, without_component
from robust_ext.core.threat import NORMS
from tests.attacks.defenses import linear_defense, small_defense
from tests.attacks.problems import attacked, watched


def gradients(problem, points, loss):
    """Which rows are misclassified, and the gradients of loss and score, ``(N, D)``."""
    x = points.clone().requires_grad_(True)
    logits, score = problem.defended.both(x)
    (of_loss,) = torch.autograd.grad(loss(logits, problem.labels).sum(), x, retain_graph=True)
    (of_score,) = torch.autograd.grad(score.sum(), x)
    return margin(logits, problem.labels).detach(), of_loss.flatten(1), of_score.flatten(1)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("confidence", [0.0, 0.3])
@pytest.mark.parametrize("loss", ["margin", "ce"])
def test_steps_leave_the_other_gradient_alone(norm, confidence, loss):
    problem = small_defense(12, norm=norm, epsilon=0.2 if norm == "linf" else 0.5)
    steps = watched(OrthogonalPGD(steps=40, loss=loss, confidence=confidence), problem)
    sides, orthogonal = set(), 0
    for step in steps:
        gained, of_loss, of_score = gradients(problem, step.points, margin if loss == "margin" else cross_entropy)
        way = step.gradient.flatten(1).double()
        done = (gained > 0) & (gained >= confidence)
        aim = torch.where(done[:, None], -of_score, of_loss).double()
        other = torch.where(done[:, None], of_loss, of_score).double()
        along = (way * other).sum(1).abs() / (way.norm(dim=1) * other.norm(dim=1))
        # Where nothing can move but along both at once, the step is the selective one.
        selective = (way == aim).all(1)
        assert bool(((along < 1e-5) | selective).all())
        assert bool(((way * aim).sum(1) > 0).all())
        sides |= set(done[~selective].tolist())
        orthogonal += int((~selective).sum())
    assert sides == {False, True}
    assert orthogonal >= 12 * 40 * 0.7


@pytest.mark.parametrize(("norm", "kind"), [*((norm, "l2") for norm in NORMS), ("linf", "sign")])
def test_selective_steps_at_the_detector_never_raise_its_score(norm, kind):
    epsilon = {"linf": 0.2, "l2": 0.5, "l1": 1.5}[norm]
    problem = small_defense(12, norm=norm, epsilon=epsilon)
    steps = watched(SelectivePGD(steps=60, step=kind), problem)
    aimed = 0
    for step, after in pairwise(steps):
        gained, of_loss, of_score = gradients(problem, step.points, margin)
        moved = (after.points - step.points).flatten(1).double()
        rise = torch.where(gained > 0, -(moved * of_score).sum(1), (moved * of_loss).sum(1))
        # What was moved has been projected onto the ball and the bounds.
        gradient = torch.where(gained > 0, of_score.norm(dim=1), of_loss.norm(dim=1))
        assert bool((rise >= -1e-6 * problem.threat_model.epsilon * gradient).all())
        aimed += int((gained > 0).sum())
    assert aimed > 100


rows = st.integers(1, 6)


@settings(deadline=None, max_examples=80)
@given(
    count=rows, values=st.integers(2, 40), seed=st.integers(0, 10**6), power=st.floats(-15, 15), near=st.floats(0, 5)
)
def test_what_is_left_of_a_gradient_is_orthogonal(count, values, seed, power, near):
    generator = torch.Generator().manual_seed(seed)
    other = torch.randn(count, values, generator=generator) * 10.0**power
    own = torch.randn(count, values, generator=generator) * 10.0 ** (-near)
    own = own + other / other.norm(dim=1, keepdim=True)
    left = without_component(own, other)
    a, b, c = own.double(), other.double(), left.double()
    along = (c * b).sum(1).abs() / (c.norm(dim=1) * b.norm(dim=1)).clamp_min(1e-300)
    assert bool((along < 1e-5).all())
    # By Gram-Schmidt in float64.
    expected = a - b * ((a * b).sum(1) / b.square().sum(1))[:, None]
    kept = c.norm(dim=1) > 0
    cosine = torch.nn.functional.cosine_similarity(c, expected, dim=1)
    assert bool((cosine[kept] > 1 - 1e-6).all())
    length = expected.norm(dim=1)[kept]
    torch.testing.assert_close(c.norm(dim=1)[kept], length, rtol=1e-3, atol=0)
    # Up to near = 5 what is left is ten times longer than what counts as parallel, short of chance.
    assert bool((kept | (expected.norm(dim=1) < 1e-5 * a.norm(dim=1))).all())


@pytest.mark.parametrize("unit", [2.0**-10, 2.0**10])
def test_steps_do_not_depend_on_the_units_of_the_gradients(unit):
    """Only where little is left of a gradient is the step the selective one, not where gradients are large."""
    own, other = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(0)).unbind()
    nothing = torch.zeros_like(own)
    limits = {"above": nothing.bool(), "below": nothing.bool(), "normal": nothing}
    way = OrthogonalPGD().direction(own, other, **limits)
    scaled = OrthogonalPGD().direction(own * unit, other * unit, **limits)
    assert torch.equal(scaled, way * unit)
    assert bool(((way * other).sum(1).abs() < 1e-5).all())


def test_parallel_and_zero_gradients():
    own = torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 0.0], [1.0, 2.0]])
    other = torch.tensor([[2.0, 4.0], [0.0, 0.0], [1.0, 1.0], [-3.0, -6.0]])
    left = without_component(own, other)
    assert torch.equal(left == 0, torch.tensor([[True, True], [False, False], [True, True], [True, True]]))
    torch.testing.assert_close(left[1], own[1])


def test_parallel_gradients_leave_the_selective_step():
    # One direction for both: only the thresholds differ.
    problem = linear_defense(150, 3, likeness=1.0)
    both = problem.room > 0.02 * problem.threat_model.epsilon
    found = problem.successes(attacked(OrthogonalPGD(steps=200), problem))
    assert int(both.sum()) >= 5
    assert bool(found[both].all())


@pytest.mark.parametrize("attack_class", [OrthogonalPGD, SelectivePGD])
def test_step_lengths(attack_class):
    problem = small_defense(6, epsilon=5.0)
    width = problem.inputs[0].numel()
    for kind, decay in (("l2", True), ("l2", False), ("sign", False)):
        made = attack_class(steps=10, rel_step_size=0.002, step=kind, decay=decay, start="input")
        steps = watched(made, problem)
        for step, after in pairwise(steps):
            free = ((after.points > 0) & (after.points < 1)).flatten(1).all(1)
            length = (after.points - step.points).flatten(1).norm(dim=1)[free]
            expected = 0.002 * problem.threat_model.epsilon * width**0.5 * (1 - step.number / 10 if decay else 1)
            torch.testing.assert_close(length, torch.full_like(length, expected), rtol=1e-4, atol=1e-7)
            assert bool(free.any())
