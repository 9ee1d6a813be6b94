import pytest
import torch
from torch import Tensor, nn

from robust_ext import BPDA, ModelError, Purifier
from robust_ext.attacks._common.objectives import cross_entropy
from robust_ext.models.bpda import trajectory_gradient
from tests.models.cases import Controlled

# A linear classifier without a bias, and a purifier whose two steps scale the input: a chain rule by hand.
WEIGHT = torch.tensor([[1.0, -2.0, 0.5], [0.0, 1.0, 3.0]], dtype=torch.float64)
CONTRACTION = 0.6


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(WEIGHT.clone())

    def forward(self, x):
        return (x.square() / 2) @ self.weight.T


class Shrink(Purifier):
    """Each step multiplies by 0.6 and rounds a little noise on, which no gradient flows through."""

    random = True

    def step(self, point, *, x, number, state, rng):
        return CONTRACTION * point + (0.1 * rng.normal(x, "step", number)).round(decimals=2)


class Blocking(Shrink):
    """Hides its gradient."""

    def step(self, point, *, x, number, state, rng):
        return super().step(point, x=x, number=number, state=state, rng=rng).detach()


def data(rows=4):
    return torch.rand(rows, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


COTANGENT = torch.tensor([[1.0, -0.5], [0.3, 2.0], [0.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)


def pulled(module, x, cotangent=COTANGENT):
    x = x.clone().requires_grad_()
    found: Tensor
    (found,) = torch.autograd.grad(module(x), x, cotangent)
    return found


def by_hand(points):
    """The gradient of the linear classifier on half squares: the point times the cotangent through the weights."""
    return points * (COTANGENT @ WEIGHT)


@pytest.mark.parametrize("fewer", [False, True])
@pytest.mark.parametrize("kind", [Shrink, Blocking])
def test_gradients_of_two_steps_are_those_by_hand(kind, fewer):
    """Of the defense's own two steps, or of two where it has three, which shape the gradient and not the value."""
    defense, x = kind(Linear(), steps=3 if fewer else 2, seed=3), data()
    steps = {"steps": 2} if fewer else {}
    with defense.seeded(3):
        trace = defense.trace(x)
    one, two = trace.iterates[1:3]
    wanted = {"identity": by_hand(two), "frozen": by_hand(two), "trajectory": (by_hand(one) + by_hand(two)) / 2}
    for backward, gradient in wanted.items():
        module = BPDA(defense, backward=backward, **steps)
        with defense.seeded(3):
            torch.testing.assert_close(pulled(module, x), gradient)
        with defense.seeded(3):
            assert torch.equal(module(x.clone().requires_grad_()), trace.logits)
        with defense.seeded(3), torch.no_grad():
            assert torch.equal(module(x), trace.logits)
    for checkpoint in (False, True):
        module = BPDA(defense, backward="unrolled", checkpoint=checkpoint, **steps)
        with defense.seeded(3):
            if kind is Shrink:
                torch.testing.assert_close(pulled(module, x), by_hand(two) * CONTRACTION**2)
            else:
                with pytest.raises(ModelError, match="no gradient comes back to the input"):
                    pulled(module, x)
    with defense.seeded(3):
        torch.testing.assert_close(pulled(BPDA(defense, steps=0), x), by_hand(x))


def test_a_frozen_state_is_held():
    defense, x = Controlled(Linear()), data()
    moved = x - 0.5 * x.sin()
    for backward in ("identity", "frozen", "trajectory"):
        torch.testing.assert_close(pulled(BPDA(defense, backward=backward), x), by_hand(moved))
    torch.testing.assert_close(pulled(BPDA(defense, backward="unrolled"), x), by_hand(moved) * (1 - 0.5 * x.cos()))

    class Scaled(Controlled):
        """Holds the share of the input that is left."""

        def frozen(self, x, *, inputs, solution):
            return self.logits(x * (1 + solution.state["control"] / inputs), {"control": torch.zeros_like(x)})

    share = moved / x
    torch.testing.assert_close(pulled(BPDA(Scaled(Linear()), backward="frozen"), x), by_hand(moved) * share)


def test_the_frozen_final_point_is_met_to_the_last_bit():
    class Jump(Purifier):
        def step(self, point, *, x, number, state, rng):
            return point * 1e-3 + 1e-5

    net = nn.Linear(3, 2, bias=False)
    defense, x = Jump(net, steps=1), data(200).float()
    found = defense.solution(x, seeds=torch.zeros(200, dtype=torch.int64))
    assert torch.equal(defense.frozen(x, inputs=x, solution=found), net(found.final))


def substitute(x):
    return torch.stack([x[:, 0] * x[:, 1], (2 * x[:, 2]).exp()], 1)


class Substitute(nn.Module):
    def forward(self, x):
        return substitute(x)


@pytest.mark.parametrize("made", [lambda: substitute, Substitute])
def test_a_substitutes_gradient_is_that_of_finite_differences(made):
    x = data()
    step = 1e-6
    slopes = [
        ((substitute(x + step * unit) - substitute(x - step * unit)) / (2 * step) * COTANGENT).sum(1)
        for unit in torch.eye(3, dtype=torch.float64)
    ]
    wanted = torch.stack(slopes, 1)

    def hard(x):
        return x[:, :2].round()

    for wrapped in (hard, Shrink(Linear(), steps=2)):
        module = BPDA(wrapped, backward=made())
        torch.testing.assert_close(pulled(module, x), wanted, rtol=1e-7, atol=1e-8)
    assert torch.equal(BPDA(hard, backward=made())(x.clone().requires_grad_()), x[:, :2].round())


def test_the_trajectory_of_a_loss():
    defense, x = Blocking(Linear(), steps=2), data()
    labels = torch.tensor([0, 1, 1, 0])
    trace = defense.trace(x, seeds=[1, 2, 3, 4])
    wanted = torch.zeros_like(x)
    for point in trace.iterates[1:]:
        # The cross-entropy's gradient by the logits is the softmax without the label.
        error = (point.square() / 2 @ WEIGHT.T).softmax(1) - nn.functional.one_hot(labels, 2)
        wanted += point * (error @ WEIGHT) / 2
    found = trajectory_gradient(defense, x, labels, cross_entropy, seeds=trace.seeds)
    torch.testing.assert_close(found, wanted)
    assert all(p.grad is None for p in defense.parameters())
    empty = trajectory_gradient(defense, x[:0], labels[:0], cross_entropy)
    assert empty.shape == (0, 3)


def test_what_the_identity_returns_is_not_its_argument():
    x = data().requires_grad_()
    out = BPDA(lambda x: x)(x)
    assert out.data_ptr() != x.data_ptr()
    assert torch.equal(out, x)
