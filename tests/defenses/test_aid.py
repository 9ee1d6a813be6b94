from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.defenses.aid import AIDPurifier
from robust_ext.defenses.training.discriminator import Discriminator


class Weighted(nn.Module):
    """A discriminator that is linear in what it sees."""

    def __init__(self, *weights: Tensor) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, *seen: Tensor) -> Tensor:
        return sum((values @ w for values, w in zip(seen, self.weights, strict=True)), torch.zeros(()))


def classifier(first: np.ndarray, second: np.ndarray) -> nn.Sequential:
    layers = [nn.Linear(weights.shape[1], weights.shape[0], bias=False).double() for weights in (first, second)]
    with torch.no_grad():
        for layer, weights in zip(layers, (first, second), strict=True):
            layer.weight.copy_(torch.from_numpy(weights))
    return nn.Sequential(*layers).eval()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 12), st.integers(1, 4), st.booleans())
def test_the_steps_are_those_of_a_loop_by_hand(seed: int, steps: int, rows: int, saturating: bool) -> None:
    rng = np.random.default_rng(seed)
    first, second = rng.normal(size=(4, 5)), rng.normal(size=(3, 4))
    low, high = rng.normal(size=4), rng.normal(size=3)
    x = rng.random((rows, 5))
    judge = Weighted(torch.from_numpy(low), torch.from_numpy(high))
    net = classifier(first, second)
    trace = AIDPurifier(net, judge, layers=["0", "1"], steps=steps, saturating=saturating).trace(torch.from_numpy(x))
    assert len(trace.iterates) == steps + 1
    # The sigmoid rises with what it is taken of, so the sign of the slope is that of the weights everywhere.
    slope = np.sign(low @ first + high @ second @ first)
    for number, found in enumerate(trace.iterates):
        point = np.clip(np.clip(x + number * 0.031 / 4 * slope, x - 0.031, x + 0.031), 0, 1)
        np.testing.assert_allclose(found.numpy(), point, atol=1e-12)
    np.testing.assert_allclose(trace.logits.detach().numpy(), trace.final.numpy() @ first.T @ second.T, atol=1e-10)


def test_a_single_layer_is_seen_and_nothing_behind_it() -> None:
    first = np.array([[1.0, -2.0, 0.0]])
    net = classifier(first, np.array([[1.0], [-1.0]]))
    x = torch.full((2, 3), 0.5, dtype=torch.float64)
    judge = Weighted(torch.tensor([-1.0], dtype=torch.float64))
    moved = AIDPurifier(net, judge, layers=["0"], radius=0.1).trace(x).final - x
    torch.testing.assert_close(moved, torch.tensor([[-0.1, 0.1, 0.0]], dtype=torch.float64).expand(2, 3))


def test_layers_are_those_of_the_discriminator_where_left_out() -> None:
    net = nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2)).eval()
    judge = Discriminator([3, 27], layers=["1", "2"], width=4)
    defense = AIDPurifier(net, judge)
    assert defense.layers == ("1", "2")
    x = torch.rand(2, 1, 4, 4)
    torch.testing.assert_close(defense.cleanness(x), judge(net[:2](x), net[:3](x)).sigmoid())
    for layers in (None, [], "1", ["1", "fc"]):
        with pytest.raises(InvalidArgumentError, match="layers: got"):
            AIDPurifier(net, Discriminator([2]), layers=layers)
    with pytest.raises(ModelError, match="discriminator: got activations"):
        AIDPurifier(net, judge, layers=["1"])(x)
    with pytest.raises(ModelError, match=r"discriminator: returned shape \(2, 27\)"):
        AIDPurifier(net, nn.Identity(), layers=["2"])(x)


def test_where_the_probability_is_rounded_to_one_rows_stay_unless_not_wanted() -> None:
    net = nn.Sequential(nn.Identity(), nn.Linear(2, 2))
    x, judge = torch.full((1, 2), 0.5), Weighted(torch.tensor([60.0, 0.0]))
    assert torch.equal(AIDPurifier(net, judge, layers=["0"]).trace(x).final, x)
    moved = AIDPurifier(net, judge, layers=["0"], saturating=False).trace(x).final - x
    torch.testing.assert_close(moved, torch.tensor([[0.031, 0.0]]))
