"""A random defense, BPDA and EoT: rows, types, gradients, memory and hosts; wrong arguments raise by name."""

import random
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from robust_ext import BPDA, EoT, InvalidArgumentError, ModelError, Purifier, SplitError, as_defense
from robust_ext.attacks._common.objectives import cross_entropy, margin
from robust_ext.models.adaptive_features import split_defense
from robust_ext.models.binarized import BinarizedClassifier
from robust_ext.models.bpda import trajectory_gradient
from robust_ext.models.eot import GRADIENTS, VALUES
from robust_ext.models.features import split
from robust_ext.models.readouts.linear import fit_directions
from robust_ext.models.wrapping import PaddedClasses
from robust_ext.registry.readout import as_readout
from tests.attacks.problems import Lambda
from tests.models.cases import Controlled, Descent, Net, Probable, data, network, quantise

LABELS = torch.tensor([0, 2, 1, 0, 1])
COTANGENT = torch.randn(4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def fixed(net, **settings):
    defense = Descent(net, steps=2, seed=0, **settings)
    defense.fixed = True
    return defense


def averaging(gradient, chunk):
    return lambda net: EoT(fixed(net), draws=3, chunk=chunk, gradient=gradient, seed=0, fixed=True)


def along(backward):
    return lambda net: BPDA(fixed(net), backward=backward)


WRAPPED = {
    "defense": fixed,
    "checkpoint": lambda net: fixed(net, checkpoint=True),
    **{f"bpda-{backward}": along(backward) for backward in ("identity", "frozen", "trajectory", "unrolled")},
    "bpda-checkpoint": lambda net: BPDA(fixed(net), backward="unrolled", checkpoint=True),
    "bpda-substitute": lambda net: BPDA(fixed(net), backward=net),
    "bpda-preprocessor": lambda net: nn.Sequential(BPDA(quantise), BPDA(net, backward=net)),
    **{f"eot-{gradient}-{chunk}": averaging(gradient, chunk) for gradient in GRADIENTS for chunk in (1, 2, 3)},
    "eot-bpda": lambda net: EoT(BPDA(fixed(net)), draws=2, seed=0, fixed=True),
}
EACH = pytest.mark.parametrize("name", WRAPPED)


def pulled(module, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(module(x), x, COTANGENT.to(module(x)))[0]


@EACH
def test_zero_rows_one_row_and_other_types(name):
    module = WRAPPED[name](network())
    for rows in (0, 1):
        x = data(rows).requires_grad_()
        assert module(x).shape == (rows, 3)
        assert torch.autograd.grad(module(x).sum(), x)[0].shape == (rows, 2, 3)
        if isinstance(module, EoT):
            result = module.value_and_gradient(x, LABELS[:rows], cross_entropy)
            assert (result.gradient.shape, result.losses.shape) == (x.shape, (rows,))
    if name not in ("bpda-substitute", "bpda-preprocessor"):
        # The network's type is that of its parameters.
        double = pulled(module, data(4, torch.float64))
        torch.testing.assert_close(double, pulled(module, data(4)).double(), rtol=1.3e-6, atol=1e-5)
    half = WRAPPED[name](network(torch.bfloat16))
    assert half(data(4, torch.bfloat16)).dtype == torch.bfloat16
    assert bool(torch.isfinite(pulled(half, data(4, torch.bfloat16))).all())


@EACH
def test_parameters_keep_their_gradients_and_outputs_can_be_used_again(name):
    net = network(torch.float64)
    given = torch.full_like(net[1].weight, 7.0)
    module, x = WRAPPED[name](net), data(4, torch.float64).requires_grad_()
    # A defense itself is differentiated by whoever trains it.
    of_defense = name in ("defense", "checkpoint")
    for existing in (None, given):
        net[1].weight.grad = existing
        if not of_defense:
            torch.autograd.backward(module(x).sum())
            assert float(x.grad.abs().sum()) > 0
            assert not module(data(4, torch.float64)).requires_grad
        if isinstance(module, EoT):
            module.value_and_gradient(data(4, torch.float64), LABELS[:4], cross_entropy)
        with torch.no_grad():
            module(x)
        assert net[1].weight.grad is existing
    assert bool((given == 7).all())
    assert all(p.grad is None for key, p in net.named_parameters() if key != "1.weight")
    assert all(p.requires_grad for p in net.parameters())

    single, out = pulled(module, x), module(x)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(out, x, COTANGENT, retain_graph=True)[0], single)
    if not of_defense:
        with torch.no_grad():
            # Whoever changes the input in place, the gradient is that of what was sent.
            x.zero_()
        torch.testing.assert_close(torch.autograd.grad(out, x, COTANGENT)[0], single)


@EACH
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_hosts_may_switch_gradients_off(name, mode):
    """All is under no_grad, and the step that needs a gradient alone is not."""
    module, x = WRAPPED[name](network(torch.float64)), data(4, torch.float64)
    averaged = EoT(module, draws=2, seed=3, fixed=True)
    expected, wanted = module(x).detach(), averaged.value_and_gradient(x, LABELS[:4], cross_entropy)
    with mode():
        found, got = module(x), averaged.value_and_gradient(x, LABELS[:4], cross_entropy)
        assert not found.requires_grad
        torch.testing.assert_close(found, expected)
        with torch.inference_mode(False), torch.enable_grad():
            gradient = pulled(module, data(4, torch.float64))
        if name == "defense":
            path = trajectory_gradient(module, x, LABELS[:4], cross_entropy, seeds=torch.arange(4))
            assert bool((path != 0).any())
    assert torch.equal(got.losses, wanted.losses)
    assert torch.equal(got.gradient, wanted.gradient)
    assert bool((wanted.gradient != 0).any())
    assert bool((gradient != 0).flatten(1).any(1).all())


class Held:
    """A tensor saved for a backward pass, without its graph, which may keep itself alive by an output that it saves."""

    def __init__(self, tensor):
        self.tensor = tensor.detach()


def held_by(module):
    """The most numbers that graphs hold at any one time of a forward and a backward pass."""
    alive, most = weakref.WeakSet(), 0

    def pack(tensor):
        nonlocal most
        held = Held(tensor)
        alive.add(held)
        most = max(most, sum(one.tensor.numel() for one in alive))
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        x = data(5).requires_grad_()
        (gradient,) = torch.autograd.grad(module(x), x, torch.ones(5, 3))
    assert bool((gradient != 0).flatten(1).any(1).all())
    return most


def test_gradients_of_forty_steps_hold_one_step_and_those_of_a_hundred_draws_two():
    net = network(width=64)
    defense = Descent(net, steps=40, seed=0)
    one, readout = held_by(BPDA(defense.with_steps(1), backward="unrolled")), held_by(net)
    assert held_by(BPDA(defense, backward="unrolled")) > 20 * one
    assert held_by(BPDA(defense, backward="unrolled", checkpoint=True)) <= 1.1 * one
    assert held_by(defense) > 20 * held_by(defense.with_steps(1))
    assert held_by(defense.with_steps(40, checkpoint=True)) <= 2 * held_by(defense.with_steps(1, checkpoint=True))
    # One point's readout after the other, and one inner gradient before that.
    for backward in ("identity", "frozen", "trajectory"):
        assert held_by(BPDA(defense, backward=backward)) <= 1.1 * readout
    few, many = (held_by(EoT(along("unrolled")(net), draws=draws, seed=0)) for draws in (2, 100))
    assert few == many > 1.5 * held_by(EoT(WRAPPED["bpda-checkpoint"](net), draws=2, seed=0))


class Noisy(Purifier):
    """Adds noise, and notes the seeds it was given."""

    random = True

    def __init__(self, classifier):
        super().__init__(classifier, steps=1)
        self.seen = []

    def step(self, point, *, x, number, state, rng):
        self.seen.append(rng.seeds)
        return point + 0.5 * rng.normal(x, "noise")


def singles(defense, x, draws):
    """The logits ``(draws, N, K)`` of the draws that a defense has just been asked for, one by one."""
    seeds = [seed for batch in defense.seen for seed in batch][: draws * len(x)]
    assert len(set(seeds)) == len(seeds)
    return torch.stack([defense.trace(x, seeds=row).logits for row in torch.tensor(seeds).view(draws, len(x))])


def aggregate(name, draws):
    if name == "last":
        return draws[-1]
    return draws.mean(0) if name in ("mean", "logits") else draws.softmax(2).mean(0).log()


@pytest.mark.parametrize("chunk", [None, 2, 5, 9])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_values_and_gradients_are_those_of_single_draws(chunk, value, gradient):
    defense, x = Noisy(network(torch.float64)), data(dtype=torch.float64).requires_grad_()
    averaged = EoT(defense, draws=5, chunk=chunk, gradient=gradient, loss=value, decision="softmax", seed=3)
    out = averaged(x)
    alone = singles(defense, x, 5)
    torch.testing.assert_close(out, aggregate(value, alone))
    calls, (wanted,) = len(defense.seen), torch.autograd.grad(aggregate(gradient, alone), x, COTANGENT)
    for keep in (True, False):
        torch.testing.assert_close(torch.autograd.grad(out, x, COTANGENT, retain_graph=keep)[0], wanted)
    # In one chunk that holds all draws they run once.
    assert (len(defense.seen) == calls) == (chunk in (5, 9))
    # Without a gradient it is the decision's value, of fresh draws.
    defense.seen.clear()
    with torch.no_grad():
        torch.testing.assert_close(averaged(x), aggregate("softmax", singles(defense, x, 5)))
    # And so are losses, of another aggregate, with the logits of the decision.
    labels = LABELS[:4]
    averaged = EoT(defense, draws=5, chunk=chunk, gradient=gradient, loss=value, decision="last", seed=3)
    for loss in (cross_entropy, margin):
        defense.seen.clear()
        found = averaged.value_and_gradient(x.detach(), labels, loss)
        alone = singles(defense, x, 5)
        if gradient == "mean":
            total = torch.stack([loss(logits, labels).sum() for logits in alone]).mean()
        else:
            total = loss(aggregate(gradient, alone), labels).sum()
        torch.testing.assert_close(found.gradient, torch.autograd.grad(total, x)[0])
        torch.testing.assert_close(found.losses, loss(aggregate(value, alone), labels).detach())
        torch.testing.assert_close(found.logits, alone[-1].detach())
        assert not any(tensor.requires_grad for tensor in (found.gradient, found.losses, found.logits))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 20), st.integers(1, 6), st.integers(1, 7), st.integers(1, 4))
