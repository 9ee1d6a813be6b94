"""Test-time defenses: steps, draws and groups; their features; batch-level ones among held images."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import robust_ext
from robust_ext import BPDA, AdaptiveDefense, EoT, InvalidArgumentError, ModelError, ThreatModel, as_defense
from robust_ext.core.random import seeded_globals
from robust_ext.core.reached import reached_modules
from robust_ext.core.target import Counted, PassCounter
from robust_ext.models.adaptive_features import binarized_defense, split_defense
from robust_ext.models.company import in_company, one_image
from robust_ext.models.rows import RowRNG, Solution, row_seeds
from tests.attacks.problems import Lambda
from tests.models.cases import Controlled, Descent, Probable, data, network, planted

LINF = ThreatModel(norm="linf", epsilon=0.05)


class Grouped(AdaptiveDefense):
    """Subtracts the mean of the group; its random part is one number a group."""

    batch_level = True

    def __init__(self, *args, random=False, **keywords):
        super().__init__(*args, **keywords)
        self.random = random

    def solve(self, x, rng, *, record):
        shift = torch.rand((), generator=rng.generator(0, "shift")) if self.random else 0.0
        final = x - x.mean(0, keepdim=True) + shift
        return Solution(final, (x, final), {"rows": torch.full((len(x),), float(len(x)))})


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 50), st.integers(1, 5), st.integers(0, 4))
def test_draws_depend_on_seed_draw_and_position(seed, draw, rows, more):
    defense, x = Descent(network(), steps=0), data(rows + more)
    with defense.seeded(seed, draw=draw):
        first, second = defense.trace(x), defense.trace(x)
    assert (defense.seed, defense.draw) == (None, 0)
    with defense.seeded(seed, draw=draw + 1):
        repeated = defense.trace(x[:rows])
    assert torch.equal(repeated.final, second.final[:rows])
    assert not bool((first.final == second.final).flatten(1).any(1).any())
    # The noise of a row is its seed's, whatever its position and its input.
    turned = defense.trace(x.flip(0), seeds=first.seeds.flip(0).tolist())
    assert torch.equal(turned.final.flip(0), first.final)


def test_seeds_can_be_fixed_free_or_given():
    x, defense = data(3), Descent(network(), steps=1, seed=3)
    first, second = defense(x), defense(x)
    assert (defense.draw, torch.equal(first, second)) == (2, False)
    with defense.seeded(3, fixed=True):
        assert torch.equal(defense(x), first)
        assert torch.equal(defense(x), first)
    free, seeds = Descent(network(), steps=1), torch.tensor([1, 2, 3])
    for held in (lambda: seeded_globals(5), lambda: row_seeds(seeds)):
        runs = []
        for _ in range(2):
            with held():
                runs.append(torch.stack([free(x), free(x)]))
        assert torch.equal(*runs)
        assert not torch.equal(*runs[0])
    assert torch.equal(runs[0][0], free.trace(x, seeds=seeds).logits)
    with row_seeds(seeds), pytest.raises(ModelError, match="2 rows where seeds were given for 3"):
        free(x[:2])


@pytest.mark.parametrize("rows", [1, 2, 4, 5])
def test_missing_rows_are_refused_or_copies_of_the_first_with_draws_of_their_own(rows):
    x = data(rows)
    with pytest.raises(ModelError, match=f"batch of {rows} rows, expected a whole number of groups of 3"):
        Grouped(network(), group_size=3)(x)
    expected = Grouped(network(), group_size=3).trace(torch.cat([x, torch.cat([x, x])[: -rows % 3]]))
    trace = Grouped(network(), group_size=3, pad=True).trace(x)
    assert torch.equal(trace.final, expected.final[:rows])
    torch.testing.assert_close(trace.logits, expected.logits[:rows])
    assert len(trace.iterates[0]) == len(trace.state["rows"]) == rows

    class Noisy(Grouped):
        def solve(self, x, rng, *, record):
            return Solution(x + rng.normal(x, "noise").mean(0), (), {})

    found = Noisy(network(), group_size=4, pad=True, random=True).trace(x[:1], seeds=[9]).final
    assert not torch.allclose(found - x[:1], RowRNG(torch.tensor([9])).normal(x[:1], "noise"))


def test_logits_of_sure_probabilities_and_their_gradients_are_finite():
    sure, leaf = Probable(nn.Sequential(nn.Flatten(), nn.Linear(6, 2))), data(5).requires_grad_()
    with torch.no_grad():
        sure.classifier[1].weight.copy_(torch.tensor([[1e4], [-1e4]]).expand(2, 6))
    assert bool(torch.isfinite(sure(leaf)).all())
    assert bool(torch.isfinite(torch.autograd.grad(sure(leaf).sum(), leaf)[0]).all())


# Features.


@pytest.mark.parametrize("seed", [None, 7])
def test_features_are_those_of_the_final_point_and_depend_on_nothing_else(seed):
    net, x = network(), data(4)
    defense = Descent(net, steps=3, seed=seed)
    parts = split_defense(defense, x)
    torch.testing.assert_close(parts.features(x), net[:-1](defense.trace(x, seeds=[seed or 0] * 4).final))
    torch.testing.assert_close(parts.features(x.flip(0)).flip(0), parts.features(x))
    torch.testing.assert_close(parts.features(x[2:3]), parts.features(x)[2:3])
    assert (parts.layer, parts.readout) == ("classifier.3", net[3])
    # The defense itself draws as before.
    assert (type(defense), defense.draw) == (Descent, 0)
    assert not torch.equal(defense(x), defense(x))
    # Draws that are not held are fresh, as are those of a defense that is made of it.
    parts = split_defense(defense, x, held=False)
    with seeded_globals(3):
        first, second = parts.features(x), parts.features(x)
    with seeded_globals(3):
        assert torch.equal(parts.features(x), first)
    assert bool((first != second).any(1).all())
    fresh = binarized_defense(planted(parts.features, x))
    assert not torch.equal(fresh(x), fresh(x))


def test_features_of_readouts_that_add_something_and_of_probabilities():
    net, x = network(), data(4)
    parts = split_defense(Controlled(net), x, layer="classifier.3")
    torch.testing.assert_close(parts.features(x), net[:-1](x - 0.5 * x.sin()))
    parts = split_defense(Probable(net, steps=2), x)
    logits = net(Descent(net, steps=2).trace(x, seeds=[0] * 4).final)
    torch.testing.assert_close(parts.features(x), logits.log_softmax(1))
    assert torch.equal(parts.readout(logits), logits)
    assert (parts.shape, parts.kind) == ((3,), "logits")
    # Attacks through the defense get the binarized logits, and not their logarithms.
    module = planted(parts.features, x, size=3)
    torch.testing.assert_close(binarized_defense(module)(x), module(x))


@pytest.mark.parametrize("kind", [Descent, Controlled])
@pytest.mark.parametrize("rows", ["any", "full"])
def test_the_binarized_defense_is_the_classifier(kind, rows):
    x = data(4)
    features = split_defense(kind(network(), steps=2), x).features
    module = planted(Counted(features, PassCounter()), x, rows)
    defense = binarized_defense(Counted(module, PassCounter()))
    assert isinstance(defense, kind)
    points = near(x, 2)
    torch.testing.assert_close(defense(points), module(points))
    if rows == "any":
        order = [3, 0, 0]
        torch.testing.assert_close(defense(points[order]), module(points)[order])
        # Their draws are held in an expectation too.
        torch.testing.assert_close(EoT(defense, draws=3, chunk=2)(points), module(points))
    leaf = points.clone().requires_grad_()
    wanted, found = (torch.autograd.grad(one(leaf)[:, 1].sum(), leaf)[0] for one in (module, defense))
    torch.testing.assert_close(found, wanted)
    assert bool((wanted != 0).any())


# Batch-level defenses among held images do what the defense does with batches put together by hand.


class Centred(Descent):
    random = False
    batch_level = True
    noise = 0.0

    def step(self, point, *, x, number, state, rng):
        return point + state["scale"][:, None, None] * (point - point.mean(0)).tanh()


def near(x, seed):
    return x + 0.05 * torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))


def test_rows_meet_those_of_the_other_samples_and_clean_ones_where_these_are_missing():
    x, defense = data(5), Centred(network(), steps=2, group_size=2)
    # Groups: samples 0 and 1, 2 and 3, 4 and a copy of the first.
    one, two = near(x, 3), near(x, 4)
    rows = torch.stack([one[3], one[0], two[0], one[1], one[4], one[2], two[3]])
    batches = torch.stack([one[0], one[1], one[2], one[3], one[4], x[0], two[0], x[1], x[2], two[3]])
    module = in_company(defense, x, LINF)
    torch.testing.assert_close(module(rows), defense(batches)[[3, 0, 6, 1, 4, 2, 9]])
    torch.testing.assert_close(module(one[[2]]), defense(torch.stack([one[2], x[3]]))[:1])
    assert len(module(rows[:0])) == 0
    # One image is alone among its negatives.
    held = near(data(3), 5)
    defense = Centred(network(), steps=2, group_size=4)
    single = one_image(defense, held)
    assert not single.batch_level
    expected = torch.cat([defense(torch.cat([row[None], held]))[:1] for row in x])
    torch.testing.assert_close(single(x), expected)
    torch.testing.assert_close(single(x[[1]]), expected[[1]])


def test_gradients_in_company_are_those_of_the_whole_batch():
    x, defense, order = data(4), Centred(network(), steps=2, group_size=2), [2, 0, 3, 1]
    weights = torch.rand(4, 3, generator=torch.Generator().manual_seed(6))

    def gradient(module, rows, weights):
        leaf = rows.clone().requires_grad_()
        return torch.autograd.grad((weights * module(leaf)).sum(), leaf)[0]

    wanted = gradient(defense, near(x, 3), weights)
    module = in_company(defense, x, LINF)
    for crossed in (module, BPDA(module, backward="unrolled")):
        torch.testing.assert_close(gradient(crossed, near(x, 3)[order], weights[order]), wanted[order])


IMAGES = torch.rand(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))


def tanh_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)).eval()


@pytest.fixture
def net():
    return tanh_net()


@pytest.fixture
def hidden():
    return tanh_net(1)


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


def adapting(net):
    """Classifier and defense in one."""
    return Lambda(lambda x: net(soap(net)(x)))


def test_a_purifier_that_calls_backward(net, hidden):
    made, final = as_defense(soap(hidden), net, IMAGES[:2]), by_hand(hidden, IMAGES)[-1]
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(made(IMAGES).clone(), net(final).detach())
    assert all(parameter.grad is None for parameter in (*net.parameters(), *hidden.parameters()))
    hidden[1].weight.grad = kept = torch.ones_like(hidden[1].weight)
    made(IMAGES)
    assert hidden[1].weight.grad is kept
    assert bool((kept == 1).all())
    # The identity's gradient is the network's at the final point.
    torch.testing.assert_close(gradient(BPDA(made), IMAGES), gradient(net, final))
    whole, last = as_defense(adapting(net), net, IMAGES[:2]), by_hand(net, IMAGES)[-1]
    with torch.no_grad():
        torch.testing.assert_close(whole(IMAGES), net(last))


def test_inner_gradients_stay_inside(net, hidden):
    """Neither the caller's tensor, nor the graph it comes from, gets any of those that are taken inside."""

    def purify(x):
        if x.requires_grad:
            hidden(x).square().sum().backward()
        return x * 2

    source, leaf = IMAGES.clone().requires_grad_(), IMAGES.clone().requires_grad_()
    as_defense(purify, net, IMAGES[:2])(source * 1).sum().backward()
    torch.testing.assert_close(source.grad, torch.autograd.grad(net(2 * leaf).sum(), leaf)[0])


