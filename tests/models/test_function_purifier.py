"""Purifiers as their authors write them: gradients inside, groups, trajectories, and what they hold."""

import gc

import pytest
import torch
from torch import nn

import robust_ext
from robust_ext import BPDA, InvalidArgumentError, ModelError, as_defense
from robust_ext.core.reached import reached_modules

X = torch.rand(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)).eval()


@pytest.fixture
def net():
    return network()


@pytest.fixture
def hidden():
    return network(1)


def soap(net, steps=4, views=True):
    """As authors write it: an offset moved by torch.optim along a loss of its own, by backward()."""

    def purify(x):
        delta = torch.zeros_like(x, requires_grad=True)
        optimizer = torch.optim.SGD([delta], lr=0.5)
        for _ in range(steps):
            optimizer.zero_grad()
            point = x + delta
            view = net(point.flip(3)) if views else 0.0
            (net(point) - view).square().sum().backward()
            optimizer.step()
        return (x + delta).detach()

    return purify


def by_hand(net, x, steps=4):
    """The same, with all its points."""
    points = [x]
    for _ in range(steps):
        leaf = points[-1].clone().requires_grad_()
        loss = (net(leaf) - net(leaf.flip(3))).square().sum()
        points.append(points[-1] - 0.5 * torch.autograd.grad(loss, leaf)[0])
    return points


def gradient(module, x):
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(module(leaf).square().sum(), leaf)[0]


class Adapting(nn.Module):
    """Classifier and defense in one."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.eval()

    def forward(self, x):
        return self.net(soap(self.net)(x))


def test_a_purifier_that_calls_backward(net, hidden):
    made, final = as_defense(soap(hidden), net, X[:2]), by_hand(hidden, X)[-1]
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(made(X).clone(), net(final).detach())
    assert all(parameter.grad is None for parameter in (*net.parameters(), *hidden.parameters()))
    hidden[1].weight.grad = kept = torch.ones_like(hidden[1].weight)
    made(X)
    assert hidden[1].weight.grad is kept
    assert bool((kept == 1).all())
    # The identity's gradient is the network's at the final point.
    torch.testing.assert_close(gradient(BPDA(made), X), gradient(net, final))
    whole, last = as_defense(Adapting(net), net, X[:2]), by_hand(net, X)[-1]
    with torch.no_grad():
        torch.testing.assert_close(whole(X), net(last))

    # Memory does not grow.
    def held():
        gc.collect()
        return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())

    before = held()
    for _ in range(3):
        made(X)
    assert held() == before


def test_inner_gradients_stay_inside(net, hidden):
    """Neither the caller's tensor, nor the graph it comes from, gets any of those that are taken inside."""

    def purify(x):
        if x.requires_grad:
            hidden(x).square().sum().backward()
        return x * 2

    source, leaf = X.clone().requires_grad_(), X.clone().requires_grad_()
    as_defense(purify, net, X[:2])(source * 1).sum().backward()
    torch.testing.assert_close(source.grad, torch.autograd.grad(net(2 * leaf).sum(), leaf)[0])


def test_it_may_change_its_inputs_and_look_for_their_gradients(net):
    def purify(x):
        x.mul_(0.5)
        leaf = x if x.requires_grad else x.requires_grad_()
        leaf.square().sum().backward(retain_graph=True)
        assert torch.equal(x.grad, 2 * x)
        return x

    x, made = X.clone(), as_defense(purify, net, X[:2])
    with torch.no_grad():
        torch.testing.assert_close(made(x), net(0.5 * X))
    torch.testing.assert_close(gradient(made, x), gradient(lambda x: net(0.5 * x), X))
    assert torch.equal(x, X)


def test_rounding_inside_it_passes_gradients_straight_through(net):
    made = as_defense(lambda x: (x * 4).round() / 4, net, X, bounds=(0, 1))
    assert torch.equal(gradient(BPDA(made, backward="straight_through"), X), gradient(net, (X * 4).round() / 4))


@robust_ext.purifier(group_size=3)
def centred(x):
    assert len(x) == 3
    return x - 0.1 * x.mean(0, keepdim=True)


