"""Backward passes: of defenses by hand, of layers as without them, fitted ones against exact gradients."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from robust_ext import BPDA, EoT, ModelError, Purifier, RobustExtError, ThreatModel, binarization_test, robust_accuracy
from robust_ext.attacks._common.objectives import cross_entropy
from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.apgd import APGD
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.datasets.load import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.models.bpda import trajectory_gradient
from robust_ext.models.layer_backward import find_layers, other_backward
from tests.attacks.problems import Lambda
from tests.models.cases import Controlled, Net

# A linear classifier without a bias, and a purifier whose two steps scale the input: a chain rule by hand.
WEIGHT = torch.tensor([[1.0, -2.0, 0.5], [0.0, 1.0, 3.0]], dtype=torch.float64)
COTANGENT = torch.tensor([[1.0, -0.5], [0.3, 2.0], [0.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
CONTRACTION = 0.6


def linear():
    return Net(lambda net, x: (x.square() / 2) @ net.weight.T, weight=nn.Parameter(WEIGHT.clone()))


class Shrink(Purifier):
    """Each step multiplies by 0.6 and rounds a little noise on, which no gradient flows through."""

    random = True

    def step(self, point, *, x, number, state, rng):
        return CONTRACTION * point + (0.1 * rng.normal(x, "step", number)).round(decimals=2)


class Blocking(Shrink):
    def step(self, point, *, x, number, state, rng):
        return super().step(point, x=x, number=number, state=state, rng=rng).detach()


def data(rows=4, size=3):
    return torch.rand(rows, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def pulled(module, x, cotangent=None):
    x = x.clone().requires_grad_()
    out = module(x)
    spread = torch.linspace(-1, 2, out.numel(), dtype=x.dtype).view_as(out)
    return torch.autograd.grad(out, x, spread if cotangent is None else cotangent)[0]


def by_hand(points):
    """The gradient of the linear classifier on half squares: the point times the cotangent through the weights."""
    return points * (COTANGENT @ WEIGHT)


@pytest.mark.parametrize("kind", [Shrink, Blocking])
def test_gradients_of_two_steps_are_those_by_hand(kind):
    """Of the defense's own two steps, or of two where it has three, which shape the gradient and not the value."""
    for steps, more in ((2, {}), (3, {"steps": 2})):
        defense, x = kind(linear(), steps=steps, seed=3), data()
        with defense.seeded(3):
            trace = defense.trace(x)
        one, two = trace.iterates[1:3]
        wanted = {"identity": by_hand(two), "frozen": by_hand(two), "trajectory": (by_hand(one) + by_hand(two)) / 2}
        for backward, gradient in wanted.items():
            module = BPDA(defense, backward=backward, **more)
            with defense.seeded(3, fixed=True):
                torch.testing.assert_close(pulled(module, x, COTANGENT), gradient)
                assert torch.equal(module(x.clone().requires_grad_()), trace.logits)
                with torch.no_grad():
                    assert torch.equal(module(x), trace.logits)
        for held in (False, True):
            module = BPDA(defense, backward="unrolled", checkpoint=held, **more)
            with defense.seeded(3):
                if kind is Shrink:
                    torch.testing.assert_close(pulled(module, x, COTANGENT), by_hand(two) * CONTRACTION**2)
                else:
                    with pytest.raises(ModelError, match="no gradient comes back to the input"):
                        pulled(module, x)
        with defense.seeded(3):
            torch.testing.assert_close(pulled(BPDA(defense, steps=0), x, COTANGENT), by_hand(x))


def test_a_frozen_state_is_held():
    defense, x = Controlled(linear()), data()
    moved = x - 0.5 * x.sin()
    found = pulled(BPDA(defense, backward="unrolled"), x, COTANGENT)
    torch.testing.assert_close(found, by_hand(moved) * (1 - 0.5 * x.cos()))

    class Scaled(Controlled):
        """Holds the share of the input that is left."""

        def frozen(self, x, *, inputs, solution):
            return self.logits(x * (1 + solution.state["control"] / inputs), {"control": torch.zeros_like(x)})

    found = pulled(BPDA(Scaled(linear()), backward="frozen"), x, COTANGENT)
    torch.testing.assert_close(found, by_hand(moved) * moved / x)