def test_draws_depend_on_seed_call_draw_and_row(seed, call, draws, chunk, rows):
    defense, x = Noisy(network(torch.float64)), data(dtype=torch.float64)
    averaged = EoT(defense, draws=draws, seed=seed)
    averaged.draw = call
    first, second = averaged(x), averaged(x)
    assert averaged.draw == call + 2
    assert not torch.equal(first, second)
    with EoT(defense, draws=draws, chunk=chunk).seeded(seed, draw=call + 1) as other:
        torch.testing.assert_close(other(x[:rows]), second[:rows])
    assert other.seed is None
    more = EoT(defense, draws=draws + 1, seed=seed, loss="last", fixed=True)
    torch.testing.assert_close(more(x), more(x), rtol=0, atol=0)


@pytest.mark.parametrize("chunk", [1, 3, 10])
@pytest.mark.parametrize(
    "module", [nn.Dropout(0.5).train(), Lambda(lambda x: x * (torch.rand_like(x) + np.random.rand() + random.random()))]
)
def test_any_module_repeats_its_draws_in_the_backward_pass(module, chunk):
    x = torch.rand(3, 4).add(1).requires_grad_()
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    out = EoT(module, draws=10, chunk=chunk, seed=1)(x)
    (found,) = torch.autograd.grad(out.sum(), x)
    # Both multiply by noise: their gradient is the noise itself.
    torch.testing.assert_close(found, (out / x).detach())
    assert len(out.unique()) > 6
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


