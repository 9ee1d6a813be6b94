import functools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from robust_ext import BPDA, AdaptiveDefense, EoT, Purifier
from robust_ext.attacks._common.objectives import cross_entropy, margin
from robust_ext.models.eot import GRADIENTS, VALUES
from robust_ext.models.rows import Solution
from tests.models.cases import data as some
from tests.models.cases import most_held, network

data = functools.partial(some, rows=4, dtype=torch.float64)
COTANGENT = torch.randn(4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
LABELS = torch.tensor([0, 2, 1, 0])


class Noisy(Purifier):
    """Adds noise, and notes the seeds it was given."""

    random = True
    size = 0.5

    def __init__(self, classifier, **keywords):
        super().__init__(classifier, **{"steps": 1, **keywords})
        self.seen = []

    def step(self, point, *, x, number, state, rng):
        self.seen.append(rng.seeds)
        return point + self.size * rng.normal(x, "noise")


class Together(AdaptiveDefense):
    """Random and batch-level: noise on the mean of the group."""

    random = True
    batch_level = True

    def __init__(self, classifier):
        super().__init__(classifier, group_size=2)
        self.seen = []

    def solve(self, x, rng, *, record):
        self.seen.append(rng.seeds)
        return Solution(x - x.mean(0) * rng.normal(x[:, :1, :1], "scale"))


def singles(defense, x, draws):
    """The logits ``(draws, N, K)`` of the draws that a defense has just been asked for, one by one."""
    seeds = [seed for batch in defense.seen for seed in batch][: draws * len(x)]
    rows = torch.tensor(seeds).view(draws, len(x))
    assert len(set(seeds)) == len(seeds)
    return torch.stack([defense.trace(x, seeds=row).logits for row in rows])


def aggregate(name, draws):
    if name == "last":
        return draws[-1]
    return draws.mean(0) if name in ("mean", "logits") else draws.softmax(2).mean(0).log()


@pytest.mark.parametrize("kind", [Noisy, Together])
@pytest.mark.parametrize("chunk", [None, 2, 5, 9])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_values_and_gradients_are_those_of_single_draws(kind, chunk, value, gradient):
    defense, x = kind(network(torch.float64)), data().requires_grad_()
    averaged = EoT(defense, draws=5, chunk=chunk, gradient=gradient, loss=value, decision="softmax", seed=3)
    out = averaged(x)
    alone = singles(defense, x, 5)
    torch.testing.assert_close(out, aggregate(value, alone))
    (wanted,) = torch.autograd.grad(aggregate(gradient, alone), x, COTANGENT)
    (found,) = torch.autograd.grad(out, x, COTANGENT, retain_graph=True)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(out, x, COTANGENT)[0], wanted)
    # Without a gradient it is the decision's value, of fresh draws.
    defense.seen.clear()
    with torch.no_grad():
        torch.testing.assert_close(averaged(x), aggregate("softmax", singles(defense, x, 5)))


@pytest.mark.parametrize("chunk", [None, 2, 9])
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("loss", [cross_entropy, margin])
def test_gradients_of_losses_are_those_of_single_draws(chunk, gradient, loss):
    defense, x = Noisy(network(torch.float64)), data()
    averaged = EoT(defense, draws=5, chunk=chunk, gradient=gradient, loss="softmax", decision="last", seed=3)
    found = averaged.value_and_gradient(x, LABELS, loss)
    assert x.grad is None
    x.requires_grad_()
    alone = singles(defense, x, 5)
    if gradient == "mean":
        own = [torch.autograd.grad(loss(logits, LABELS).sum(), x, retain_graph=True)[0] for logits in alone]
        wanted = torch.stack(own).mean(0)
    else:
        (wanted,) = torch.autograd.grad(loss(aggregate(gradient, alone), LABELS).sum(), x, retain_graph=True)
    torch.testing.assert_close(found.gradient, wanted)
    torch.testing.assert_close(found.losses, loss(aggregate("softmax", alone), LABELS))
    torch.testing.assert_close(found.logits, alone[-1])
    assert not any(tensor.requires_grad for tensor in (found.gradient, found.losses, found.logits))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 20), st.integers(1, 6), st.integers(1, 7), st.integers(1, 4))
