import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from robust_ext import AdaptiveDefense, InvalidArgumentError, ModelError, Purifier
from robust_ext.core.random import seeded_globals
from robust_ext.models.rows import RowRNG, Solution, row_seeds
from robust_ext.models.vjp import row_gradient
from tests.models.cases import Descent, data, network


class Smooth(Descent):
    """The same without chance."""

    random = False
    noise = 0.0


class Centred(AdaptiveDefense):
    """Subtracts the mean of the group; its random part is one number a group."""

    batch_level = True

    def __init__(self, *args, random=False, **keywords):
        super().__init__(*args, **keywords)
        self.random = random

    def solve(self, x, rng, *, record):
        shift = torch.rand((), generator=rng.generator(0, "shift")) if self.random else 0.0
        final = x - x.mean(0, keepdim=True) + shift
        return Solution(final, (x, final), {"rows": torch.full((len(x),), float(len(x)))})


class Probable(Purifier):
    output = "probabilities"

    def step(self, point, *, x, number, state, rng):
        return point / 2

    def readout(self, point, state):
        return super().readout(point, state).softmax(1)


def test_the_steps_are_done_in_order():
    net, x = network(), data(4)
    defense = Smooth(net, steps=3)
    trace = defense.trace(x)
    assert len(trace.iterates) == 4
    point = x
    for number in range(3):
        assert torch.equal(trace.iterates[number], point)
        leaf = point.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(net(leaf).square().sum(), leaf)
        noise = RowRNG(trace.seeds).normal(x, "step", number)
        point = point - 0.2 * x.flatten(1).mean(1)[:, None, None] * gradient + 0.01 * noise
    torch.testing.assert_close(trace.final, point)
    torch.testing.assert_close(trace.logits, net(point))
    assert torch.equal(trace.final, trace.iterates[-1])
    assert torch.equal(defense(x), trace.logits)
    assert torch.equal(defense.with_steps(1).trace(x).final, trace.iterates[1])
    assert torch.equal(defense.with_steps(0)(x), net(x))
    assert defense.steps == 3


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_gradients_through_the_steps_are_those_of_finite_differences(checkpoint, steps):
    defense = Smooth(network(torch.float64), steps=steps, checkpoint=checkpoint)
    x = data(2, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(defense, x)
    random = Descent(network(torch.float64), steps=steps, checkpoint=checkpoint)
    seeds = torch.tensor([4, 5])
    assert torch.autograd.gradcheck(lambda x: random.trace(x, seeds=seeds).logits, x)


def test_inner_gradients_do_not_depend_on_the_batch():
    defense = Smooth(network(torch.float64), steps=2)
    x = data(6, torch.float64)
    torch.testing.assert_close(defense(x), torch.cat([defense(row[None]) for row in x]))
    with pytest.raises(ModelError, match="one loss for each row"):
        row_gradient(lambda p: p.square().mean(), x)
    with pytest.raises(ModelError, match="does not depend on the point"):
        row_gradient(lambda p: x.flatten(1).sum(1), data(6))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 50), st.integers(1, 5), st.integers(0, 4))
def test_draws_depend_on_seed_draw_and_position(seed, draw, rows, more):
    defense = Descent(network(), steps=0)
    x = data(rows + more)
    with defense.seeded(seed, draw=draw):
        first, second = defense.trace(x), defense.trace(x)
    assert (defense.seed, defense.draw) == (None, 0)
    with defense.seeded(seed, draw=draw + 1):
        repeated = defense.trace(x[:rows])
    assert torch.equal(repeated.final, second.final[:rows])
    assert torch.equal(repeated.seeds, second.seeds[:rows])
    assert not bool((first.final == second.final).flatten(1).any(1).any())
    assert len(set(first.seeds.tolist())) == rows + more
    assert torch.equal(defense.trace(x, seeds=first.seeds).final, first.final)
    # The noise of a row is its seed's, whatever its position and its input.
    turned = defense.trace(x.flip(0), seeds=first.seeds.flip(0).tolist())
    assert torch.equal(turned.final.flip(0), first.final)


def test_seeds_can_be_fixed_free_or_given():
    x = data(3)
    defense = Descent(network(), steps=1, seed=3)
    first, second = defense(x), defense(x)
    assert defense.draw == 2
    assert not torch.equal(first, second)
    with defense.seeded(3, fixed=True):
        assert torch.equal(defense(x), first)
        assert torch.equal(defense(x), first)
    free = Descent(network(), steps=1)
    assert not torch.equal(free(x), free(x))
    with seeded_globals(5):
        one, two = free(x), free(x)
    with seeded_globals(5):
        assert torch.equal(free(x), one)
        assert torch.equal(free(x), two)
    seeds = torch.tensor([1, 2, 3])
    with row_seeds(seeds):
        one, two = free(x), free(x)
    assert torch.equal(one, free.trace(x, seeds=seeds).logits)
    assert not torch.equal(one, two)
    with row_seeds(seeds):
        free(x)
        assert torch.equal(free(x), two)
        with pytest.raises(ModelError, match="2 rows where seeds were given for 3"):
            free(x[:2])


