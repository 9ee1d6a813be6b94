"""Splitting classifiers into features and readout: what is found, what is refused, and that nothing stays behind."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from robust_ext.core.errors import SplitError
from robust_ext.models.bpda import BPDA
from robust_ext.models.features import LayerInput, split, split_linear

INPUTS = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def sequential():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 5))


class Net(nn.Module):
    """Layers, and a function of them and an input."""

    def __init__(self, run, **layers):
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x):
        return self.run(self, x)


def skips():
    """Functional code with a skip connection; the layers are registered in another order than they are called."""

    def run(net, x):
        h = F.relu(net.first(x.flatten(1)))
        return net.head(h + torch.tanh(net.second(h)))

    return Net(run, head=nn.Linear(6, 4), second=nn.Linear(6, 6), first=nn.Linear(16, 6))


def nested():
    body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten())
    heads = nn.ModuleDict({"main": nn.Sequential(nn.Dropout(0.5), nn.Linear(12, 4)), "aux": nn.Linear(12, 4)})
    return Net(lambda net, x: net.heads["main"](net.body(x)), body=body, heads=heads)


def wrapped(model):
    return Net(lambda net, x: net.wrapped((x - 0.3) / 0.4), wrapped=model)


def auxiliary():
    """A second head that is called last but is not what is returned."""
    heads = {"main": nn.Linear(16, 4), "side": nn.Linear(16, 4)}
    return Net(lambda net, x: (net.main(x.flatten(1)), net.side(x.flatten(1)))[0], **heads)


def by_name():
    return Net(lambda net, x: net.head(input=x.flatten(1)), head=nn.Linear(16, 4))


def scaled(scale):
    return Net(lambda net, x: net.body(x) * scale, body=sequential())


def twice():
    layers = {"first": nn.Linear(16, 4), "head": nn.Linear(4, 4)}
    return Net(lambda net, x: net.head(torch.relu(net.head(net.first(x.flatten(1))))), **layers)


def hooks(module):
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


def checked(model, **options):
    """Split, and compare with the model on inputs that the split has not seen."""
    found = split(model, INPUTS, **options)
    fresh = torch.rand(7, 1, 4, 4)
    with torch.no_grad():
        features = found.features(fresh)
        assert features.dim() == 2
        torch.testing.assert_close(found.readout(features), model(fresh))
        if found.layer:
            layer = dict(model.named_modules())[found.layer]
            assert found.readout is layer
            torch.testing.assert_close(F.linear(features, layer.weight, layer.bias), model(fresh))
    assert hooks(model) == 0
    return found


@pytest.mark.parametrize(
    ("model", "layer"),
    [
        (sequential, "3"),
        (skips, "head"),
        (nested, "heads.main.1"),
        (auxiliary, "main"),
        (by_name, "head"),
        (lambda: wrapped(nested()), "wrapped.heads.main.1"),
        (lambda: wrapped(wrapped(sequential())), "wrapped.wrapped.3"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3, bias=False)), "1"),
        (lambda: nn.Sequential(sequential(), nn.Identity(), nn.Dropout(0.5)), "0.3"),
        (lambda: scaled(1.0), "body.3"),
    ],
)
def test_the_last_linear_layer_is_found_or_named(model, layer):
    assert checked(model().eval()).layer == checked(model().eval(), layer=layer).layer == layer


def convolutions():
    return nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten())


def two_linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, 4))


def three_dimensions():
    return Net(lambda net, x: net.head(x.squeeze(1))[:, 0], head=nn.Linear(4, 3))


FOLLOWED = [lambda scale=scale: scaled(scale) for scale in (10.0, 0.5, 1.01, -1.0)]
SQUASHED = [lambda head=head: nn.Sequential(sequential(), head) for head in (nn.LogSoftmax(1), nn.Tanh())]


@pytest.mark.parametrize(
    ("models", "layers", "message"),
    [
        ([skips], ["first", "second"], r"layer '(first|second)': got outputs of .*\(3, 6\), expected .*\(3, 4\)"),
        ([skips], ["head2", "", "body", "0"], r"layer: got '\w*', expected the name of an nn.Linear .*second, first"),
        ([two_linear], ["1"], "layer '1': the logits differ from the model's by up to .*follows that layer"),
        ([convolutions], ["0"], "layer: .*the last ones: none"),
        ([convolutions], [None], "model: no nn.Linear takes part in a forward pass.*give a pair"),
        (FOLLOWED, [None], "model: the last linear layer 'body.3' does not produce the logits"),
        (FOLLOWED, ["body.3"], "layer 'body.3': the logits differ from the model's by up to"),
        (SQUASHED, [None], "model: the last linear layer .* does not produce the logits"),
        ([twice], [None, "head"], "layer 'head' was called 2 times in one forward pass, expected once"),
        ([nested], ["heads.aux"], "layer 'heads.aux' was called 0 times"),
        ([three_dimensions], ["head"], "layer 'head': reads features at several positions"),
    ],
)
def test_what_does_not_end_in_a_linear_layer_is_refused_by_name(models, layers, message):
    for make, layer in itertools.product(models, layers):
        model = make().eval()
        with pytest.raises(SplitError, match="^" + message):
            split_linear(model, INPUTS, layer=layer)
        assert hooks(model) == 0


class Rounding(nn.Module):
    """Five levels."""

    def forward(self, x):
        return (x * 4).round() / 4


def convolution():
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 5, 2), nn.Flatten())


@pytest.mark.parametrize("make", [sequential, convolution])
@pytest.mark.parametrize("layer", [None, "2", "wrapped.2"])
@pytest.mark.parametrize("given", [{"layer": "0.0"}, {"backward": "straight_through"}], ids=["layer", "operations"])
def test_features_are_found_through_a_bpda_and_have_its_gradients(make, layer, given):
    inner = make().eval()
    # The name ends as those of other layers do, deeper in the network.
    network = nn.Sequential(nn.Sequential(Rounding()), *inner).eval()
    plain, parts = split(network, INPUTS, layer=layer and layer[-1]), split(BPDA(network, **given), INPUTS, layer=layer)
    assert (parts.kind, parts.layer, parts.shape) == (plain.kind, plain.layer, plain.shape)
    x, rounded = INPUTS.clone().requires_grad_(), Rounding()(INPUTS).requires_grad_()
    for one in (parts, copy.deepcopy(parts)):
        assert torch.equal(one.readout(one.features(x)), network(INPUTS))
        (gradient,) = torch.autograd.grad(one.features(x).square().sum(), x)
        features = split(inner, rounded.detach(), layer=None if layer is None else "1").features(rounded)
        assert torch.allclose(gradient, torch.autograd.grad(features.square().sum(), rounded)[0])
        assert gradient.abs().sum() > 0
    assert torch.autograd.grad(plain.features(x).sum(), x)[0].abs().sum() == 0


def test_features_that_gradients_do_not_come_back_from_are_none():
    """Inside of a BPDA that stands elsewhere, or is for the logits, as of any function with its own backward pass."""
    network = nn.Sequential(Rounding(), *sequential()).eval()
    for model, last in (
        (nn.Sequential(nn.Identity(), BPDA(network, layer="0")).eval(), "1.wrapped.4"),
        (BPDA(network, backward=sequential().eval()), "wrapped.4"),
    ):
        parts = split(model, INPUTS)
        assert parts.kind == "logits"
        x = INPUTS.clone().requires_grad_()
        assert torch.autograd.grad(parts.features(x).sum(), x)[0].abs().sum() > 0
        with pytest.raises(SplitError, match="around the whole model"):
            split(model, INPUTS, layer=last)


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        out = self.head(x.flatten(1))
        if self.calls > 1:
            raise RuntimeError("only once")
        return out


def test_hooks_are_removed_when_the_model_raises():
    model = Fails().eval()
    with pytest.raises(RuntimeError, match="only once"):
        split(model, INPUTS)
    assert hooks(model) == 0
    with pytest.raises(RuntimeError, match="only once"):
        LayerInput(model, "head")(INPUTS)
    assert hooks(model) == 0


def test_hooks_of_the_user_stay():
    model = sequential().eval()
    seen = []
    model[3].register_forward_hook(lambda *_: seen.append(1))
    found = split(model, INPUTS)
    before = len(seen)
    found.features(INPUTS)
    assert (hooks(model), len(seen)) == (1, before + 1)
