from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from robust_ext.defenses.hd import HedgeDefense
from tests.defenses.cases import linear


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 6), st.integers(1, 4), st.booleans())
def test_the_steps_are_those_of_a_loop_by_hand(seed: int, steps: int, rows: int, random: bool) -> None:
    rng = np.random.default_rng(seed)
    weights, bias = rng.normal(size=(3, 6)), rng.normal(size=3)
    x = rng.random((rows, 6))
    defense = HedgeDefense(linear(weights, bias), steps=steps, radius=0.1, step_size=0.04, random_start=random, seed=1)
    trace = defense.trace(torch.from_numpy(x).view(rows, 1, 2, 3))
    assert len(trace.iterates) == steps + 1
    point = trace.iterates[0].flatten(1).numpy()
    if not random:
        assert np.array_equal(point, x)
    for number in range(steps):
        logits = point @ weights.T + bias
        shares = np.exp(logits - logits.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        # The cross-entropies of all classes sum up to K logsumexp(z) - sum(z).
        slope = (3 * shares - 1) @ weights
        delta = np.clip(point + 0.04 * np.sign(slope) - x, -0.1, 0.1)
        point = np.clip(x + delta, 0, 1)
        np.testing.assert_allclose(trace.iterates[number + 1].flatten(1).numpy(), point, atol=1e-12)
    np.testing.assert_allclose(trace.logits.detach().numpy(), point @ weights.T + bias, atol=1e-10)


def test_the_loss_is_the_sum_of_all_cross_entropies() -> None:
    net = nn.Linear(4, 5)
    x = torch.randn(3, 4)
    wanted = sum(nn.functional.cross_entropy(net(x), torch.full((3,), k), reduction="none") for k in range(5))
    torch.testing.assert_close(HedgeDefense(net).loss(x), wanted)


def test_starts_are_uniform_in_the_ball_and_depend_on_the_seed() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(100, 2))
    x = torch.full((60, 100), 0.5)
    defense = HedgeDefense(net, steps=0, seed=3)
    first, second = defense.trace(x).final - x, defense.trace(x).final - x
    assert not torch.equal(first, second)
    reach = 8 / 255
    assert 0.999 * reach < float(first.abs().max()) <= reach + 1e-7
    assert abs(float(first.mean())) < 0.03 * reach
    assert abs(float(first.std()) - reach / 3**0.5) < 0.03 * reach
    with defense.seeded(3):
        assert torch.equal(defense.trace(x).final - x, first)
    assert not defense.random or defense.draw == 2
    still = HedgeDefense(net, steps=2, random_start=False)
    assert not still.random
    assert torch.equal(still(x), still(x))


def test_starts_are_clipped_to_the_bounds_unless_not_wanted() -> None:
    net, x = nn.Linear(50, 2), torch.zeros(4, 50)
    clipped = HedgeDefense(net, steps=0, seed=0).trace(x).final
    free = HedgeDefense(net, steps=0, seed=0, clip_start=False).trace(x).final
    assert float(free.min()) < 0
    assert torch.equal(clipped, free.clamp(0, 1))
    after = HedgeDefense(net, steps=1, seed=0, clip_start=False).trace(x).final
    assert float(after.min()) >= 0
