from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robust_ext.attacks._common.objectives import cross_entropy
from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.datasets.load import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.adaptive_solution import Solution
from robust_ext.models.bpda import BPDA, trajectory_gradient
from robust_ext.models.purifier import Purifier
from robust_ext.models.row_rng import RowRNG

# A linear classifier without a bias, and a purifier whose two steps scale the input: a chain rule by hand.
WEIGHT = torch.tensor([[1.0, -2.0, 0.5], [0.0, 1.0, 3.0]], dtype=torch.float64)
CONTRACTION = 0.6


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(WEIGHT.clone())

    def forward(self, x: Tensor) -> Tensor:
        return (x.square() / 2) @ self.weight.T


class Shrink(Purifier):
    """Each step multiplies by 0.6 and rounds a little noise on, which no gradient flows through."""

    random = True

    def step(self, point: Tensor, *, x: Tensor, number: int, state: Mapping[str, Tensor], rng: RowRNG) -> Tensor:
        return CONTRACTION * point + (0.1 * rng.normal(x, "step", number)).round(decimals=2)


class Blocking(Shrink):
    """Hides its gradient."""

    def step(self, point: Tensor, *, x: Tensor, number: int, state: Mapping[str, Tensor], rng: RowRNG) -> Tensor:
        return super().step(point, x=x, number=number, state=state, rng=rng).detach()