def test_draws_depend_on_seed_call_draw_and_row(seed, call, draws, chunk, rows):
    defense, x = Noisy(network(torch.float64)), data()
    averaged = EoT(defense, draws=draws, seed=seed)
    averaged.draw = call
    first, second = averaged(x), averaged(x)
    assert averaged.draw == call + 2
    assert not torch.equal(first, second)
    with EoT(defense, draws=draws, chunk=chunk).seeded(seed, draw=call + 1) as other:
        torch.testing.assert_close(other(x[:rows]), second[:rows])
        assert other.seed == seed
    assert other.seed is None
    more = EoT(defense, draws=draws + 1, seed=seed, loss="last", fixed=True)
    torch.testing.assert_close(more(x), more(x), rtol=0, atol=0)
    assert more.draw == 0


class Global(nn.Module):
    """Draws from all three global generators."""

    def forward(self, x):
        noise = torch.rand_like(x) + np.random.rand() + random.random()
        return x * noise


@pytest.mark.parametrize("chunk", [1, 3, 10])
@pytest.mark.parametrize("module", [nn.Dropout(0.5).train(), Global()])
def test_any_module_repeats_its_draws_in_the_backward_pass(module, chunk):
    x = torch.rand(3, 4).add(1).requires_grad_()
    averaged = EoT(module, draws=10, chunk=chunk, seed=1)
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    out = averaged(x)
    (found,) = torch.autograd.grad(out.sum(), x)
    # Both multiply by noise: their gradient is the noise itself.
    torch.testing.assert_close(found, (out / x).detach())
    assert len(out.unique()) > 6
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert torch.equal(torch.get_rng_state(), states[2])


def test_expectations_of_expectations_and_of_approximations():
    defense, x = Noisy(network(torch.float64)), data().requires_grad_()
    nested = EoT(EoT(defense, draws=3, seed=5), draws=2, seed=1, fixed=True)
    assert torch.autograd.gradcheck(nested, x[:1])
    softmax = EoT(defense, draws=2, seed=1, fixed=True, gradient="softmax", loss="softmax")
    assert torch.autograd.gradcheck(softmax, x[:1])
    # Found under other modules, and behind BPDA with steps of its own.
    wrapped = nn.Sequential(BPDA(lambda x: x.round(decimals=1)), BPDA(defense, backward="frozen", steps=1))
    averaged = EoT(wrapped, draws=3, chunk=2, seed=1)
    defense.seen.clear()
    out = averaged(x)
    point = x.detach().round(decimals=1).requires_grad_()
    alone = singles(defense, point, 3)
    torch.testing.assert_close(out, alone.mean(0))
    torch.testing.assert_close(
        torch.autograd.grad(out, x, COTANGENT)[0], torch.autograd.grad(alone.mean(0), point, COTANGENT)[0]
    )


def test_no_more_than_a_chunk_is_held():
    def attack(draws, chunk, now):
        x = data().requires_grad_()
        averaged = EoT(Noisy(network(torch.float64)), draws=draws, chunk=chunk)
        out = averaged(x)
        assert (now() == 0) == (draws > chunk)
        torch.autograd.backward(out.sum())
        averaged.value_and_gradient(x, LABELS, cross_entropy)

    def most(draws, chunk=1):
        return most_held(lambda now: attack(draws, chunk, now))

    assert most(100) == most(2)
    assert most(100, 20) == most(40, 20) < 21 * most(2)
    assert most(100, 100) > 50 * most(2)


def test_certain_draws_are_averaged_in_logarithms():
    class Certain(Noisy):
        def readout(self, point, state):
            return 1e3 * super().readout(point, state)

    x = data(dtype=torch.float32).requires_grad_()
    out = EoT(Certain(network()), draws=4, gradient="softmax", loss="softmax", seed=0)(x)
    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(out, LABELS), x)
    assert bool(torch.isfinite(out).all())
    assert bool(torch.isfinite(gradient).all())
    assert bool((gradient != 0).any())