def test_the_frozen_final_point_is_met_to_the_last_bit():
    jump = type("Jump", (Purifier,), {"step": lambda self, point, **_: point * 1e-3 + 1e-5})
    net, x = nn.Linear(3, 2, bias=False), data(200).float()
    defense = jump(net, steps=1)
    found = defense.solution(x, seeds=torch.zeros(200, dtype=torch.int64))
    assert torch.equal(defense.frozen(x, inputs=x, solution=found), net(found.final))


def test_a_substitutes_gradient_is_that_of_finite_differences():
    def substitute(x):
        return torch.stack([x[:, 0] * x[:, 1], (2 * x[:, 2]).exp()], 1)

    def hard(x):
        return x[:, :2].round()

    x, step = data(), 1e-6
    units = step * torch.eye(3, dtype=torch.float64)
    slopes = [((substitute(x + unit) - substitute(x - unit)) / (2 * step) * COTANGENT).sum(1) for unit in units]
    for wrapped in (hard, Shrink(linear(), steps=2)):
        found = pulled(BPDA(wrapped, backward=substitute), x, COTANGENT)
        torch.testing.assert_close(found, torch.stack(slopes, 1), rtol=1e-7, atol=1e-8)
    leaf = x.clone().requires_grad_()
    assert torch.equal(BPDA(hard, backward=substitute)(leaf), hard(x))
    # What the identity returns is not its argument.
    assert BPDA(lambda x: x)(leaf).data_ptr() != leaf.data_ptr()


def test_the_trajectory_of_a_loss():
    defense, x, labels = Blocking(linear(), steps=2), data(), torch.tensor([0, 1, 1, 0])
    trace = defense.trace(x, seeds=[1, 2, 3, 4])
    wanted = torch.zeros_like(x)
    for point in trace.iterates[1:]:
        # The cross-entropy's gradient by the logits is the softmax without the label.
        error = (point.square() / 2 @ WEIGHT.T).softmax(1) - nn.functional.one_hot(labels, 2)
        wanted += point * (error @ WEIGHT) / 2
    torch.testing.assert_close(trajectory_gradient(defense, x, labels, cross_entropy, seeds=trace.seeds), wanted)
    assert all(p.grad is None for p in defense.parameters())
    assert trajectory_gradient(defense, x[:0], labels[:0], cross_entropy).shape == (0, 3)


# Layers: gradients are those of the network without the layer.
HEAD = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
SIX = data(size=6)


def rounded(x):
    return (x * 4).round() / 4


def by_numpy(x):
    return torch.from_numpy(np.round(x.detach().numpy() * 4) / 4)


@torch.no_grad()
def in_place(x):
    return x.clamp_(0.1, 0.9)


inferred = torch.inference_mode()(rounded)
ROUNDED = rounded(SIX)


class Called(nn.Module):
    """One layer in front of a network, called in several ways."""

    def __init__(self, layer, way="called"):
        super().__init__()
        self.quantise, self.head, self.way = layer, HEAD, way
        self.held = [layer]

    def forward(self, x):
        if self.way == "checkpointed":
            return checkpoint(Called(self.quantise), x, use_reentrant=False)
        if self.way == "without gradients":
            with torch.no_grad():
                x = self.quantise(x)
            return self.head(x)
        ways = {"called": self.quantise, "forward": self.quantise.forward, "held": self.held[0]}
        return self.head(ways[self.way](x))


LAYERS = [*map(Lambda, (rounded, by_numpy, inferred)), nn.Sequential(Lambda(rounded), Lambda(rounded))]