class Centring:
    group_size = 3

    def __init__(self, classifier):
        self.run = centred

    def __call__(self, x):
        return self.run(x)


@pytest.mark.parametrize("given", [centred, Centring, robust_ext.purifier(group_size=3)(lambda classifier: centred)])
def test_a_function_states_its_groups(given, net):
    made = as_defense(given, net, X[:2])
    assert (made.group_size, made.batch_level, made.random) == (3, True, False)
    torch.testing.assert_close(made(X), torch.cat([net(centred(X[:3])), net(centred(X[3:]))]))
    with pytest.raises(ModelError, match="whole number of groups of 3"):
        made(X[:4])
    with pytest.raises(InvalidArgumentError, match="group_size of"):
        as_defense(robust_ext.purifier(group_size=0)(lambda x: x), net, X[:2])
    made = as_defense(robust_ext.purifier(random=True)(lambda x: x + 0.1 * torch.randn_like(x)), net, X[:2])
    with made.seeded(1):
        assert made.random != torch.equal(made(X), made(X))


def mean_gradient(net, points):
    """Of gradients at the points, each of the loss by the last point's logits."""
    last = 2 * net(points[-1]).detach()
    leaves = [point.clone().requires_grad_() for point in points]
    return torch.stack(torch.autograd.grad(sum((net(leaf) * last).sum() for leaf in leaves), leaves)).mean(0)


@pytest.mark.parametrize("views", [True, False])
def test_the_trajectory_is_seen_in_what_a_hidden_network_gets(views, net, hidden):
    """Other views of the points, which the network gets too, are left out."""
    made = as_defense(soap(hidden, views=views), net, X[:2])
    assert made.has_trajectory
    iterates = made.trace(X).iterates
    assert len(iterates) == 5
    if views:
        torch.testing.assert_close([point.detach() for point in iterates], by_hand(hidden, X))
        found = gradient(BPDA(made, backward="trajectory"), X)
        torch.testing.assert_close(found, mean_gradient(net, by_hand(hidden, X)[1:]))


def test_the_trajectory_that_is_stated(net, hidden):
    def path(x):
        yield from (x, 0.9 * x, 0.8 * x)

    class Leaving:
        trajectory = ()

        def __call__(self, x):
            self.trajectory = list(path(x))
            return self.trajectory[-1]

    for given in (robust_ext.purifier(trajectory=path)(lambda x: 0.8 * x), Leaving()):
        found = gradient(BPDA(as_defense(given, net, X[:2]), backward="trajectory"), X)
        torch.testing.assert_close(found, mean_gradient(net, [0.9 * X, 0.8 * X]))
    for given in (lambda x: 0.5 * x, lambda x: x + 0.01 * hidden(x).sum(1).view(-1, 1, 1, 1)):
        assert not as_defense(given, net, X[:2]).has_trajectory


HELD = network(5)


class Holder:
    def __init__(self, net):
        self.parts = {"nets": [net]}

    def method(self, x):
        return self.parts["nets"][0](x)


def test_networks_are_found_wherever_they_are_held(net):
    functions = [lambda x: net(x), lambda x, net=net: net(x), lambda x: (lambda y: net(y))(x)]
    for function in (*functions, Holder(net).method, soap(net), Adapting(net)):
        assert list(reached_modules(function).values()) == [net]
    assert list(reached_modules(lambda x: HELD(x)).values()) == [HELD]
    assert reached_modules(lambda x: x.round()) == {}


def test_the_evaluation_of_an_authors_purifier(net, hidden):
    """In groups, with a network that it hides: no error, its own row, and what it costs."""
    purify = robust_ext.purifier(group_size=3)(soap(hidden))
    threat_model, labels = robust_ext.ThreatModel(norm="linf", epsilon=0.1), net(X).argmax(1)
    given = {"classifier": net, "steps": 1, "queries": 2, "full": True}
    found = robust_ext.evaluate_defense(purify, None, X, labels, threat_model, **given).content
    assert found["batch_level"]
    assert (found["cost"]["forward"], found["cost"]["backward"]) == (9, 8)
    assert "APGD-ce, BPDA trajectory" in {one["name"] for one in found["defended"]["attacks"]}
