"""What holds for a random defense, for BPDA and for EoT alike: rows, types, gradients, memory, hosts behind them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from robust_ext import BPDA, EoT
from robust_ext.attacks._common.objectives import cross_entropy
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.models.bpda import trajectory_gradient
from robust_ext.models.wrapping import PaddedClasses
from tests.models.cases import Descent, NoisyRounding, Rounding, art_classifier, data, held_by, network, quantise

LABELS = torch.tensor([0, 2, 1, 0, 1])
COTANGENT = torch.randn(4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def fixed(net, **settings):
    defense = Descent(net, steps=2, seed=0, **settings)
    defense.fixed = True
    return defense


WRAPPED = {
    "defense": fixed,
    "checkpoint": lambda net: fixed(net, checkpoint=True),
    **{
        f"bpda-{backward}": lambda net, backward=backward: BPDA(fixed(net), backward=backward)
        for backward in ("identity", "frozen", "trajectory", "unrolled")
    },
    "bpda-checkpoint": lambda net: BPDA(fixed(net), backward="unrolled", checkpoint=True),
    "bpda-substitute": lambda net: BPDA(fixed(net), backward=net),
    "bpda-preprocessor": lambda net: nn.Sequential(BPDA(quantise), BPDA(net, backward=net)),
    **{
        f"eot-{gradient}-{chunk}": lambda net, gradient=gradient, chunk=chunk: EoT(
            fixed(net), draws=3, chunk=chunk, gradient=gradient, seed=0, fixed=True
        )
        for gradient in ("mean", "logits", "softmax")
        for chunk in (1, 2, 3)
    },
    "eot-bpda": lambda net: EoT(BPDA(fixed(net)), draws=2, seed=0, fixed=True),
}
EACH = pytest.mark.parametrize("name", WRAPPED)


def pulled(module, x):
    x = x.detach().requires_grad_()
    found: Tensor
    (found,) = torch.autograd.grad(module(x), x, COTANGENT.to(module(x)))
    return found


@EACH
def test_zero_rows_one_row_and_other_types(name):
    module = WRAPPED[name](network())
    for rows in (0, 1):
        x = data(rows).requires_grad_()
        assert module(x).shape == (rows, 3)
        assert torch.autograd.grad(module(x).sum(), x)[0].shape == (rows, 2, 3)
        if isinstance(module, EoT):
            result = module.value_and_gradient(x, LABELS[:rows], cross_entropy)
            assert result.gradient.shape == x.shape
            assert result.losses.shape == (rows,)
    if name not in ("bpda-substitute", "bpda-preprocessor"):
        # The network's type is that of its parameters.
        double = pulled(module, data(4, torch.float64))
        assert double.dtype == torch.float64
        torch.testing.assert_close(double.float(), pulled(module, data(4)))
    half = WRAPPED[name](network(torch.bfloat16))
    assert half(data(4, torch.bfloat16)).dtype == torch.bfloat16
    assert bool(torch.isfinite(pulled(half, data(4, torch.bfloat16))).all())


@EACH
def test_parameters_keep_their_gradients(name):
    net = network(torch.float64)
    given = torch.full_like(net[1].weight, 7.0)
    module, x = WRAPPED[name](net), data(4, torch.float64).requires_grad_()
    for existing in (None, given):
        net[1].weight.grad = existing
        if name in ("defense", "checkpoint"):
            # A defense itself is differentiated by whoever trains it.
            assert bool(torch.autograd.grad(module(x).sum(), x)[0].abs().sum() > 0)
        else:
            torch.autograd.backward(module(x).sum())
            assert x.grad is not None
            assert bool(x.grad.abs().sum() > 0)
            assert not module(data(4, torch.float64)).requires_grad
        if isinstance(module, EoT):
            module.value_and_gradient(data(4, torch.float64), LABELS[:4], cross_entropy)
        with torch.no_grad():
            module(x)
        assert net[1].weight.grad is existing
    assert bool((given == 7).all())
    assert all(p.grad is None for key, p in net.named_parameters() if key != "1.weight")
    assert all(p.requires_grad for p in net.parameters())


@EACH
def test_an_output_can_be_used_and_differentiated_many_times(name):
    module, x = WRAPPED[name](network(torch.float64)), data(4, torch.float64).requires_grad_()
    single = pulled(module, x)
    (twice,) = torch.autograd.grad([module(x), module(x)], x, [COTANGENT, COTANGENT], retain_graph=True)
    torch.testing.assert_close(twice, 2 * single)
    out = module(x)
    torch.testing.assert_close(out, module(x.detach()))
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(out, x, COTANGENT, retain_graph=True)[0], single)
    if name in ("defense", "checkpoint"):
        return
    with torch.no_grad():
        # Whoever changes the input in place, the gradient is that of what was sent.
        x.zero_()
    torch.testing.assert_close(torch.autograd.grad(out, x, COTANGENT)[0], single)


@EACH
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_hosts_may_switch_gradients_off(name, mode):
    """All is under no_grad, and the step that needs a gradient alone is not."""
    module = WRAPPED[name](network(torch.float64))
    expected = module(data(4, torch.float64)).detach()
    with mode():
        found = module(data(4, torch.float64))
        assert not found.requires_grad
        torch.testing.assert_close(found, expected)
        with torch.inference_mode(False), torch.enable_grad():
            leaf = data(4, torch.float64).requires_grad_()
            (gradient,) = torch.autograd.grad(module(leaf).sum(), leaf)
    assert bool((gradient != 0).flatten(1).any(1).all())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("backward", [None, "identity", "trajectory", "unrolled"])
def test_gradients_come_where_the_caller_has_switched_them_off(mode, backward):
    defense, x = Descent(network(), steps=2, seed=0), data(5)
    module = defense if backward is None else BPDA(defense, backward=backward)

    def found():
        averaged = EoT(module, draws=2, seed=3).value_and_gradient(x, LABELS, cross_entropy)
        along = trajectory_gradient(defense, x, LABELS, cross_entropy, seeds=torch.arange(5))
        return [averaged.losses, averaged.gradient, along]

    wanted = found()
    with mode():
        got = found()
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)
        assert bool((one != 0).any())
    assert x.grad is None
    assert all(parameter.grad is None for parameter in defense.parameters())


def test_gradients_of_forty_steps_hold_one_step():
    defense = Descent(network(width=64), steps=40, seed=0)
    one, readout = held_by(BPDA(defense.with_steps(1), backward="unrolled")), held_by(network(width=64))
    assert held_by(BPDA(defense, backward="unrolled")) > 20 * one
    assert held_by(BPDA(defense, backward="unrolled", checkpoint=True)) <= 1.1 * one
    assert held_by(defense) > 20 * held_by(defense.with_steps(1))
    assert held_by(defense.with_steps(40, checkpoint=True)) <= 2 * held_by(defense.with_steps(1, checkpoint=True))
    # One point's readout after the other, and one inner gradient before that.
    for backward in ("identity", "frozen", "trajectory"):
        assert held_by(BPDA(defense, backward=backward)) <= 1.1 * readout


def test_a_hundred_draws_of_several_steps_hold_what_two_do():
    def held(draws, *, checkpoint=False):
        module = BPDA(Descent(network(width=64), steps=3), backward="unrolled", checkpoint=checkpoint)
        return held_by(EoT(module, draws=draws, seed=0))

    assert held(100) == held(2)
    assert held(2, checkpoint=True) < held(2) / 2


class Quantised(nn.Module):
    def forward(self, x):
        return quantise(x)


def by_foolbox(module, x, labels):
    foolbox = pytest.importorskip("foolbox")
    attack = foolbox.attacks.LinfPGD(steps=15, rel_stepsize=0.1, random_start=False)
    return attack(foolbox.PyTorchModel(module, bounds=(0, 1)), x, labels, epsilons=0.3)[1]


def by_art(module, x, labels):
    evasion = pytest.importorskip("art.attacks.evasion")
    attack = evasion.ProjectedGradientDescent(
        art_classifier(module), eps=0.3, eps_step=0.03, max_iter=15, verbose=False
    )
    return torch.from_numpy(attack.generate(x.numpy(), np.eye(10, dtype=np.float32)[labels.numpy()]))


@pytest.mark.parametrize("attacked", [by_foolbox, by_art])
@pytest.mark.parametrize("kind", ["quantiser", "purifier", "random"])
def test_hosts_break_what_rounds_with_them_and_not_without(kind, attacked):
    net, (x, _) = digits_network(), load_dataset("digits").take(range(40))
    defense = (NoisyRounding if kind == "random" else Rounding)(net, steps=1 if kind == "random" else 3)
    judged = nn.Sequential(Quantised(), net).eval() if kind == "quantiser" else defense
    with torch.no_grad():
        labels = judged(x).argmax(1)

    def robust(points):
        with defense.seeded(99), torch.no_grad():
            return float(torch.stack([judged(points).argmax(1) == labels for _ in range(5)]).float().mean())

    wrapped = {
        "quantiser": [nn.Sequential(BPDA(quantise), net).eval()],
        "purifier": [BPDA(defense, backward=backward) for backward in ("identity", "frozen", "trajectory")],
        "random": [
            EoT(BPDA(defense), draws=4, chunk=chunk, gradient=gradient, seed=0)
            for gradient, chunk in (("mean", None), ("softmax", 4))
        ],
    }
    bare = EoT(defense, draws=4, seed=0) if kind == "random" else judged
    assert robust(attacked(bare, x, labels)) > 0.95
    for module in wrapped[kind]:
        assert robust(attacked(module, x, labels)) < 0.02
    assert all(p.grad is None or not bool(p.grad.isnan().any()) for p in net.parameters())


SCALES = st.sampled_from([1e-6, 1e-3, 1.0, 30.0, 1e3, 1e6, 1e9])


def logits(seed, scale, shift=0.0):
    return torch.randn(5, 2, generator=torch.Generator().manual_seed(seed)) * scale + shift


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), SCALES, st.sampled_from([0.0, -1e3, 1e5]), st.integers(2, 12))
def test_added_classes_never_win(seed, scale, shift, classes):
    z = logits(seed, scale, shift)
    padded = PaddedClasses(nn.Identity(), classes=classes)(z)
    assert padded.shape == (5, classes)
    assert torch.equal(padded[:, :2], z)
    assert torch.equal(padded.argmax(1), z.argmax(1))
    if classes > 2:
        assert bool((padded[:, 2:].amax(1) <= z.amin(1) - 100).all())


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), SCALES, st.integers(3, 12))
def test_cross_entropy_and_its_gradient_are_the_same_to_the_last_bit(seed, scale, classes):
    z = logits(seed, scale)
    y = torch.tensor([0, 1, 0, 1, 0])

    def value_and_gradient(module):
        x = z.clone().requires_grad_()
        loss = nn.functional.cross_entropy(module(x), y, reduction="none")
        return loss.detach(), torch.autograd.grad(loss.sum(), x)[0]

    plain, padded = value_and_gradient(nn.Identity()), value_and_gradient(PaddedClasses(nn.Identity(), classes=classes))
    assert torch.equal(plain[0], padded[0])
    assert torch.equal(plain[1], padded[1])


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1e-2, 1.0, 30.0]))
def test_the_dlr_of_two_classes_rises_with_the_margin(seed, scale):
    z = logits(seed, scale).double().requires_grad_()
    padded = PaddedClasses(nn.Identity(), classes=3)(z)
    ordered = padded.sort(1, descending=True).values
    dlr = -(padded[:, 0] - padded[:, 1]) / (ordered[:, 0] - ordered[:, 2])
    margin = z[:, 1] - z[:, 0]
    below = 110 + z.detach().abs().amax(1) / 1000
    torch.testing.assert_close(dlr, margin / (margin.abs() + below))
    (gradient,) = torch.autograd.grad(dlr.sum(), z)
    # Up for the other class, down for the true one, by the same amount: the direction of the margin's gradient.
    assert bool((gradient[:, 1] > 0).all())
    torch.testing.assert_close(gradient[:, 0], -gradient[:, 1])