@pytest.mark.parametrize("way", ["called", "forward", "held", "without gradients", "checkpointed"])
@pytest.mark.parametrize("layer", LAYERS)
def test_the_gradient_is_that_of_the_network_without_the_layer(layer, way):
    net = Called(layer, way).eval()
    view, kept = BPDA(net, layer="quantise"), dict(vars(layer))
    with torch.no_grad():
        expected = net(SIX)
    for x in (SIX, SIX.clone().requires_grad_()):
        assert torch.equal(view(x), expected)
    wanted = pulled(HEAD, ROUNDED)
    torch.testing.assert_close(pulled(view, SIX), wanted, rtol=0, atol=0)
    torch.testing.assert_close(pulled(EoT(view, draws=2), SIX), wanted)
    with other_backward(net, {"quantise": layer}, "identity") as calls:
        torch.testing.assert_close(pulled(net, SIX), wanted, rtol=0, atol=0)
    calls()
    assert vars(layer) == kept
    assert all(parameter.grad is None for parameter in HEAD.parameters())


def test_several_layers_one_that_is_used_twice_and_a_substitute():
    layer = Lambda(rounded)
    twice = Net(lambda net, x: net.first(x) * net.second(2 * x), first=layer, second=layer)
    spread = torch.linspace(-1, 2, SIX.numel(), dtype=SIX.dtype).view_as(SIX)
    again = (SIX * 8).round() / 4
    for name in ("first", "second"):
        torch.testing.assert_close(pulled(BPDA(twice, layer=name), SIX), spread * (again + 2 * ROUNDED))
    net = nn.Sequential(Lambda(rounded), HEAD[0], Lambda(rounded), HEAD[2])
    wanted = pulled(HEAD[2], HEAD[0](ROUNDED).detach()) @ HEAD[0].weight
    torch.testing.assert_close(pulled(BPDA(net, layer="0, 2"), SIX), wanted)
    cubed = BPDA(Called(Lambda(rounded)), layer="quantise", backward=lambda x: x**3)
    torch.testing.assert_close(pulled(cubed, SIX), pulled(HEAD, ROUNDED) * 3 * SIX.square())


def test_what_works_in_place_has_the_values_it_had_and_nothing_is_left_where_a_pass_raises():
    net, expected = Called(Lambda(in_place)), SIX.clamp(0.1, 0.9)
    for backward in ("identity", "straight_through"):
        view = BPDA(net, layer="quantise", backward=backward)
        torch.testing.assert_close(view(SIX.clone().requires_grad_()), HEAD(expected), rtol=0, atol=0)
    torch.testing.assert_close(pulled(view, SIX), pulled(HEAD, expected) * ((SIX > 0.1) & (SIX < 0.9)))

    def fails(x):
        raise ValueError("no")

    layer = Lambda(fails)
    kept = dict(vars(layer))
    with pytest.raises(ValueError, match="no"):
        BPDA(Called(layer), layer="quantise")(SIX.clone().requires_grad_())
    assert vars(layer) == kept


