from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_ext.defenses.anti_adversary import AntiAdversary
from tests.defenses.cases import linear


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 5), st.integers(1, 4), st.booleans())
def test_the_steps_are_those_of_a_loop_by_hand(seed: int, steps: int, rows: int, kept: bool) -> None:
    rng = np.random.default_rng(seed)
    weights, bias = rng.normal(size=(4, 6)), rng.normal(size=4)
    x = rng.random((rows, 6))
    defense = AntiAdversary(linear(weights, bias), steps=steps, radius=0.2 if kept else None, clip=kept)
    trace = defense.trace(torch.from_numpy(x))
    assert len(trace.iterates) == steps + 1
    predicted = (x @ weights.T + bias).argmax(1)
    np.testing.assert_array_equal(trace.state["predicted"].numpy(), predicted)
    point = x
    for number in range(steps):
        logits = point @ weights.T + bias
        shares = np.exp(logits - logits.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        point = point - 0.15 * np.sign((shares - np.eye(4)[predicted]) @ weights)
        if kept:
            point = np.clip(np.clip(point, x - 0.2, x + 0.2), 0, 1)
        np.testing.assert_allclose(trace.iterates[number + 1].numpy(), point, atol=1e-12)
    np.testing.assert_allclose(trace.logits.detach().numpy(), point @ weights.T + bias, atol=1e-10)


def test_a_classifier_of_two_classes_never_changes_its_mind() -> None:
    # With two classes of opposite weights, every step raises the margin by step x the l1 norm of their difference.
    weights = np.array([[0.5, -2.0, 1.0], [-0.5, 2.0, -1.0]])
    x = torch.rand(50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    net = linear(weights, np.zeros(2))
    before, after = net(x), AntiAdversary(net)(x)
    assert torch.equal(before.argmax(1), after.argmax(1))
    margin = (before[:, 0] - before[:, 1]).abs()
    torch.testing.assert_close((after[:, 0] - after[:, 1]).abs(), margin + 2 * 0.15 * 7)


def test_where_cross_entropy_has_no_gradient_rows_stay() -> None:
    net = linear(np.array([[1e3, 0.0], [0.0, 0.0]]), np.zeros(2)).float()
    x = torch.tensor([[1.0, 0.5], [0.0, 0.5]])
    assert torch.equal(AntiAdversary(net).trace(x).final[0], x[0])
    assert torch.equal(AntiAdversary(net, steps=1).trace(x).final[1], torch.tensor([0.15, 0.5]))