def test_it_may_change_its_inputs_and_look_for_their_gradients(net):
    def purify(x):
        x.mul_(0.5)
        leaf = x if x.requires_grad else x.requires_grad_()
        leaf.square().sum().backward(retain_graph=True)
        assert torch.equal(x.grad, 2 * x)
        return x

    x, made = IMAGES.clone(), as_defense(purify, net, IMAGES[:2])
    torch.testing.assert_close(gradient(made, x), gradient(lambda x: net(0.5 * x), IMAGES))
    assert torch.equal(x, IMAGES)


@robust_ext.purifier(group_size=3)
def centred(x):
    assert len(x) == 3
    return x - 0.1 * x.mean(0, keepdim=True)


def test_a_function_states_its_groups_and_its_randomness(net):
    for purify in (centred, robust_ext.purifier(group_size=3)(lambda classifier: centred)):
        made = as_defense(purify, net, IMAGES[:2])
        assert (made.group_size, made.batch_level, made.random) == (3, True, False)
        torch.testing.assert_close(made(IMAGES), torch.cat([net(centred(IMAGES[:3])), net(centred(IMAGES[3:]))]))
        with pytest.raises(ModelError, match="whole number of groups of 3"):
            made(IMAGES[:4])
    with pytest.raises(InvalidArgumentError, match="group_size of"):
        as_defense(robust_ext.purifier(group_size=0)(lambda x: x), net, IMAGES[:2])
    noisy = as_defense(robust_ext.purifier(random=True)(lambda x: x + 0.1 * torch.randn_like(x)), net, IMAGES[:2])
    with noisy.seeded(1):
        assert noisy.random != torch.equal(noisy(IMAGES), noisy(IMAGES))


