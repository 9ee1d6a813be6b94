"""A layer with another backward pass: its gradients are those of the network without the layer."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from robust_ext import BPDA, EoT, InvalidArgumentError, ModelError
from robust_ext.models.layer_backward import find_layers, other_backward

HEAD = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()


def data(rows=4):
    return torch.rand(rows, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def pulled(module, x):
    x = x.clone().requires_grad_()
    out = module(x)
    return torch.autograd.grad(out, x, torch.linspace(-1, 2, out.numel(), dtype=x.dtype).view_as(out))[0]


class Rounded(nn.Module):
    def forward(self, x):
        return (x * 4).round() / 4


class ByNumpy(nn.Module):
    def forward(self, x):
        return torch.from_numpy(np.round(x.detach().numpy() * 4) / 4)


class Inferred(nn.Module):
    def forward(self, x):
        with torch.inference_mode():
            return (x * 4).round() / 4


class WithoutGradients(nn.Module):
    @torch.no_grad()
    def forward(self, x):
        return x.clamp_(0.1, 0.9)


class Net(nn.Module):
    """One layer in front of a network, called in several ways."""

    def __init__(self, layer, way="called"):
        super().__init__()
        self.quantise, self.head, self.way = layer, HEAD, way
        self.held = [layer]

    def front(self, x):
        if self.way == "without gradients":
            with torch.no_grad():
                return self.quantise(x)
        return {"called": self.quantise, "forward": self.quantise.forward, "held": self.held[0]}[self.way](x)

    def forward(self, x):
        if self.way == "checkpointed":
            self_called = Net(self.quantise)
            return checkpoint(self_called, x, use_reentrant=False)
        return self.head(self.front(x))


@pytest.mark.parametrize("way", ["called", "forward", "held", "without gradients", "checkpointed"])
@pytest.mark.parametrize("layer", [Rounded(), ByNumpy(), Inferred(), nn.Sequential(Rounded(), Rounded())])
def test_the_gradient_is_that_of_the_network_without_the_layer(layer, way):
    net, x = Net(layer, way).eval(), data()
    view, kept = BPDA(net, layer="quantise"), dict(vars(layer))
    with torch.no_grad():
        expected = net(x)
        assert torch.equal(view(x), expected)
    assert torch.equal(view(x.clone().requires_grad_()), expected)
    wanted = pulled(HEAD, ((x * 4).round() / 4))
    torch.testing.assert_close(pulled(view, x), wanted, rtol=0, atol=0)
    torch.testing.assert_close(pulled(EoT(view, draws=2), x), wanted)
    with other_backward(net, {"quantise": layer}, "identity") as calls:
        torch.testing.assert_close(pulled(net, x), wanted, rtol=0, atol=0)
    calls()
    assert vars(layer) == kept
    assert all(parameter.grad is None for parameter in HEAD.parameters())


def test_a_layer_that_is_used_twice_has_it_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = self.second = Rounded()

        def forward(self, x):
            return self.first(x) * self.second(2 * x)

    x = data()
    rounded, again = (x * 4).round() / 4, (x * 8).round() / 4
    cotangent = torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view_as(x)
    for name in ("first", "second"):
        torch.testing.assert_close(pulled(BPDA(Twice(), layer=name), x), cotangent * (again + 2 * rounded))


def test_several_layers():
    x = data()
    net = nn.Sequential(Rounded(), HEAD[0], Rounded(), HEAD[2])
    after = HEAD[0]((x * 4).round() / 4)
    (wanted,) = torch.autograd.grad(HEAD[2](after), after, torch.linspace(-1, 2, 12).double().view(4, 3))
    torch.testing.assert_close(pulled(BPDA(net, layer="0, 2"), x), wanted @ HEAD[0].weight)


def test_a_substitute_of_a_layer():
    net, x = Net(Rounded()), data()
    inner = (x * 4).round() / 4
    wanted = pulled(HEAD, inner) * 3 * x.square()
    torch.testing.assert_close(pulled(BPDA(net, layer="quantise", backward=lambda x: x**3), x), wanted)


def test_what_works_in_place_has_the_values_it_had():
    net, x = Net(WithoutGradients()), data()
    expected, changed = x.clamp(0.1, 0.9), x.clone()
    with torch.no_grad():
        net(changed)
    for backward in ("identity", "straight_through"):
        view = BPDA(net, layer="quantise", backward=backward)
        torch.testing.assert_close(view(x.clone().requires_grad_()), HEAD(expected), rtol=0, atol=0)
    inside = (x > 0.1) & (x < 0.9)
    torch.testing.assert_close(pulled(view, x), pulled(HEAD, expected) * inside)


def test_nothing_is_left_where_a_forward_pass_raises():
    class Raises(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    layer = Raises()
    with pytest.raises(ValueError, match="no"):
        BPDA(Net(layer), layer="quantise")(data().requires_grad_())
    assert "forward" not in vars(layer)


THROUGH = {
    "round": (lambda x: (3 * x).round(), lambda x: 3 * x),
    "by keyword": (lambda x: torch.round(input=3 * x), lambda x: 3 * x),
    "decimals": (lambda x: torch.round(x, decimals=1), lambda x: x),
    "in place": (lambda x: (3 * x).ceil_() * 2, lambda x: 6 * x),
    "floor": (lambda x: torch.floor(x * 4) * x, None),
    "sign": (lambda x: (x - 0.5).sign() + x, lambda x: 2 * x),
    "trunc": (lambda x: x.mul(5).trunc().div(5), lambda x: x),
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
    x = data()
    view = BPDA(hard, backward="straight_through")
    assert torch.equal(view(x.clone().requires_grad_()), hard(x))
    if smooth is None:
        cotangent = torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view_as(x)
        torch.testing.assert_close(pulled(view, x), cotangent * (4 * x + (x * 4).floor()))
    else:
        torch.testing.assert_close(pulled(view, x), pulled(smooth, x))


def by_table(x):
    return torch.linspace(0, 1, 4)[(x * 3).long()]


def test_what_has_no_gradient_straight_through_is_an_error():
    x = data().requires_grad_()
    for lost in (
        ByNumpy(),
        Inferred(),
        lambda x: (x > 0.5).double(),
        lambda x: x.argmax(1, keepdim=True).double(),
        by_table,
    ):
        with pytest.raises(ModelError, match="no gradient passes straight through"):
            BPDA(lost, backward="straight_through")(x)


class Nest(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def nested():
    quantise, other = Rounded(), Rounded()
    net = Nest(quantise=quantise, head=nn.Sequential(Rounded(), nn.Sequential(Rounded())), left=Nest(round=other))
    return Nest(features=Nest(model=net), right=Nest(round=Rounded()), again=quantise), quantise


def test_layers_go_by_the_end_of_their_name():
    outer, quantise = nested()
    net = outer.features.model
    for name in ("quantise", "model.quantise", "features.model.quantise", "again"):
        assert find_layers(outer, name)[name] is quantise
    # Deeper ones of the same name have longer names where the network is whole, too.
    assert find_layers(outer, "head.0")["head.0"] is net.head[0]
    assert find_layers(outer, "0")["0"] is net.head[0]
    assert find_layers(outer, "left.round")["left.round"] is net.left.round
    for name, words in {
        "round": "a longer name, as there are several: features.model.left.round, right.round",
        "quantize": "did you mean .*quantise",
        "antise": "the name of a layer",
        "": "the name of a layer",
    }.items():
        with pytest.raises(InvalidArgumentError, match=f"layer: got {name}, expected {words}|{words}"):
            find_layers(outer, name)
