import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from robust_ext.adapters.art.objectives import ObjectiveLoss, objective_estimator
from robust_ext.core.errors import InvalidArgumentError
from tests.adapters.hosts import EPSILONS, OBJECTIVES, ORDERS, art
from tests.adapters.hosts import art_attacks as attacks
from tests.adapters.hosts import art_problem as problem
from tests.adapters.objectives_on_paper import EachBounds, EachName, Smooth, slopes, slopes_by_inputs

evasion = art.attacks.evasion


def climb(estimator, **settings):
    """ART's own projected gradient descent."""
    chosen = {"eps": 0.1, "eps_step": 0.02, "verbose": False, **settings}
    return evasion.ProjectedGradientDescent(estimator, **chosen)


ROWS = st.lists(st.lists(st.floats(-40, 40, width=32), min_size=3, max_size=3), min_size=2, max_size=8).filter(
    lambda rows: len(rows) % 2 == 0
)


@given(ROWS, st.sampled_from(OBJECTIVES))
def test_gradients_are_the_derivatives_on_paper(rows, name):
    table = torch.tensor(rows, dtype=torch.float64)
    logits, natural = table[: len(rows) // 2].requires_grad_(), table[len(rows) // 2 :].detach()
    labels = torch.arange(len(logits)) % 3
    loss = ObjectiveLoss(objective=name, natural=natural)(logits, nn.functional.one_hot(labels, 3).float())
    assert loss.shape == ()
    (gradient,) = torch.autograd.grad(loss, logits)
    apart = (natural.softmax(1) - logits.softmax(1)).abs().amax(1) > 1e-6
    expected = slopes(name, logits.detach(), natural, labels)
    torch.testing.assert_close(gradient[apart], expected[apart], rtol=1e-5, atol=1e-9)
    assert bool(torch.isfinite(gradient).all())


@EachName
@EachBounds
def test_the_estimators_gradients_are_the_derivatives_on_paper(name, bounds):
    network, estimator, x, y = problem(bounds, network=Smooth())
    bound = objective_estimator(estimator, name, x)
    points = np.clip(x + np.float32(0.1) * np.sin(np.arange(96, dtype=np.float32)).reshape(x.shape), *bounds)
    tensors = (torch.from_numpy(values) for values in (points, x, y))
    expected = slopes_by_inputs(name, network, *tensors).numpy()
    for labels in (y, np.eye(4, dtype=np.float32)[y], y[:, None].astype(np.float32)):
        found = bound.loss_gradient(points, labels)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
    assert np.abs(expected).max() > 1e-2


@EachName
def test_losses_of_rows_are_not_reduced_where_art_asks_for_them(name):
    _, estimator, x, y = problem()
    bound = objective_estimator(estimator, name, x)
    noisy = np.clip(x + 0.1, 0, 1).astype(np.float32)
    rows = bound.compute_loss(noisy, y)
    assert rows.shape == (6,)
    np.testing.assert_allclose(bound.compute_loss(noisy, y, reduction="sum"), rows.sum(), rtol=1e-5)
    np.testing.assert_allclose(bound.compute_loss(noisy, y, reduction="mean"), rows.mean(), rtol=1e-5)
    assert bound.loss.reduction == "sum"
    p, q = (torch.from_numpy(estimator.predict(points)).double().softmax(1).numpy() for points in (x, noisy))
    expected = {
        "ace": -np.log(q[np.arange(6), y]),
        "kl": (p * np.log(p / q)).sum(1),
        "gini": 1 - np.sqrt((q**2).sum(1)),
        "fisher-rao": 2 * np.arccos(np.sqrt(p * q).sum(1)),
    }
    np.testing.assert_allclose(rows, expected[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@EachName
@EachBounds
def test_arts_pgd_is_a_loop_with_the_derivatives_on_paper(norm, name, bounds):
    network, estimator, x, y = problem(bounds, network=Smooth())
    epsilon = EPSILONS[norm] * (bounds[1] - bounds[0])
    bound = objective_estimator(estimator, name, x)
    attack = climb(bound, norm=ORDERS[norm], eps=epsilon, eps_step=0.3 * epsilon, max_iter=8, num_random_init=1)
    np.random.seed(4)
    found = attack.generate(x, np.eye(4)[y])
    np.random.seed(4)
    offsets = art.utils.random_sphere(6, 16, epsilon, ORDERS[norm]).reshape(x.shape).astype(np.float32)
    clean, labels = torch.from_numpy(x), torch.from_numpy(y)
    points = (clean + torch.from_numpy(offsets)).clamp(*bounds)
    for _ in range(8):
        gradient = slopes_by_inputs(name, network, points, clean, labels)
        step = gradient.sign()
        if norm == "l2":
            step = gradient / gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        offset = (points + 0.3 * epsilon * step).clamp(*bounds) - clean
        if norm == "l2":
            offset = offset * (epsilon / offset.flatten(1).norm(dim=1)).clamp_max(1).view(-1, 1, 1, 1)
        points = clean + (offset.clamp(-epsilon, epsilon) if norm == "linf" else offset)
    np.testing.assert_allclose(found, points.numpy(), rtol=0, atol=2e-5)
    assert np.abs(found - x).max() > 0.05


def test_with_cross_entropy_arts_attacks_are_themselves():
    _, estimator, x, y = problem()
    for attack_class, chosen in (
        (evasion.ProjectedGradientDescent, {"max_iter": 7, "eps_step": 0.03, "num_random_init": 1}),
        (evasion.FastGradientMethod, {}),
        (evasion.MomentumIterativeMethod, {"max_iter": 4, "eps_step": 0.03}),
    ):
        both = []
        for host in (estimator, objective_estimator(estimator, "ace")):
            np.random.seed(0)
            quiet = {} if attack_class is evasion.FastGradientMethod else {"verbose": False}
            both.append(attack_class(host, eps=0.1, **chosen, **quiet).generate(x, y))
        assert np.array_equal(*both)
        assert not np.array_equal(both[0], x)


@pytest.mark.parametrize("name", ["kl", "fisher-rao"])
def test_a_batch_that_is_not_the_bound_one_is_refused(name):
    _, estimator, x, y = problem(rows=40)
    bound = objective_estimator(estimator, name, x)
    small = climb(bound, max_iter=2)
    with pytest.raises(InvalidArgumentError, match=r"logits: got shape \(32, 4\).*\(40, 4\).*batch_size"):
        small.generate(x, y)
    small.set_params(batch_size=40)
    whole = climb(bound, max_iter=2, batch_size=40, num_random_init=1)
    assert np.abs(whole.generate(x, y) - x).max() > 0.01


@pytest.mark.parametrize("name", ["ace", "gini"])
def test_from_the_input_arts_pgd_ends_where_this_projects_ends(name):
    _, estimator, x, y = problem()
    ways = {"eps": 0.1, "eps_step": 0.02, "max_iter": 9, "verbose": False}
    own = attacks.ObjectivePGD(estimator, objective=name, start="input", **ways)
    host = climb(objective_estimator(estimator, name), batch_size=2, **ways)
    np.testing.assert_allclose(host.generate(x, y), own.generate(x, y), rtol=0, atol=1e-6)
