from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.defenses.imf import IMF
from tests.defenses.cases import linear


class Weighted(nn.Module):
    """A discriminator that is linear in the logits."""

    def __init__(self, weights: Tensor, shift: float = 0.0, *, column: bool = False) -> None:
        super().__init__()
        self.weights, self.shift, self.column = weights, shift, column

    def forward(self, logits: Tensor) -> Tensor:
        value = logits @ self.weights + self.shift
        return value[:, None] if self.column else value


class Mean(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        return logits.mean()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 4), st.integers(1, 6), st.booleans(), st.booleans())
def test_the_steps_are_those_of_a_loop_by_hand(
    seed: int, steps: int, rows: int, column: bool, saturating: bool
) -> None:
    rng = np.random.default_rng(seed)
    weights, direction = rng.normal(size=(3, 5)), rng.normal(size=3)
    x = rng.random((rows, 5))
    shift = -float((x @ weights.T @ direction).mean())
    judge = Weighted(torch.from_numpy(direction), shift, column=column)
    defense = IMF(linear(weights), judge, steps=steps, radius=0.1, step_size=0.08, saturating=saturating)
    trace = defense.trace(torch.from_numpy(x))
    point = x
    for number in range(steps):
        clean = 1 / (1 + np.exp(-(point @ weights.T @ direction + shift)))
        share = np.where((clean > 0.3) & (clean < 0.7), 0.5, 1.0)[:, None]
        # Of -log(clean), by the input: (clean - 1) W^T v.
        slope = (clean - 1)[:, None] * (direction @ weights)
        near = np.clip(point - 0.08 * share * np.sign(slope), x - 0.1, x + 0.1)
        point = np.clip(near, 0, 1)
        np.testing.assert_allclose(trace.iterates[number + 1].numpy(), point, atol=1e-12)
    np.testing.assert_allclose(trace.logits.detach().numpy(), point @ weights.T, atol=1e-10)


def test_steps_are_shorter_in_doubt_alone() -> None:
    net = nn.Identity()
    probability = torch.tensor([0.2, 0.29, 0.31, 0.5, 0.69, 0.71, 0.9], dtype=torch.float64)
    x = torch.stack([probability.logit() / 10 + 0.5, torch.full((7,), 0.5, dtype=torch.float64)], 1)
    judge = Weighted(torch.tensor([10.0, 0.0], dtype=torch.float64), -5.0)
    moved = IMF(net, judge).trace(x).final - x
    half, whole = 8 / 255, 16 / 255
    wanted = torch.tensor([whole, whole, half, half, half, whole, whole], dtype=torch.float64)
    torch.testing.assert_close(moved[:, 0], wanted)
    assert torch.equal(moved[:, 1], torch.zeros(7, dtype=torch.float64))
    moved = IMF(net, judge, doubt=0.0, doubtful=(0.0, 1.0)).trace(x).final - x
    assert torch.equal(moved, torch.zeros_like(x))


def test_where_the_probability_is_rounded_to_one_rows_stay_unless_not_wanted() -> None:
    x = torch.full((1, 2), 0.5)
    judge = Weighted(torch.tensor([60.0, 0.0]))
    assert torch.equal(IMF(nn.Identity(), judge).trace(x).final, x)
    moved = IMF(nn.Identity(), judge, saturating=False).trace(x).final - x
    torch.testing.assert_close(moved, torch.tensor([[16 / 255, 0.0]]))


def test_what_is_wrong_is_refused() -> None:
    x = torch.rand(3, 2)
    with pytest.raises(ModelError, match=r"discriminator: returned shape \(3, 2\) for 3 rows"):
        IMF(nn.Identity(), nn.Identity())(x)
    with pytest.raises(ModelError, match=r"discriminator: returned shape \(\)"):
        IMF(nn.Identity(), Mean())(x)
    with pytest.raises(InvalidArgumentError, match=r"doubtful: got 1\.5"):
        IMF(nn.Identity(), nn.Identity(), doubtful=(0.3, 1.5))
    with pytest.raises(InvalidArgumentError, match=r"doubtful: got .*a pair"):
        IMF(nn.Identity(), nn.Identity(), doubtful=(0.3,))  # type: ignore[arg-type]