# Operations straight through, and functions with the gradients they then have.
THROUGH = {
    "round": (lambda x: (3 * x).round(), lambda x: 3 * x),
    "decimals": (lambda x: torch.round(x, decimals=1), lambda x: x),
    "in place": (lambda x: (3 * x).ceil_() * 2, lambda x: 6 * x),
    "floor": (lambda x: torch.floor(x * 4) * x, lambda x: 4 * x * x.detach() + (x.detach() * 4).floor() * x),
    "sign": (lambda x: (x - 0.5).sign() + x, lambda x: 2 * x),
    "floor division": (lambda x: x // 0.25, lambda x: 4 * x),
    "of a number": (lambda x: 1 // (x + 1), lambda x: 1 / (x + 1)),
    "rounding division": (lambda x: torch.div(x, 0.25, rounding_mode="floor"), lambda x: 4 * x),
    "detach": (lambda x: (2 * x).detach(), lambda x: 2 * x),
    "data": (lambda x: (2 * x).data, lambda x: 2 * x),
    "no_grad": (torch.no_grad()(lambda x: x.square()), lambda x: x.square()),
    "integers": (lambda x: (3 * x).long().float() / 2, lambda x: 1.5 * x),
    "bytes": (lambda x: ((x * 255).to(torch.uint8) / 255.0).double(), lambda x: x),
    "integers, changed": (lambda x: 2.0 * ((x * 255).int() // 16).clamp(0, 15).double(), lambda x: x * 255 / 8),
    "one-hot": (lambda x: nn.functional.one_hot(x.argmax(1), 6).double(), lambda x: x),
    "own straight through": (lambda x: x + (x.round() - x).detach(), lambda x: x),
    "untouched": (lambda x: x.clamp(0.2, 0.8).sin(), lambda x: x.clamp(0.2, 0.8).sin()),
}


@pytest.mark.parametrize(("hard", "smooth"), THROUGH.values(), ids=THROUGH)
def test_operations_straight_through(hard, smooth):
    view = BPDA(hard, backward="straight_through")
    assert torch.equal(view(SIX.clone().requires_grad_()), hard(SIX))
    torch.testing.assert_close(pulled(view, SIX), pulled(smooth, SIX))


def test_what_has_no_gradient_straight_through_is_an_error():
    lost = [lambda x: (x > 0.5).double(), lambda x: x.argmax(1, keepdim=True).double()]
    for function in (*lost, by_numpy, inferred, lambda x: torch.linspace(0, 1, 4)[(x * 3).long()]):
        with pytest.raises(ModelError, match="no gradient passes straight through"):
            BPDA(function, backward="straight_through")(SIX.clone().requires_grad_())


def test_layers_go_by_the_end_of_their_name():
    quantise, head = Lambda(rounded), nn.Sequential(Lambda(rounded), nn.Sequential(Lambda(rounded)))
    left, right = (nn.ModuleDict({"round": Lambda(rounded)}) for _ in range(2))
    net = nn.ModuleDict({"quantise": quantise, "head": head, "left": left})
    outer = nn.ModuleDict({"features": nn.ModuleDict({"model": net}), "right": right, "again": quantise})
    # Deeper ones of the same name have longer names where the network is whole, too.
    found = dict.fromkeys(("quantise", "model.quantise", "features.model.quantise", "again"), quantise)
    for name, layer in {**found, "head.0": head[0], "0": head[0], "left.round": left["round"]}.items():
        assert find_layers(outer, name)[name] is layer
    for name, words in {
        "round": "a longer name, as there are several: features.model.left.round, right.round",
        "quantize": "did you mean .*quantise",
        "antise": "the name of a layer",
        "": "the name of a layer",
    }.items():
        with pytest.raises(InvalidArgumentError, match=f"layer: got {name}, expected {words}|{words}"):
            find_layers(outer, name)


# Fitted ones, and where no other backward pass leads on.
LINF = ThreatModel(norm="linf", epsilon=0.3)
INPUTS, LABELS = load_dataset("digits").take(range(20))


def bits(x):
    """One for each of 16 thresholds: no gradient passes comparisons, and the shape is another."""
    return (x > torch.linspace(0.03, 0.97, 16).view(1, 16, 1, 1)).float()


@pytest.mark.parametrize("settings", [{"bpda": "codes"}, {}])
def test_a_fitted_pass_leads_through_comparisons(settings):
    plain = APGD(steps=20, loss="margin")
    coded = {"codes": Lambda(bits), "net": digits_network()}
    model = Net(lambda net, x: net.net(net.codes(x).mean(1, keepdim=True)), **coded)
    attack = AdaptedAttack(attack=plain, gradient_mode="fitted", **settings).named("fitted")
    for other in ({"bpda": "codes"}, {"gradient_mode": "straight_through"}):
        with pytest.raises(RobustExtError):
            robust_accuracy(model, [AdaptedAttack(attack=plain, **other)], INPUTS[:2], LABELS[:2], LINF)
    result = robust_accuracy(model, [attack], INPUTS, LABELS, LINF)
    twin = robust_accuracy(digits_network(), [plain], INPUTS, LABELS, LINF)
    assert result.robust_accuracy(0.3, attack="fitted") <= twin.robust_accuracy(0.3, attack=plain.name) + 0.1
    if settings:
        ball = ThreatModel(norm="linf", epsilon=0.1)
        assert binarization_test(model, attack, INPUTS[:8], ball, depths=(1,), canaries=0).score >= 0.95