def mean_gradient(net, points):
    """Of gradients at the points, each of the loss by the last point's logits."""
    last = 2 * net(points[-1]).detach()
    leaves = [point.clone().requires_grad_() for point in points]
    return torch.stack(torch.autograd.grad(sum((net(leaf) * last).sum() for leaf in leaves), leaves)).mean(0)


@pytest.mark.parametrize("views", [True, False])
def test_the_trajectory_is_seen_in_what_a_hidden_network_gets(views, net, hidden):
    """Other views of the points, which the network gets too, are left out."""
    made = as_defense(soap(hidden, views=views), net, IMAGES[:2])
    assert made.has_trajectory
    iterates = made.trace(IMAGES).iterates
    assert len(iterates) == 5
    if views:
        torch.testing.assert_close([point.detach() for point in iterates], by_hand(hidden, IMAGES))
        found = gradient(BPDA(made, backward="trajectory"), IMAGES)
        torch.testing.assert_close(found, mean_gradient(net, by_hand(hidden, IMAGES)[1:]))


def test_the_trajectory_that_is_stated(net, hidden):
    def path(x):
        yield from (x, 0.9 * x, 0.8 * x)

    class Leaving:
        trajectory = ()

        def __call__(self, x):
            self.trajectory = list(path(x))
            return self.trajectory[-1]

    for purifier in (robust_ext.purifier(trajectory=path)(lambda x: 0.8 * x), Leaving()):
        found = gradient(BPDA(as_defense(purifier, net, IMAGES[:2]), backward="trajectory"), IMAGES)
        torch.testing.assert_close(found, mean_gradient(net, [0.9 * IMAGES, 0.8 * IMAGES]))
    for purifier in (lambda x: 0.5 * x, lambda x: x + 0.01 * hidden(x).sum(1).view(-1, 1, 1, 1)):
        assert not as_defense(purifier, net, IMAGES[:2]).has_trajectory


HELD = tanh_net(5)


class Holder:
    def __init__(self, net):
        self.parts = {"nets": [net]}

    def method(self, x):
        return self.parts["nets"][0](x)


def test_networks_are_found_wherever_they_are_held(net):
    functions = [lambda x: net(x), lambda x, net=net: net(x), lambda x: (lambda y: net(y))(x)]
    for function in (*functions, Holder(net).method, soap(net), adapting(net)):
        assert list(reached_modules(function).values()) == [net]
    assert list(reached_modules(lambda x: HELD(x)).values()) == [HELD]
    assert reached_modules(lambda x: x.round()) == {}
