"""What networks return for probe inputs, and in which words a run is refused that differs."""

import copy
from collections import deque

import pytest
import torch
from torch import nn

from robust_ext.defenses import HedgeDefense
from robust_ext.demo.network import digits_network
from robust_ext.engine.copies import PROBES, behaviour, compare_behaviour, differences
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.eot import EoT
from robust_ext.models.rows import Solution

BOUNDS = (-1.0, 3.0)
X = torch.zeros(1, 1, 8, 8)


def of(module):
    return behaviour(module, X, BOUNDS)


class Noise(nn.Module):
    def __init__(self, module, scale=1.0):
        super().__init__()
        self.module, self.scale = module, scale

    def forward(self, x):
        return self.module(x) + self.scale * torch.randn(len(x), 1)


class Counting(nn.Module):
    """Notes what it is called with."""

    def __init__(self, columns=1000):
        super().__init__()
        self.calls, self.columns, self.seen = 0, columns, deque()

    def forward(self, x):
        self.calls += 1
        self.seen.append(x)
        return x.flatten(1).repeat(1, 100)[:, : self.columns]


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
    assert compare_behaviour(found, of(nn.Sequential(Cast(torch.float64), double))) is None


class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


class Changed(nn.Module):
    """Another network where the mean of an input lies above a limit."""

    def __init__(self, module, limit=-9.0, change=lambda out: out + 1):
        super().__init__()
        self.module, self.limit, self.change = module, limit, change

    def forward(self, x):
        out = self.module(x)
        return torch.where(x.flatten(1).mean(1, keepdim=True) > self.limit, self.change(out), out)


def test_what_differs_is_counted():
    network = digits_network()
    found, seen = of(network), Counting()
    of(seen)
    means = seen.seen[0].flatten(1).mean(1).sort().values
    for count, limit in ((4, -9.0), (1, float(means[-2:].mean())), (0, 9.0)):
        words = compare_behaviour(found, of(Changed(network, limit)))
        expected = f"behaves differently on {count} of 4 probe inputs (largest difference 1)"
        assert words == (expected if count else None)
    # Small changes count where they are above rounding.
    assert compare_behaviour(found, of(Changed(network, change=lambda out: out * 1.01))) is not None
    infinite = of(Changed(network, change=lambda out: out / 0))
    assert "other values are not finite" in compare_behaviour(found, infinite)
    assert compare_behaviour(infinite, infinite) is None


def test_random_networks_are_compared_by_equal_draws():
    network = digits_network()
    found = of(Noise(network))
    assert (found["random"], of(network)["random"]) == (True, False)
    assert compare_behaviour(found, of(Noise(network))) is None
    other = of(Noise(network, scale=2.0))
    assert "behaves differently" in compare_behaviour(found, other)
    # Another device draws other numbers.
    assert compare_behaviour(found, {**other, "device": "cuda"}) is None
    assert compare_behaviour(of(network), {**of(Changed(network)), "device": "cuda"}) is not None


def test_networks_that_are_not_made_for_such_inputs():
    raising = of(nn.Linear(3, 2))
    assert raising == {"raised": "RuntimeError"}
    assert compare_behaviour(raising, of(nn.Linear(3, 2))) is None
    words = "returned numbers on probe inputs, and raised RuntimeError before"
    assert compare_behaviour(raising, of(digits_network())) == words
    assert "another number of values" in compare_behaviour(of(Counting(2)), of(Counting(3)))


FOUND = {"device": "cpu", "random": False, "values": [[1.0, 2.0]] * 4}
MOVED = {**FOUND, "values": [[1.0, 2.0]] * 3 + [[1.0, 2.5]]}
BEHAVES = "behaves differently on 1 of 4 probe inputs (largest difference 0.5)"


@pytest.mark.parametrize(
    ("earlier", "now", "expected"),
    [
        ({"a": 1, "b": [2]}, {"b": [2], "a": 1}, []),
        ({"epsilon": 0.1}, {"epsilon": 0.2}, ["epsilon: 0.1 there, 0.2 now"]),
        ({"old": 1}, {"new": "x" * 90}, ["old: 1 there, None now", "new: None there, '" + "x" * 56 + "... now"]),
        ({"model": "ab"}, {"model": "cd"}, ["model: other weights, buffers or attributes"]),
        ({"inputs": "ab"}, {"inputs": "cd"}, ["inputs: other samples"]),
        ({"model_code": {"a.py": "1"}}, {"model_code": {"a.py": "1"}}, []),
        (
            {"model_code": {"a.py": "1", "b.py": "2", "a.py.f": "1", "values": "3"}},
            {"model_code": {"a.py": "0", "c.py": "2", "a.py.f": "2", "values": "4"}},
            ["model code: changed (a.py, b.py is gone, c.py is new)"],
        ),
        ({"attack_code": {"values": "3"}}, {"attack_code": {"values": "4"}}, ["attack code: changed (values)"]),
        (
            {"attack_code": {"a.STEPS": "1", "a.py": "1", "values": "3"}},
            {"attack_code": {"a.STEPS": "2", "a.py": "1", "values": "4"}},
            ["attack code: changed (a.STEPS)"],
        ),
        (
            {"attack_code": {"one": {"a.py": "1"}, "two": {"a.py": "1"}}},
            {"attack_code": {"one": {"a.py": "1"}, "two": {"a.py": "2"}}},
            ["attack two code: changed (a.py)"],
        ),
        (
            {"model_code": {f"{n}.py": "1" for n in range(9)}},
            {"model_code": {f"{n}.py": "2" for n in range(9)}},
            ["model code: changed (0.py, 1.py, 2.py, 3.py and 5 more)"],
        ),
        ({}, {"model_code": {"a.py": "1"}}, ["model code: begun by a version that did not keep it"]),
        ({}, {"model_behaviour": FOUND}, ["model behaviour: begun by a version that did not keep it"]),
        ({"model_behaviour": FOUND}, {"model_behaviour": MOVED}, [f"model: {BEHAVES}"]),
        (
            {"surrogate_behaviour": {"old": FOUND, "new": FOUND}},
            {"surrogate_behaviour": {"old": FOUND, "new": MOVED}},
            [f"surrogate new: {BEHAVES}"],
        ),
    ],
)
def test_differences_in_words(earlier, now, expected):
    assert differences(earlier, now) == expected


def test_rounding_is_no_difference():
    near = {**FOUND, "values": [[1.0 + 1e-6, 2.0]] * 4}
    assert differences({"model_behaviour": FOUND}, {"model_behaviour": near}) == []


@pytest.mark.parametrize(
    "make",
    [lambda net: HedgeDefense(net, steps=1, bounds=BOUNDS, seed=0), lambda net: EoT(Noise(net), draws=2, seed=0)],
)
def test_seeded_draws_of_earlier_batches_are_no_change(make):
    module = make(digits_network()).eval()
    before = of(module)
    module(torch.rand(3, 1, 8, 8))
    assert compare_behaviour(before, of(module)) is None
    assert compare_behaviour(before, of(make(nn.Sequential(digits_network(), nn.Hardtanh())).eval())) is not None
