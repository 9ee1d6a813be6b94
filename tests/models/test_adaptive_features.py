import pytest
import torch
from torch import Tensor

from robust_ext import BPDA, EoT
from robust_ext.core.random import seeded_globals
from robust_ext.core.target import Counted, PassCounter
from robust_ext.models.adaptive_features import binarized_defense, split_defense
from robust_ext.models.features import split
from tests.models.cases import Controlled, Descent, data, network, planted


class Probable(Descent):
    output = "probabilities"

    def readout(self, point, state):
        return super().readout(point, state).softmax(1)


@pytest.mark.parametrize("seed", [None, 7])
def test_features_are_those_of_the_final_point_and_depend_on_nothing_else(seed):
    net, x = network(), data(4)
    defense = Descent(net, steps=3, seed=seed)
    parts = split_defense(defense, x)
    final = defense.trace(x, seeds=[seed or 0] * 4).final
    torch.testing.assert_close(parts.features(x), net[:-1](final))
    torch.testing.assert_close(parts.features(x.flip(0)).flip(0), parts.features(x))
    torch.testing.assert_close(parts.features(x[2:3]), parts.features(x)[2:3])
    assert parts.layer == "classifier.3"
    assert parts.readout is net[3]
    # The defense itself draws as before.
    assert (type(defense), defense.draw) == (Descent, 0)
    assert not torch.equal(defense(x), defense(x))


def test_what_the_readout_adds_is_in_the_features():
    net, x = network(), data(4)
    parts = split_defense(Controlled(net), x, layer="classifier.3")
    torch.testing.assert_close(parts.features(x), net[:-1](x - 0.5 * x.sin()))


def test_features_of_probabilities_are_their_logarithms():
    net, x = network(), data(4)
    parts = split_defense(Probable(net, steps=2), x)
    logits = net(Descent(net, steps=2).trace(x, seeds=[0] * 4).final)
    torch.testing.assert_close(parts.features(x), logits.log_softmax(1))
    assert torch.equal(parts.readout(logits), logits)
    assert (parts.shape, parts.kind) == ((3,), "logits")
    # Attacks through the defense get the binarized logits, and not their logarithms.
    module = planted(parts.features, x, size=3)
    torch.testing.assert_close(binarized_defense(module)(x), module(x))


def test_draws_that_are_not_held_are_fresh():
    x = data(4)
    for seed in (None, 7):
        parts = split_defense(Descent(network(), steps=2, seed=seed), x, held=False)
        with seeded_globals(3):
            first, second = parts.features(x), parts.features(x)
        with seeded_globals(3):
            assert torch.equal(parts.features(x), first)
        assert bool((first != second).any(1).all())
        # Nor those of a defense that is made of it.
        defense = binarized_defense(planted(parts.features, x))
        assert not torch.equal(defense(x), defense(x))


@pytest.mark.parametrize("kind", [Descent, Controlled])
@pytest.mark.parametrize("rows", ["any", "full"])
def test_the_binarized_defense_is_the_classifier(kind, rows):
    x = data(4)
    features = split_defense(kind(network(), steps=2), x).features
    module = planted(Counted(features, PassCounter()), x, rows)
    defense = binarized_defense(Counted(module, PassCounter()))
    assert isinstance(defense, kind)
    near = x + 0.01 * torch.rand(x.shape, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(defense(near), module(near))
    if rows == "any":
        order = [3, 0, 0]
        torch.testing.assert_close(defense(near[order]), module(near)[order])
        # Their draws are held in an expectation too.
        torch.testing.assert_close(EoT(defense, draws=3, chunk=2)(near), module(near))
    leaf = near.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(module(leaf)[:, 1].sum(), leaf)
    (found,) = torch.autograd.grad(defense(leaf)[:, 1].sum(), leaf)
    torch.testing.assert_close(found, wanted)
    assert bool((wanted != 0).any())


@pytest.mark.parametrize("backward", ["identity", "frozen", "trajectory"])
def test_its_gradients_are_those_of_the_binarized_readout_along_the_way(backward):
    net, x = network(), data(4)
    module = planted(split_defense(Descent(net, steps=2), x).features, x)
    defense = binarized_defense(module)
    assert defense is not None
    path = defense.trace(x).iterates[1:]
    index = torch.arange(4)

    def at(point):
        leaf = point.detach().requires_grad_()
        gradient: Tensor
        (gradient,) = torch.autograd.grad(module.read(net[:-1](leaf), index)[:, 1].sum(), leaf)
        return gradient

    wanted = (at(path[0]) + at(path[1])) / 2 if backward == "trajectory" else at(path[1])
    leaf = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(BPDA(defense, backward=backward)(leaf)[:, 1].sum(), leaf)
    torch.testing.assert_close(found, wanted)


def test_what_is_no_defense_is_none():
    x, net = data(4), network()
    assert binarized_defense(net) is None
    assert binarized_defense(planted(split(net, x).features, x)) is None
    defense = Descent(net)
    assert binarized_defense(Counted(defense, PassCounter())) is defense