def test_draws_have_their_distributions():
    rng = RowRNG(torch.arange(4000))
    like = torch.zeros(4000, 2, dtype=torch.float64)
    uniform, normal = rng.uniform(like, "a", low=-1, high=3), rng.normal(like, "a")
    assert uniform.dtype == normal.dtype == torch.float64
    assert -1 <= float(uniform.min()) < -0.98
    assert 2.98 < float(uniform.max()) <= 3
    assert abs(float(uniform.mean()) - 1) < 0.06
    assert abs(float(normal.mean())) < 0.05
    assert abs(float(normal.std()) - 1) < 0.05
    counts = rng.integers(3, "b").bincount(minlength=3)
    assert counts.sum() == 4000
    assert bool(((counts - 4000 / 3).abs() < 150).all())
    assert torch.equal(rng.uniform(like, "a", low=-1, high=3), uniform)
    assert not torch.equal(rng.normal(like, "b"), normal)
    with pytest.raises(InvalidArgumentError, match="like: got 2 rows, expected 4000 rows"):
        rng.normal(like[:2])


@pytest.mark.parametrize("random", [False, True])
def test_groups_are_whole_and_stay_together(random):
    net, x = network(), data(6)
    defense = Centred(net, group_size=3, random=random, seed=2)
    seeds = torch.arange(6) if random else torch.zeros(6, dtype=torch.int64)
    trace = defense.trace(x, seeds=seeds)
    for rows in (slice(0, 3), slice(3, 6)):
        alone = defense.trace(x[rows], seeds=seeds[rows])
        assert torch.equal(alone.final, trace.final[rows])
        torch.testing.assert_close(alone.logits, trace.logits[rows])
        first = x[rows] - x[rows].mean(0)
        shift = (trace.final[rows] - first).flatten()
        torch.testing.assert_close(shift, shift[0].expand(18))
        assert (abs(float(shift[0])) > 1e-3) == random
    assert [len(point) for point in trace.iterates] == [6, 6]
    assert torch.equal(trace.state["rows"], torch.full((6,), 3.0))


@pytest.mark.parametrize("rows", [1, 2, 4, 5])
def test_missing_rows_are_refused_or_copies_of_the_first(rows):
    x = data(rows)
    with pytest.raises(ModelError, match=f"batch of {rows} rows, expected a whole number of groups of 3"):
        Centred(network(), group_size=3)(x)
    padded = Centred(network(), group_size=3, pad=True)
    filled = torch.cat([x, torch.cat([x, x])[: -rows % 3]])
    expected = Centred(network(), group_size=3).trace(filled)
    trace = padded.trace(x)
    assert torch.equal(trace.final, expected.final[:rows])
    torch.testing.assert_close(trace.logits, expected.logits[:rows])
    assert len(trace.iterates[0]) == len(trace.state["rows"]) == rows


def test_copies_draw_numbers_of_their_own():
    class Noisy(Centred):
        def solve(self, x, rng, *, record):
            noise = rng.normal(x, "noise")
            return Solution(x + noise.mean(0), (), {})

    x = data(1)
    trace = Noisy(network(), group_size=4, pad=True, random=True).trace(x, seeds=[9])
    noise = RowRNG(torch.tensor([9])).normal(x, "noise")
    assert not torch.allclose(trace.final - x, noise)


def test_probabilities_become_logits():
    net, x = network(), data(5)
    defense = Probable(net, steps=1)
    torch.testing.assert_close(defense(x), net(x / 2).log_softmax(1))
    leaf = x.clone().requires_grad_()
    found = torch.autograd.grad(nn.functional.cross_entropy(defense(leaf), torch.zeros(5, dtype=torch.int64)), leaf)
    wanted = torch.autograd.grad(nn.functional.cross_entropy(net(leaf / 2), torch.zeros(5, dtype=torch.int64)), leaf)
    torch.testing.assert_close(found, wanted)
    sure = Probable(nn.Sequential(nn.Flatten(), nn.Linear(6, 2)))
    with torch.no_grad():
        sure.classifier[1].weight.copy_(torch.tensor([[1e4], [-1e4]]).expand(2, 6))
    leaf = x.clone().requires_grad_()
    assert bool(torch.isfinite(sure(leaf)).all())
    assert bool(torch.isfinite(torch.autograd.grad(sure(leaf).sum(), leaf)[0]).all())