class Controlled(AdaptiveDefense):
    """Adds a control to the hidden layer: the input as it is, the state found from it."""

    def solve(self, x: Tensor, rng: RowRNG, *, record: bool) -> Solution:
        return Solution(x, (x,), {"control": -0.5 * x.sin()})

    def readout(self, point: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        return super().readout(point + state["control"], {})


def data(rows: int = 4) -> Tensor:
    return torch.rand(rows, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


COTANGENT = torch.tensor([[1.0, -0.5], [0.3, 2.0], [0.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)


def pulled(module: nn.Module, x: Tensor, cotangent: Tensor = COTANGENT) -> Tensor:
    x = x.clone().requires_grad_()
    found: Tensor
    (found,) = torch.autograd.grad(module(x), x, cotangent)
    return found


def by_hand(points: Tensor) -> Tensor:
    """The gradient of the linear classifier on half squares: the point times the cotangent through the weights."""
    return points * (COTANGENT @ WEIGHT)


@pytest.mark.parametrize("kind", [Shrink, Blocking])
def test_gradients_of_two_steps_are_those_by_hand(kind: type[Shrink]) -> None:
    defense, x = kind(Linear(), steps=2, seed=3), data()
    with defense.seeded(3):
        trace = defense.trace(x)
    one, two = trace.iterates[1], trace.final
    wanted = {
        "identity": by_hand(two),
        "frozen": by_hand(two),
        "trajectory": (by_hand(one) + by_hand(two)) / 2,
    }
    for backward, gradient in wanted.items():
        module = BPDA(defense, backward=backward)
        with defense.seeded(3):
            torch.testing.assert_close(pulled(module, x), gradient)
        with defense.seeded(3):
            assert torch.equal(module(x.clone().requires_grad_()), trace.logits)
        with defense.seeded(3), torch.no_grad():
            assert torch.equal(module(x), trace.logits)
    for checkpoint in (False, True):
        module = BPDA(defense, backward="unrolled", checkpoint=checkpoint)
        with defense.seeded(3):
            if kind is Shrink:
                torch.testing.assert_close(pulled(module, x), by_hand(two) * CONTRACTION**2)
            else:
                with pytest.raises(ModelError, match="no gradient comes back to the input"):
                    pulled(module, x)


def test_fewer_steps_shape_the_gradient_and_not_the_value() -> None:
    defense, x = Shrink(Linear(), steps=3), data()
    with defense.seeded(1):
        trace = defense.trace(x)
    one, two = trace.iterates[1:3]
    wanted = {
        "identity": by_hand(two),
        "frozen": by_hand(two),
        "trajectory": (by_hand(one) + by_hand(two)) / 2,
        "unrolled": by_hand(two) * CONTRACTION**2,
    }
    for backward, gradient in wanted.items():
        module = BPDA(defense, backward=backward, steps=2)
        with defense.seeded(1):
            torch.testing.assert_close(pulled(module, x), gradient)
        with defense.seeded(1):
            assert torch.equal(module(x.clone().requires_grad_()), trace.logits)
    with defense.seeded(1):
        torch.testing.assert_close(pulled(BPDA(defense, steps=0), x), by_hand(x))


def test_a_frozen_state_is_held() -> None:
    defense, x = Controlled(Linear()), data()
    moved = x - 0.5 * x.sin()
    for backward in ("identity", "frozen", "trajectory"):
        torch.testing.assert_close(pulled(BPDA(defense, backward=backward), x), by_hand(moved))
    torch.testing.assert_close(pulled(BPDA(defense, backward="unrolled"), x), by_hand(moved) * (1 - 0.5 * x.cos()))

    class Scaled(Controlled):
        """Holds the share of the input that is left."""

        def frozen(self, x: Tensor, *, inputs: Tensor, solution: Solution) -> Tensor:
            return self.logits(x * (1 + solution.state["control"] / inputs), {"control": torch.zeros_like(x)})

    share = moved / x
    torch.testing.assert_close(pulled(BPDA(Scaled(Linear()), backward="frozen"), x), by_hand(moved) * share)


def test_the_frozen_final_point_is_met_to_the_last_bit() -> None:
    class Jump(Purifier):
        def step(self, point: Tensor, *, x: Tensor, number: int, state: Mapping[str, Tensor], rng: RowRNG) -> Tensor:
            return point * 1e-3 + 1e-5

    net = nn.Linear(3, 2, bias=False)
    defense, x = Jump(net, steps=1), data(200).float()
    found = defense.solution(x, seeds=torch.zeros(200, dtype=torch.int64))
    assert torch.equal(defense.frozen(x, inputs=x, solution=found), net(found.final))


def substitute(x: Tensor) -> Tensor:
    return torch.stack([x[:, 0] * x[:, 1], (2 * x[:, 2]).exp()], 1)


class Substitute(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return substitute(x)


@pytest.mark.parametrize("made", [lambda: substitute, Substitute])
def test_a_substitutes_gradient_is_that_of_finite_differences(made: Callable[[], Any]) -> None:
    x = data()
    step = 1e-6
    slopes = [
        ((substitute(x + step * unit) - substitute(x - step * unit)) / (2 * step) * COTANGENT).sum(1)
        for unit in torch.eye(3, dtype=torch.float64)
    ]
    wanted = torch.stack(slopes, 1)

    def hard(x: Tensor) -> Tensor:
        return x[:, :2].round()

    for wrapped in (hard, Shrink(Linear(), steps=2)):
        module = BPDA(wrapped, backward=made())
        torch.testing.assert_close(pulled(module, x), wanted, rtol=1e-7, atol=1e-8)
    assert torch.equal(BPDA(hard, backward=made())(x.clone().requires_grad_()), x[:, :2].round())


def test_defenses_in_a_substitute_draw_as_the_defense_did() -> None:
    defense, x = Blocking(Linear(), steps=2), data()
    inner = BPDA(defense, backward="trajectory")
    with defense.seeded(4):
        wanted = pulled(inner, x)
    with defense.seeded(4):
        torch.testing.assert_close(pulled(BPDA(defense, backward=inner), x), wanted)


def test_the_trajectory_of_a_loss() -> None:
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


@pytest.mark.parametrize("backward", ["identity", "frozen", "trajectory", "unrolled", substitute])
def test_parameters_keep_their_gradients(backward: Any) -> None:
    net = Linear()
    given = torch.full_like(net.weight, 7.0)
    for existing in (None, given):
        net.weight.grad = existing
        module = BPDA(Shrink(net, steps=2), backward=backward)
        x = data().requires_grad_()
        torch.autograd.backward(module(x).sum())
        assert x.grad is not None
        assert bool(x.grad.abs().sum() > 0)
        assert net.weight.grad is existing
    assert bool((given == 7).all())
    # A call without a gradient leaves no way to the parameters either.
    assert not module(data()).requires_grad


@pytest.mark.parametrize("backward", ["identity", "frozen", "trajectory", "unrolled", substitute])
def test_an_output_can_be_used_and_differentiated_many_times(backward: Any) -> None:
    module = BPDA(Shrink(Linear(), steps=2, seed=0), backward=backward)
    module.wrapped.fixed = True  # type: ignore[union-attr, assignment]
    single = pulled(module, data())
    x = data().requires_grad_()
    first, second = module(x), module(x)
    (twice,) = torch.autograd.grad([first, second], x, [COTANGENT, COTANGENT], retain_graph=True)
    torch.testing.assert_close(twice, 2 * single)
    out = module(x)
    for _ in range(2):
        (again,) = torch.autograd.grad(out, x, COTANGENT, retain_graph=True)
        torch.testing.assert_close(again, single)
    with torch.no_grad():
        # Whoever changes the input in place, the gradient is that of what was sent.
        x.zero_()
    torch.testing.assert_close(torch.autograd.grad(out, x, COTANGENT)[0], single)


def test_a_hosts_switched_off_gradients() -> None:
    module = BPDA(Shrink(Linear(), steps=2, seed=0), backward="identity")
    with torch.no_grad():
        x = data()
        assert not module(x.requires_grad_()).requires_grad
        with torch.enable_grad():
            leaf = data().requires_grad_()
            (found,) = torch.autograd.grad(module(leaf), leaf, COTANGENT)
    assert bool((found.abs().sum(1) > 0).all())


def quantise(x: Tensor) -> Tensor:
    return (x * 15).round() / 15


@pytest.fixture(scope="module")
def digits() -> tuple[nn.Module, Tensor, Tensor]:
    """The network behind a quantiser, and inputs with the labels it gives them."""
    network = digits_network()
    inputs, _ = load_dataset("digits").take(range(60))
    labels = network(quantise(inputs)).argmax(1)
    return network, inputs, labels


@pytest.mark.parametrize(("wrap", "broken"), [(False, False), (True, True)])
def test_foolbox_breaks_a_quantiser_with_it_and_not_without(
    digits: tuple[nn.Module, Tensor, Tensor], wrap: bool, broken: bool
) -> None:
    foolbox = pytest.importorskip("foolbox")
    network, inputs, labels = digits
    defended = nn.Sequential(BPDA(quantise) if wrap else _Function(quantise), network).eval()
    model = foolbox.PyTorchModel(defended, bounds=(0, 1))
    attack = foolbox.attacks.LinfPGD(steps=20, rel_stepsize=0.1, random_start=False)
    _, found, _ = attack(model, inputs, labels, epsilons=0.3)
    hard = network(quantise(found)).argmax(1)
    share = float((hard != labels).float().mean())
    assert share == 1.0 if broken else share == 0.0
    assert all(p.grad is None or not bool(p.grad.isnan().any()) for p in network.parameters())


@pytest.mark.parametrize(("wrap", "broken"), [(False, False), (True, True)])
def test_art_breaks_a_quantiser_with_it_and_not_without(
    digits: tuple[nn.Module, Tensor, Tensor], wrap: bool, broken: bool
) -> None:
    classification = pytest.importorskip("art.estimators.classification")
    evasion = pytest.importorskip("art.attacks.evasion")
    network, inputs, labels = digits
    defended = nn.Sequential(BPDA(quantise) if wrap else _Function(quantise), network).eval()
    classifier = classification.PyTorchClassifier(
        defended,
        loss=nn.CrossEntropyLoss(),
        input_shape=(1, 8, 8),
        nb_classes=10,
        clip_values=(0, 1),
        device_type="cpu",
    )
    attack = evasion.ProjectedGradientDescent(classifier, eps=0.3, eps_step=0.03, max_iter=20, verbose=False)
    found = torch.from_numpy(attack.generate(inputs.numpy(), np.eye(10, dtype=np.float32)[labels.numpy()]))
    share = float((network(quantise(found)).argmax(1) != labels).float().mean())
    assert share == 1.0 if broken else share == 0.0


class _Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class RoundedPurifier(Purifier):
    """Three steps towards the middle that end in a quantiser, as a defense of the digits network."""

    def step(self, point: Tensor, *, x: Tensor, number: int, state: Mapping[str, Tensor], rng: RowRNG) -> Tensor:
        return quantise(point + 0.05 * (0.5 - point).sign())


@pytest.mark.parametrize("backward", ["identity", "frozen", "trajectory"])
def test_foolbox_breaks_a_purifier(digits: tuple[nn.Module, Tensor, Tensor], backward: str) -> None:
    foolbox = pytest.importorskip("foolbox")
    network, inputs, _ = digits
    defense = RoundedPurifier(network, steps=3)
    labels = defense(inputs).argmax(1)
    attack = foolbox.attacks.LinfPGD(steps=20, rel_stepsize=0.1, random_start=False)
    shares = []
    for module in (defense, BPDA(defense, backward=backward)):
        _, found, _ = attack(foolbox.PyTorchModel(module, bounds=(0, 1)), inputs, labels, epsilons=0.3)
        shares.append(float((defense(found).argmax(1) != labels).float().mean()))
    assert shares == [0.0, 1.0]


@pytest.mark.parametrize("backward", ["identity", "frozen", "trajectory", "unrolled", "substitute"])
def test_zero_rows_one_row_and_other_types(backward: str) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 2)).eval()
    chosen: Any = net if backward == "substitute" else backward
    module = BPDA(Shrink(net, steps=2), backward=chosen)
    for rows in (0, 1):
        x = torch.rand(rows, 2, 3).requires_grad_()
        out = module(x)
        assert out.shape == (rows, 2)
        assert torch.autograd.grad(out.sum(), x)[0].shape == (rows, 2, 3)
    if backward != "substitute":
        x = torch.rand(3, 2, 3, dtype=torch.float64).requires_grad_()
        (gradient,) = torch.autograd.grad(module(x).sum(), x)
        assert gradient.dtype == torch.float64
        assert bool((gradient != 0).any())
    half = torch.rand(3, 2, dtype=torch.bfloat16).requires_grad_()
    (gradient,) = torch.autograd.grad(BPDA(quantise)(half).sum(), half)
    assert torch.equal(gradient, torch.ones_like(half))


def test_what_the_identity_returns_is_not_its_argument() -> None:
    x = data().requires_grad_()
    out = BPDA(lambda x: x)(x)
    assert out.data_ptr() != x.data_ptr()
    assert torch.equal(out, x)


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(InvalidArgumentError, match="forward: got int"):
        BPDA(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="backward: got best"):
        BPDA(torch.round, backward="best")
    for settings in ({"backward": "trajectory"}, {"steps": 2}, {"checkpoint": True}):
        with pytest.raises(InvalidArgumentError, match="an AdaptiveDefense for that"):
            BPDA(torch.round, **settings)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="steps: got -1"):
        BPDA(Shrink(Linear(), steps=2), steps=-1)
    x = data().requires_grad_()
    with pytest.raises(ModelError, match="give a differentiable substitute"):
        BPDA(lambda x: x[:, :2])(x)
    out = BPDA(torch.round, backward=lambda x: x[:, :2])(x)
    with pytest.raises(ModelError, match=r"substitute returned shape \(4, 2\)"):
        torch.autograd.grad(out.sum(), x)
