"""What networks return for probe inputs, and what a run is refused for that differs."""

import copy
from collections import deque

import pytest
import torch
from torch import nn

from robust_ext.defenses import HedgeDefense
from robust_ext.demo.network import digits_network
from robust_ext.engine.copies import PROBES, behaviour, compare_behaviour
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.eot import EoT
from robust_ext.models.rows import Solution

BOUNDS = (-1.0, 3.0)


def of(module):
    return behaviour(module, torch.zeros(1, 1, 8, 8), BOUNDS)


class Counting(nn.Module):
    """Notes what it is called with."""

    def __init__(self, columns=1000):
        super().__init__()
        self.calls, self.columns, self.seen = 0, columns, deque()

    def forward(self, x):
        self.calls += 1
        self.seen.append(x)
        return x.flatten(1).repeat(1, 100)[:, : self.columns]


class Applied(nn.Module):
    """A network with something done to its logits."""

    def __init__(self, function, module=None):
        super().__init__()
        self.module, self.function = module or digits_network(), function

    def forward(self, x):
        return self.function(self.module(x), x)


def noisy(module=None, scale=1.0):
    return Applied(lambda out, x: out + scale * torch.randn(len(x), 1), module)


def changed(limit=-9.0, change=lambda out: out + 1):
    """Another network where the mean of an input lies above a limit."""
    return Applied(lambda out, x: torch.where(x.flatten(1).mean(1, keepdim=True) > limit, change(out), out))


def test_probes_lie_in_bounds_and_leave_nothing_behind():
    module, state = Counting(), torch.get_rng_state()
    found = of(module)
    assert module.calls == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(x.shape == (PROBES, 1, 8, 8) for x in module.seen)
    low, high = module.seen[0].min(), module.seen[0].max()
    assert BOUNDS[0] <= low < -0.9
    assert 2.9 < high <= BOUNDS[1]
    # Of many outputs a few sums are kept.
    assert torch.tensor(found["values"]).shape == (PROBES, 16)
    assert found == of(Counting())


class Centred(AdaptiveDefense):
    """Takes the mean of its group off every input."""

    batch_level = True

    def solve(self, x, rng, *, record):
        return Solution(x - x.mean(0, keepdim=True), (x,))


def test_probes_are_whole_groups():
    seen = Counting(columns=3)
    found = of(Centred(seen, group_size=3))
    assert [len(x) for x in seen.seen] == [6]
    assert torch.tensor(found["values"]).shape == (PROBES, 3)


def test_threads_batches_and_precision_are_tolerated():
    network = digits_network()
    before, found = torch.get_num_threads(), of(network)
    try:
        torch.set_num_threads(2)
        assert compare_behaviour(found, of(network)) is None
    finally:
        torch.set_num_threads(before)
    double = copy.deepcopy(network).double()
    assert compare_behaviour(found, of(Applied(lambda out, x: double(x.double())))) is None


def test_what_differs_is_counted():
    found, seen = of(digits_network()), Counting()
    of(seen)
    means = seen.seen[0].flatten(1).mean(1).sort().values
    for count, limit in ((4, -9.0), (1, float(means[-2:].mean())), (0, 9.0)):
        words = compare_behaviour(found, of(changed(limit)))
        expected = f"behaves differently on {count} of 4 probe inputs (largest difference 1)"
        assert words == (expected if count else None)
    # Small changes count where they are above rounding.
    assert compare_behaviour(found, of(changed(change=lambda out: out * 1.01))) is not None
    infinite = of(changed(change=lambda out: out / 0))
    assert "other values are not finite" in compare_behaviour(found, infinite)
    assert compare_behaviour(infinite, infinite) is None


def test_random_networks_are_compared_by_equal_draws():
    plain, found = of(digits_network()), of(noisy())
    assert (found["random"], plain["random"]) == (True, False)
    assert compare_behaviour(found, of(noisy())) is None
    other = of(noisy(scale=2.0))
    assert compare_behaviour(found, other) is not None
    # Another device draws other numbers.
    assert compare_behaviour(found, {**other, "device": "cuda"}) is None
    assert compare_behaviour(plain, {**of(changed()), "device": "cuda"}) is not None


def test_networks_that_are_not_made_for_such_inputs():
    raising = of(nn.Linear(3, 2))
    assert raising == {"raised": "RuntimeError"}
    assert compare_behaviour(raising, of(nn.Linear(3, 2))) is None
    assert "raised RuntimeError before" in compare_behaviour(raising, of(digits_network()))
    assert "another number of values" in compare_behaviour(of(Counting(2)), of(Counting(3)))


@pytest.mark.parametrize(
    "make",
    [lambda net: HedgeDefense(net, steps=1, bounds=BOUNDS, seed=0), lambda net: EoT(noisy(net), draws=2, seed=0)],
)
def test_seeded_draws_of_earlier_batches_are_no_change(make):
    module = make(digits_network()).eval()
    before = of(module)
    module(torch.rand(3, 1, 8, 8))
    assert compare_behaviour(before, of(module)) is None
    assert compare_behaviour(before, of(make(nn.Sequential(digits_network(), nn.Hardtanh())).eval())) is not None