def test_expectations_of_expectations_and_of_approximations():
    defense, x = Noisy(network(torch.float64)), data(dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(EoT(EoT(defense, draws=3, seed=5), draws=2, seed=1, fixed=True), x[:1])
    # Found under other modules, and behind BPDA with steps of its own.
    wrapped = nn.Sequential(BPDA(lambda x: x.round(decimals=1)), BPDA(defense, backward="frozen", steps=1))
    defense.seen.clear()
    out = EoT(wrapped, draws=3, chunk=2, seed=1)(x)
    point = x.detach().round(decimals=1).requires_grad_()
    alone = singles(defense, point, 3).mean(0)
    torch.testing.assert_close(out, alone)
    (wanted,) = torch.autograd.grad(alone, point, COTANGENT)
    torch.testing.assert_close(torch.autograd.grad(out, x, COTANGENT)[0], wanted)


def test_certain_draws_are_averaged_in_logarithms():
    class Certain(Noisy):
        def readout(self, point, state):
            return 1e3 * super().readout(point, state)

    x = data().requires_grad_()
    out = EoT(Certain(network()), draws=4, gradient="softmax", loss="softmax", seed=0)(x)
    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(out, LABELS[:4]), x)
    assert bool(torch.isfinite(out).all())
    assert bool(torch.isfinite(gradient).all())
    assert bool((gradient != 0).any())


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([1e-6, 1e-3, 1.0, 30.0, 1e3, 1e6, 1e9]),
    st.sampled_from([0.0, -1e3, 1e5]),
    st.integers(2, 12),
)
def test_added_classes_never_win_and_change_no_cross_entropy(seed, scale, shift, classes):
    z = torch.randn(5, 2, generator=torch.Generator().manual_seed(seed)) * scale + shift
    modules = nn.Identity(), PaddedClasses(nn.Identity(), classes=classes)
    padded = modules[1](z)
    assert (padded.shape, torch.equal(padded[:, :2], z)) == ((5, classes), True)
    assert torch.equal(padded.argmax(1), z.argmax(1))
    assert classes == 2 or bool((padded[:, 2:].amax(1) <= z.amin(1) - 100).all())
    x, found = (z - shift).requires_grad_(), []
    for module in modules:
        loss = nn.functional.cross_entropy(module(x), torch.tensor([0, 1, 0, 1, 0]), reduction="none")
        found.append(torch.cat([loss.detach(), torch.autograd.grad(loss.sum(), x)[0].flatten()]))
    # To the last bit.
    assert torch.equal(*found)


