"""Test-time defenses inside other modules: taken apart from their classifier, whoever wrote what holds them."""

import pytest
import torch
from torch import nn

from robust_ext import RobustExtWarning, ThreatModel, evaluate
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.engine.isolation.messages import Unpickler, pickled
from robust_ext.evaluations.evaluate.separate import separate
from robust_ext.models.function_purifier import FunctionPurifier, WholeDefense
from robust_ext.registry.defense import as_defense

NETWORK = digits_network().requires_grad_(False)
INPUTS, LABELS = load_dataset("digits").take(range(8))


def defense(name):
    return as_defense(name, NETWORK, INPUTS[:2])


class Holding(nn.Module):
    """Another module, with a function before and one after it."""

    def __init__(self, inside, before=None, after=None):
        super().__init__()
        self.inside, self.before, self.after = inside, before, after
        self.training = False

    def forward(self, x):
        out = self.inside(x if self.before is None else self.before(x))
        return out if self.after is None else self.after(out)


class Purify(nn.Module):
    """Steps that make predictions surer, as their author would write them."""

    def __init__(self, network, deviation=0.0):
        super().__init__()
        self.network, self.deviation = network, deviation
        self.training = False

    def forward(self, x):
        point = x.detach() + self.deviation * torch.randn_like(x)
        with torch.enable_grad():
            for _ in range(3):
                leaf = point.detach().requires_grad_()
                (slope,) = torch.autograd.grad(self.network(leaf).softmax(1).square().sum(), leaf)
                point = leaf + 0.03 * slope.sign()
        return point.detach()


class Denoise(nn.Module):
    """Noise and what takes it away, outside the graph."""

    @torch.no_grad()
    def forward(self, x):
        return (0.9 * (x + 0.05 * torch.randn_like(x))).clamp(0, 1)


class PurifyInside(Purify):
    """The same in the forward of the model."""

    def forward(self, x):
        return self.network(super().forward(x))


def doubled(logits):
    return 2 * logits


def darker(x):
    return 0.9 * x


DARKER, DOUBLED = Holding(NETWORK, before=darker), Holding(NETWORK, after=doubled)
# What holds the defense, the class that it is separated into, and what the classifier without it computes.
MODELS = [
    (lambda: Holding(Holding(defense("anti-adversary"))), "AntiAdversary", NETWORK),
    (lambda: nn.Sequential(defense("hd(steps=2)")), "HedgeDefense", NETWORK),
    (lambda: Holding(defense("anti-adversary"), after=doubled), "_FollowedAntiAdversary", DOUBLED),
    (lambda: Holding(defense("bit-depth"), after=lambda out: {"logits": out}), "BitDepthReduction", NETWORK),
    (lambda: Holding(defense("anti-adversary"), before=darker), "WholeDefense", DARKER),
    (lambda: nn.Sequential(Purify(NETWORK), NETWORK), "FunctionPurifier", NETWORK),
    (lambda: Holding(nn.Sequential(nn.Sequential(Purify(NETWORK)), DARKER)), "FunctionPurifier", DARKER),
    (lambda: nn.Sequential(Purify(NETWORK, 0.05), NETWORK), "FunctionPurifier", NETWORK),
    (lambda: nn.Sequential(Denoise(), NETWORK), "FunctionPurifier", NETWORK),
    (lambda: Holding(PurifyInside(NETWORK)), "FunctionPurifier", NETWORK),
]


@pytest.mark.parametrize("number", range(len(MODELS)))
def test_a_defense_inside_another_module_is_what_that_computes_in_front_of_the_rest(number):
    make, kind, rest = MODELS[number]
    model = make().eval()
    with pytest.warns(RobustExtWarning, match="acts at test time"):
        found = separate(model, INPUTS)
    assert type(found.defense).__name__ == kind
    torch.testing.assert_close(found.classifier(INPUTS), rest(INPUTS))
    torch.manual_seed(0)
    expected = model(INPUTS)
    expected = expected["logits"] if isinstance(expected, dict) else expected
    torch.manual_seed(0)
    seen = found.defense(INPUTS)
    if found.defense.random:
        # A defense draws by seeds of its own.
        assert (seen.argmax(1) == expected.argmax(1)).sum() >= 7
        assert not torch.equal(found.defense(INPUTS), seen)
    else:
        torch.testing.assert_close(seen, expected)
        # As it comes to an attack's own process.
        arrived = Unpickler(pickled(found.defense, {}, to="it"), {}).load()
        torch.testing.assert_close(arrived(INPUTS), expected)
    assert isinstance(found.defense, (FunctionPurifier, WholeDefense)) == (kind in {"FunctionPurifier", "WholeDefense"})


class Sharper(nn.Module):
    """A network whose last layer is moved along a gradient of its own: no other network is behind it."""

    def forward(self, x):
        with torch.enable_grad():
            leaf = NETWORK[:-1](x).detach().requires_grad_()
            (slope,) = torch.autograd.grad(NETWORK[-1](leaf).logsumexp(1).sum(), leaf)
        return NETWORK[-1](NETWORK[:-1](x) + 0.1 * slope)


def test_classifiers_are_left_whole_and_what_cannot_be_taken_apart_with_the_next_step():
    assert separate(NETWORK, INPUTS) is None
    assert separate(nn.Sequential(Holding(nn.Identity(), before=darker), NETWORK), INPUTS) is None
    with pytest.warns(RobustExtWarning, match=r"takes gradients of its own.*defense="):
        assert separate(Sharper().eval(), INPUTS) is None


@pytest.mark.parametrize("isolate", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_wrapped_defense_is_evaluated_as_the_defense_is(isolate):
    given = INPUTS, LABELS, ThreatModel(norm="linf", epsilon=0.25)
    settings = {"budget": "quick", "planted": 0, "seed": 0}
    alone, plain = evaluate(defense("bit-depth(bits=2)"), *given, **settings).content, defense("bit-depth(bits=2)")
    for model in (Holding(nn.Sequential(plain)), Holding(plain, after=doubled)):
        content = evaluate(model.eval(), *given, **settings, isolate=isolate).content
        assert content["worst_case"] == alone["worst_case"]
        assert content["found_by"] == alone["found_by"]
        assert "BitDepthReduction" in content["defense"]["name"]
