"""The defenses that step along signs, against a loop by hand on linear classifiers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.defenses import IMF, AIDPurifier, AntiAdversary, Discriminator, HedgeDefense
from tests.defenses.cases import linear


class Weighted(nn.Module):
    """A discriminator that is linear in what it sees."""

    def __init__(self, *weights, shift=0.0, column=False):
        super().__init__()
        self.weights, self.shift, self.column = weights, shift, column

    def forward(self, *seen):
        value = sum((values @ w for values, w in zip(seen, self.weights, strict=True)), torch.tensor(self.shift))
        return value[:, None] if self.column else value


def shares(logits):
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


# A defense, its step by hand and its radius, for logits ``x @ weights.T + bias`` and two choices.
def hedge(weights, bias, x, rng, steps, one, two):
    defense = HedgeDefense(linear(weights, bias), steps=steps, radius=0.1, step_size=0.04, random_start=one, seed=1)
    # The cross-entropies of all classes sum up to K logsumexp(z) - sum(z).
    return defense, lambda point: 0.04 * np.sign((4 * shares(point @ weights.T + bias) - 1) @ weights), 0.1


def anti(weights, bias, x, rng, steps, one, two):
    radius = 0.2 if one else None
    wanted = np.eye(4)[(x @ weights.T + bias).argmax(1)]
    defense = AntiAdversary(linear(weights, bias), steps=steps, radius=radius, clip=one)
    return defense, lambda point: -0.15 * np.sign((shares(point @ weights.T + bias) - wanted) @ weights), radius


def imf(weights, bias, x, rng, steps, one, two):
    direction = rng.normal(size=4)
    shift = -float(((x @ weights.T + bias) @ direction).mean())
    judge = Weighted(torch.from_numpy(direction), shift=shift, column=one)

    def move(point):
        clean = 1 / (1 + np.exp(-((point @ weights.T + bias) @ direction + shift)))
        share = np.where((clean > 0.3) & (clean < 0.7), 0.5, 1.0)[:, None]
        # Of -log(clean), by the input: (clean - 1) W^T v.
        return -0.08 * share * np.sign((clean - 1)[:, None] * (direction @ weights))

    return IMF(linear(weights, bias), judge, steps=steps, radius=0.1, step_size=0.08, saturating=two), move, 0.1


def aid(weights, bias, x, rng, steps, one, two):
    first, low, high = rng.normal(size=(6, 6)), 0.1 * rng.normal(size=6), 0.1 * rng.normal(size=4)
    net = nn.Sequential(linear(first), linear(weights, bias)).eval()
    judge = Weighted(torch.from_numpy(low), torch.from_numpy(high))
    # The sigmoid rises with what it is taken of, so the sign of the slope is that of the weights everywhere.
    step = 0.031 / 4 * np.sign(low @ first + high @ weights @ first)
    return AIDPurifier(net, judge, layers=["0", "1"], steps=steps, saturating=one), lambda point: step, 0.031


@pytest.mark.parametrize("case", [hedge, anti, imf, aid])
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10), st.integers(1, 5), st.booleans(), st.booleans())
def test_the_steps_are_those_of_a_loop_by_hand(case, seed, steps, rows, one, two):
    rng = np.random.default_rng(seed)
    weights, bias, x = rng.normal(size=(4, 6)), rng.normal(size=4), rng.random((rows, 6))
    defense, move, radius = case(weights, bias, x, rng, steps, one, two)
    trace = defense.trace(torch.from_numpy(x))
    assert len(trace.iterates) == steps + 1
    point = trace.iterates[0].numpy()
    assert np.array_equal(point, x) != defense.random
    for number in range(steps):
        point = point + move(point)
        if radius is not None:
            point = np.clip(np.clip(point, x - radius, x + radius), 0, 1)
        np.testing.assert_allclose(trace.iterates[number + 1].numpy(), point, atol=1e-12)
    torch.testing.assert_close(trace.logits, defense.classifier(torch.from_numpy(point)), rtol=0, atol=1e-10)
    if case is anti:
        np.testing.assert_array_equal(trace.state["predicted"].numpy(), (x @ weights.T + bias).argmax(1))


def test_hedge_starts_are_uniform_in_the_ball_and_depend_on_the_seed():
    net, x = nn.Sequential(nn.Flatten(), nn.Linear(100, 2)), torch.full((60, 100), 0.5)
    defense = HedgeDefense(net, steps=0, seed=3)
    first, second = defense.trace(x).final - x, defense.trace(x).final - x
    assert not torch.equal(first, second)
    reach = 8 / 255
    assert 0.999 * reach < float(first.abs().max()) <= reach + 1e-7
    assert abs(float(first.mean())) < 0.03 * reach
    assert abs(float(first.std()) - reach / 3**0.5) < 0.03 * reach
    with defense.seeded(3):
        assert torch.equal(defense.trace(x).final - x, first)
    assert defense.draw == 2
    still = HedgeDefense(net, steps=2, random_start=False)
    assert not still.random
    assert torch.equal(still(x), still(x))


def test_hedge_starts_are_clipped_to_the_bounds_unless_not_wanted():
    net, x = nn.Linear(50, 2), torch.zeros(4, 50)
    clipped = HedgeDefense(net, steps=0, seed=0).trace(x).final
    free = HedgeDefense(net, steps=0, seed=0, clip_start=False).trace(x).final
    assert float(free.min()) < 0
    assert torch.equal(clipped, free.clamp(0, 1))
    assert float(HedgeDefense(net, steps=1, seed=0, clip_start=False).trace(x).final.min()) >= 0


def test_the_anti_adversary_of_two_classes_never_changes_a_decision():
    # With two classes of opposite weights, every step raises the margin by step x the l1 norm of their difference.
    net = linear(np.array([[0.5, -2.0, 1.0], [-0.5, 2.0, -1.0]]))
    x = torch.rand(50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before, after = net(x), AntiAdversary(net)(x)
    assert torch.equal(before.argmax(1), after.argmax(1))
    margin = (before[:, 0] - before[:, 1]).abs()
    torch.testing.assert_close((after[:, 0] - after[:, 1]).abs(), margin + 2 * 0.15 * 7)


def test_where_cross_entropy_has_no_gradient_rows_stay():
    net = linear(np.array([[1e3, 0.0], [0.0, 0.0]])).float()
    x = torch.tensor([[1.0, 0.5], [0.0, 0.5]])
    assert torch.equal(AntiAdversary(net).trace(x).final[0], x[0])
    assert torch.equal(AntiAdversary(net, steps=1).trace(x).final[1], torch.tensor([0.15, 0.5]))


def test_steps_of_imf_are_shorter_in_doubt_alone():
    probability = torch.tensor([0.2, 0.29, 0.31, 0.5, 0.69, 0.71, 0.9], dtype=torch.float64)
    x = torch.stack([probability.logit() / 10 + 0.5, torch.full((7,), 0.5, dtype=torch.float64)], 1)
    judge = Weighted(torch.tensor([10.0, 0.0], dtype=torch.float64), shift=-5.0)
    moved = IMF(nn.Identity(), judge).trace(x).final - x
    half, whole = 8 / 255, 16 / 255
    wanted = torch.tensor([whole, whole, half, half, half, whole, whole], dtype=torch.float64)
    torch.testing.assert_close(moved[:, 0], wanted)
    assert torch.equal(moved[:, 1], torch.zeros(7, dtype=torch.float64))
    assert torch.equal(IMF(nn.Identity(), judge, doubt=0.0, doubtful=(0.0, 1.0)).trace(x).final, x)


def test_where_the_probability_is_rounded_to_one_rows_stay_unless_not_wanted():
    x, judge = torch.full((1, 2), 0.5), Weighted(torch.tensor([60.0, 0.0]))
    layer = nn.Sequential(nn.Identity(), nn.Linear(2, 2))
    for kind, net, more, reach in ((IMF, nn.Identity(), {}, 16 / 255), (AIDPurifier, layer, {"layers": ["0"]}, 0.031)):
        make = kind
        assert torch.equal(make(net, judge, **more).trace(x).final, x)
        moved = make(net, judge, saturating=False, **more).trace(x).final - x
        torch.testing.assert_close(moved, torch.tensor([[reach, 0.0]]))


def test_aid_sees_a_single_layer_and_nothing_behind_it():
    net = nn.Sequential(linear(np.array([[1.0, -2.0, 0.0]])), linear(np.array([[1.0], [-1.0]]))).eval()
    x = torch.full((2, 3), 0.5, dtype=torch.float64)
    judge = Weighted(torch.tensor([-1.0], dtype=torch.float64))
    moved = AIDPurifier(net, judge, layers=["0"], radius=0.1).trace(x).final - x
    torch.testing.assert_close(moved, torch.tensor([[-0.1, 0.1, 0.0]], dtype=torch.float64).expand(2, 3))


def test_layers_of_aid_are_those_of_the_discriminator_where_left_out():
    net = nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2)).eval()
    judge = Discriminator([3, 27], layers=["1", "2"], width=4)
    defense, x = AIDPurifier(net, judge), torch.rand(2, 1, 4, 4)
    assert defense.layers == ("1", "2")
    torch.testing.assert_close(defense.loss(x), judge(net[:2](x), net[:3](x)).sigmoid())
    for layers in (None, [], 1, "1, fc", ["1", "fc"]):
        with pytest.raises(InvalidArgumentError, match="layers: got"):
            AIDPurifier(net, Discriminator([2]), layers=layers)
    with pytest.raises(ModelError, match="discriminator: got activations"):
        AIDPurifier(net, judge, layers=["1"])(x)
    with pytest.raises(ModelError, match=r"discriminator: returned shape \(2, 27\)"):
        AIDPurifier(net, nn.Identity(), layers=["2"])(x)
