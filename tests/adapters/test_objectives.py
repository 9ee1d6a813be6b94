"""MEAD's objectives as losses of Foolbox's and ART's own attacks, against derivatives on paper."""

import eagerpy as ep
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from robust_ext.adapters.art.objectives import ObjectiveLoss, objective_estimator
from robust_ext.adapters.foolbox.objectives import with_objective
from robust_ext.core.errors import InvalidArgumentError
from tests.adapters.hosts import EPSILONS, OBJECTIVES, ORDERS, EachNorm, art, foolbox, problem

evasion = art.attacks.evasion
EachName = pytest.mark.parametrize("name", OBJECTIVES)
EachBounds = pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 2.0)])
PGD = {"linf": foolbox.attacks.LinfPGD, "l2": foolbox.attacks.L2PGD, "l1": foolbox.attacks.L1PGD}


class Smooth(nn.Module):
    """A smooth network of 16 values that records its queries."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(16, 12, generator=generator) / 4)
        self.last = nn.Parameter(torch.randn(12, 4, generator=generator))
        self.queries = []

    def forward(self, x):
        self.queries.append(x.detach().clone())
        return (x.flatten(1) @ self.first).tanh() @ self.last


def slopes(name, logits, natural, labels):
    """Derivatives of the objectives by the logits, worked out on paper."""
    p, q = natural.softmax(1), logits.softmax(1)
    if name == "ace":
        return q - nn.functional.one_hot(labels, q.shape[1])
    if name == "kl":
        return q - p
    if name == "gini":
        length = q.norm(dim=1, keepdim=True)
        return q * length - q.square() / length
    roots = (p * q).sqrt()
    cosine = roots.sum(1, keepdim=True)
    # 1 - cosine^2 as a sum of squares, which does not cancel.
    half = (p.sqrt() - q.sqrt()).square().sum(1, keepdim=True) / 2
    return (q * cosine - roots) / (half * (2 - half)).sqrt()


def slopes_by_inputs(name, network, points, x, labels):
    """The same by the points ``(N, ...)``, with the inputs ``x`` as the natural ones."""
    points = points.detach().requires_grad_()
    logits = network(points)
    weights = slopes(name, logits.detach(), network(x).detach(), labels)
    (gradient,) = torch.autograd.grad((weights * logits).sum(), points)
    return gradient


@pytest.mark.parametrize("name", ["LinfPGD", "L2PGD", "L1PGD", "L2AdamPGD", "FGSM", "MIFGSM", "SparseL1DescentAttack"])
def test_with_cross_entropy_foolboxes_attacks_are_themselves(name):
    at, kind = problem(), getattr(foolbox.attacks, name)
    aimed = [foolbox.criteria.TargetedMisclassification((at.y + 1) % 4)] * (name != "FGSM")
    for criterion in (at.y, *aimed):
        both = []
        for one in (kind, with_objective(kind, "ace")):
            torch.manual_seed(0)
            both.append(one()(at.model, at.x, criterion, epsilons=[0.05, 0.3])[0])
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


@EachName
@EachNorm
@EachBounds
def test_foolboxes_pgd_is_a_loop_with_the_derivatives_on_paper(name, norm, bounds):
    network = Smooth()
    at = problem(bounds, network=network)
    network.double()
    x, epsilon = at.x.double().flatten(1), EPSILONS[norm] * (bounds[1] - bounds[0])
    attack = with_objective(PGD[norm], name)(steps=12, rel_stepsize=0.3)
    torch.manual_seed(2)
    network.queries.clear()
    found = attack.run(at.model, x, at.y, epsilon=epsilon)
    # Every query is the batch, and clean inputs cost one.
    compares = name in ("kl", "fisher-rao")
    assert [len(points) for points in network.queries] == [6] * (12 + compares)
    assert torch.equal(network.queries[0], x) is compares
    torch.manual_seed(2)
    point = attack.get_random_start(ep.astensor(x), epsilon).raw.clamp(*bounds)
    for _ in range(12):
        gradient = slopes_by_inputs(name, network, point, x, at.y)
        order = ORDERS[norm]
        step = gradient.sign() if norm == "linf" else gradient / gradient.norm(p=order, dim=1, keepdim=True)
        offset = point + 0.3 * epsilon * step - x
        if norm == "linf":
            offset = offset.clamp(-epsilon, epsilon)
        else:
            offset = offset * (epsilon / offset.norm(p=order, dim=1, keepdim=True)).clamp_max(1)
        point = (x + offset).clamp(*bounds)
    torch.testing.assert_close(found, point, rtol=0, atol=1e-9)


ROWS = st.lists(st.lists(st.floats(-40, 40, width=32), min_size=6, max_size=6), min_size=1, max_size=4)


@given(ROWS, st.sampled_from(OBJECTIVES))
def test_gradients_are_the_derivatives_on_paper(rows, name):
    table = torch.tensor(rows, dtype=torch.float64)
    logits, natural = table[:, :3].clone().requires_grad_(), table[:, 3:]
    labels = torch.arange(len(logits)) % 3
    loss = ObjectiveLoss(objective=name, natural=natural)(logits, nn.functional.one_hot(labels, 3).float())
    assert loss.shape == ()
    (gradient,) = torch.autograd.grad(loss, logits)
    apart = (natural.softmax(1) - logits.softmax(1)).abs().amax(1) > 1e-6
    expected = slopes(name, logits.detach(), natural, labels)
    torch.testing.assert_close(gradient[apart], expected[apart], rtol=1e-5, atol=1e-9)
    assert bool(torch.isfinite(gradient).all())


@EachName
def test_losses_and_gradients_of_an_estimator_are_those_on_paper(name):
    at = problem((-1.0, 2.0), network=Smooth())
    x, y = at.x.numpy(), at.y.numpy()
    bound = objective_estimator(at.estimator, name, x)
    points = np.clip(x + np.float32(0.1) * np.sin(np.arange(96, dtype=np.float32)).reshape(x.shape), -1, 2)
    expected = slopes_by_inputs(name, at.network, torch.from_numpy(points), at.x, at.y).numpy()
    for labels in (y, np.eye(4, dtype=np.float32)[y], y[:, None].astype(np.float32)):
        np.testing.assert_allclose(bound.loss_gradient(points, labels), expected, rtol=1e-3, atol=1e-5)
    # Losses of rows are not reduced where ART asks for them.
    rows = bound.compute_loss(points, y)
    for reduction, reduce in (("sum", np.sum), ("mean", np.mean)):
        np.testing.assert_allclose(bound.compute_loss(points, y, reduction=reduction), reduce(rows), rtol=1e-5)
    p, q = (torch.from_numpy(at.estimator.predict(z)).double().softmax(1).numpy() for z in (x, points))
    losses = {
        "ace": -np.log(q[np.arange(6), y]),
        "kl": (p * np.log(p / q)).sum(1),
        "gini": 1 - np.sqrt((q**2).sum(1)),
        "fisher-rao": 2 * np.arccos(np.sqrt(p * q).sum(1)),
    }
    np.testing.assert_allclose(rows, losses[name], rtol=1e-3, atol=1e-6)


def test_a_batch_that_is_not_the_bound_one_is_refused():
    at = problem(rows=40)
    bound = objective_estimator(at.estimator, "kl", at.x.numpy())
    few = {"eps": 0.1, "eps_step": 0.02, "max_iter": 2, "num_random_init": 1, "verbose": False}
    with pytest.raises(InvalidArgumentError, match=r"logits: got shape \(32, 4\).*\(40, 4\).*batch_size"):
        evasion.ProjectedGradientDescent(bound, **few).generate(at.x.numpy(), at.y.numpy())
    evasion.ProjectedGradientDescent(bound, batch_size=40, **few).generate(at.x.numpy(), at.y.numpy())