NET, X, BODY = network(), data(3), nn.Flatten().eval()


Together = type("Together", (Controlled,), {"batch_level": True})


class Twice(Controlled):
    def readout(self, point, state):
        return (super().readout(point, state) + super().readout(point / 2, state)) / 2


class Short(Descent):
    def readout(self, point, state):
        return super().readout(point, state)[0]


def binarized(**options):
    parts = {"weight": torch.ones(3, 6), "anchor": torch.ones(3, 6)}
    parts |= dict.fromkeys(("threshold", "scale", "offset"), torch.ones(3))
    return lambda: BinarizedClassifier(BODY, references=X, **{**parts, **options})


def broken(x):
    raise ValueError("no such thing")


def cut(x):
    return x[:, :2]


FIT = partial(fit_directions, torch.zeros(1, 3, 2))
LEAF = torch.rand(4, 3, requires_grad=True)
ALONE = "an AdaptiveDefense for that"
ARGUMENTS = [
    # Test-time defenses.
    (lambda: Together(NET), "group_size: got None, expected the number of rows"),
    (lambda: Descent(NET, group_size=2), "group_size: got 2, expected None"),
    (lambda: Descent(NET)(torch.zeros(2, 6, dtype=torch.int64)), r"x: got dtype torch\.int64"),
    (lambda: Descent(NET).trace(data(2), seeds=[1]), "seeds: .*2 integers"),
    # Backward passes and expectations.
    (partial(BPDA, 3), "forward: got int"),
    *((partial(BPDA, torch.round, **ways), ALONE) for ways in ({"backward": "trajectory"}, {"steps": 2})),
    (partial(BPDA, NET, layer="1", backward="trajectory"), ALONE),
    (lambda: EoT(NET, draws=2, fixed=True), "fixed: got True, expected False, or a seed"),
    # Detectors and readouts.
    (binarized(scale=torch.ones(2)), "scale: got shape .*3 rows"),
    (binarized(training=torch.ones(3)), "called 'training'"),
    (lambda: as_readout("ensemble").check((4,)), r"readout: got .*\(N, members, F\)"),
    (partial(FIT, torch.tensor([True, False])), r"planted: got shape \(2,\)"),
    *((partial(FIT, torch.tensor([one] * 3)), "planted: .*both classes") for one in (True, False)),
    # Pairs of features and readout.
    *((partial(split, parts, X), r"model: got .*, expected a pair") for parts in ((BODY,), (BODY, 3), (BODY, "head"))),
    (lambda: split(lambda x: x, X), "model: got function, expected a torch.nn.Module"),
]
MODELS = [
    (lambda: BPDA(Net(lambda net, x: x, spare=BODY), layer="spare")(LEAF), "'spare': a forward pass does not call it"),
    (lambda: as_defense(broken, NET, X), r"defense: broken, on .*shape \(3, 2, 3\), raised ValueError: no such"),
    (lambda: Short(NET)(X), "readout: got shape"),
    (lambda: BPDA(cut)(LEAF), "give a differentiable substitute"),
    (lambda: BPDA(torch.round, backward=cut)(LEAF).sum().backward(), r"substitute returned shape \(4, 2\)"),
    (lambda: EoT(lambda x: x.detach() * 2, draws=2)(LEAF).sum().backward(), "no gradient comes back to the input"),
    (lambda: BPDA(nn.Sequential(nn.Linear(3, 2)), layer="0")(LEAF), r"'0' makes shape \(4, 2\) of \(4, 3\)"),
    (lambda: split_defense(Together(NET, group_size=2), X), "Together: treats rows together"),
    (partial(split, (BODY, nn.Linear(6, 4).train()), X), "is in train mode"),
    (partial(split, (BODY, nn.Linear(5, 4).eval()), X), "raised RuntimeError on inputs of shape"),
]
SPLITS = [
    (
        partial(split, (lambda x: x.flatten(1).sum(1), lambda z: torch.stack([z, -z], 1)), X),
        r"features: got shape \(3,\) for 3",
    ),
    (lambda: split_defense(Probable(NET), X, layer="classifier.3"), "returns probabilities, expected none"),
    (lambda: split_defense(Twice(NET), X), "Twice, at its end: "),
    (lambda: split_defense(Controlled(NET), X, layer="nowhere"), r"got 'defense\.nowhere'"),
]
ALL = ((InvalidArgumentError, ARGUMENTS), (ModelError, MODELS), (SplitError, SPLITS))


def test_what_is_wrong_is_refused():
    for error, call, words in ((error, *case) for error, cases in ALL for case in cases):
        with pytest.raises(error, match=words):
            call()
