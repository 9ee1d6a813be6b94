"""Splitting classifiers into features and readout: what is found, what is refused, and that nothing stays behind."""

import copy
import itertools

import cloudpickle
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from robust_ext import ThreatModel
from robust_ext.attacks.apgd import APGD
from robust_ext.core.devices import tolerance_of
from robust_ext.core.errors import SplitError
from robust_ext.detectors import Detector, ScoreDetector
from robust_ext.engine.classifiers import as_classifier
from robust_ext.evaluations.binarization.planting import plant
from robust_ext.models.bpda import BPDA
from robust_ext.models.defended import Defended, SuccessMargin
from robust_ext.models.features import split, split_linear
from robust_ext.registry.model import as_module
from tests.attacks.problems import Lambda, target_of
from tests.models.architectures import ARCHITECTURES, BEGIN, END, PAGE, pooled, small, table
from tests.models.cases import Net, data, network

WARNINGS = "DeprecationWarning", "FutureWarning", "UserWarning"
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in WARNINGS]
INPUTS = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
THREAT = ThreatModel(norm="linf", epsilon=16 / 255)
ROUNDING = Lambda(lambda x: (x * 4).round() / 4)


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def sequential():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 5))


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


def scaled(scale):
    return Net(lambda net, x: net.body(x) * scale, body=sequential())


def twice():
    layers = {"first": nn.Linear(16, 4), "head": nn.Linear(4, 4)}
    return Net(lambda net, x: net.head(torch.relu(net.head(net.first(x.flatten(1))))), **layers)


def hooks(module):
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


@pytest.mark.parametrize(
    ("make", "layer"),
    [
        (sequential, "3"),
        (skips, "head"),
        (nested, "heads.main.1"),
        (auxiliary, "main"),
        (lambda: Net(lambda net, x: net.head(input=x.flatten(1)), head=nn.Linear(16, 4)), "head"),
        (lambda: wrapped(wrapped(nested())), "wrapped.wrapped.heads.main.1"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3, bias=False)), "1"),
        (lambda: nn.Sequential(sequential(), nn.Identity(), nn.Dropout(0.5)), "0.3"),
        (lambda: scaled(1.0), "body.3"),
    ],
)
def test_the_last_linear_layer_is_found_or_named(make, layer):
    for named in (None, layer):
        model, fresh = make().eval(), torch.rand(7, 1, 4, 4)
        found = split(model, INPUTS, layer=named)
        assert found.layer == layer
        assert found.readout is dict(model.named_modules())[layer]
        features = found.features(fresh)
        torch.testing.assert_close(F.linear(features, found.readout.weight, found.readout.bias), model(fresh))
        assert hooks(model) == 0


FOLLOWED = [lambda scale=scale: scaled(scale) for scale in (10.0, 0.5, 1.01, -1.0)]
SQUASHED = [lambda head=head: nn.Sequential(sequential(), head) for head in (nn.LogSoftmax(1), nn.Tanh())]
TWO = [lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, 4))]
NONE = [lambda: nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten())]
POSITIONS = [lambda: Net(lambda net, x: net.head(x.squeeze(1))[:, 0], head=nn.Linear(4, 3))]


@pytest.mark.parametrize(
    ("models", "layers", "message"),
    [
        ([skips], ["first", "second"], r"layer '(first|second)': got outputs of .*\(3, 6\), expected .*\(3, 4\)"),
        ([skips], ["head2", "", "body", "0"], r"layer: got '\w*', expected the name of an nn.Linear .*second, first"),
        (TWO, ["1"], "layer '1': the logits differ from the model's by up to .*follows that layer"),
        (NONE, ["0"], "layer: .*the last ones: none"),
        (NONE, [None], "model: no nn.Linear takes part in a forward pass.*give a pair"),
        (FOLLOWED, [None], "model: the last linear layer 'body.3' does not produce the logits"),
        (FOLLOWED, ["body.3"], "layer 'body.3': the logits differ from the model's by up to"),
        (SQUASHED, [None], "model: the last linear layer .* does not produce the logits"),
        ([twice], [None, "head"], "layer 'head' was called 2 times in one forward pass, expected once"),
        ([nested], ["heads.aux"], "layer 'heads.aux' was called 0 times"),
        (POSITIONS, ["head"], "layer 'head': reads features at several positions"),
    ],
)
def test_what_does_not_end_in_a_linear_layer_is_refused_by_name(models, layers, message):
    for make, layer in itertools.product(models, layers):
        model = make().eval()
        with pytest.raises(SplitError, match="^" + message):
            split_linear(model, INPUTS, layer=layer)
        assert hooks(model) == 0


CONVOLUTION = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 5, 2), nn.Flatten())


@pytest.mark.parametrize("make", [sequential, lambda: copy.deepcopy(CONVOLUTION)])
@pytest.mark.parametrize("layer", [None, "2", "wrapped.2"])
@pytest.mark.parametrize("given", [{"layer": "0.0"}, {"backward": "straight_through"}], ids=["layer", "operations"])
def test_features_are_found_through_a_bpda_and_have_its_gradients(make, layer, given):
    inner = make().eval()
    # The name ends as those of other layers do, deeper in the network.
    network = nn.Sequential(nn.Sequential(ROUNDING), *inner).eval()
    plain, parts = split(network, INPUTS, layer=layer and layer[-1]), split(BPDA(network, **given), INPUTS, layer=layer)
    assert (parts.kind, parts.layer, parts.shape) == (plain.kind, plain.layer, plain.shape)
    x, rounded = INPUTS.clone().requires_grad_(), ROUNDING(INPUTS).requires_grad_()
    for one in (parts, copy.deepcopy(parts)):
        assert torch.equal(one.readout(one.features(x)), network(INPUTS))
        (gradient,) = torch.autograd.grad(one.features(x).square().sum(), x)
        features = split(inner, rounded.detach(), layer=None if layer is None else "1").features(rounded)
        assert torch.allclose(gradient, torch.autograd.grad(features.square().sum(), rounded)[0])
        assert gradient.abs().sum() > 0
    assert torch.autograd.grad(plain.features(x).sum(), x)[0].abs().sum() == 0


def test_features_that_gradients_do_not_come_back_from_are_none():
    """Inside of a BPDA that stands elsewhere, or is for the logits, as of any function with its own backward pass."""
    network = nn.Sequential(ROUNDING, *sequential()).eval()
    for model, last in (
        (nn.Sequential(nn.Identity(), BPDA(network, layer="0")).eval(), "1.wrapped.4"),
        (BPDA(network, backward=sequential().eval()), "wrapped.4"),
    ):
        parts, x = split(model, INPUTS), INPUTS.clone().requires_grad_()
        assert parts.kind == "logits"
        assert torch.autograd.grad(parts.features(x).sum(), x)[0].abs().sum() > 0
        with pytest.raises(SplitError, match="around the whole model"):
            split(model, INPUTS, layer=last)


# Architectures are split as the table states, parts make the model's logits, and what is planted is found.
CASES = [pytest.param(one, id=one.name, marks=() if one.quick else pytest.mark.exhaustive) for one in ARCHITECTURES]


def images(rows, size, seed=0):
    return torch.rand(rows, 3, size, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("one", CASES)
def test_an_architecture_is_split_as_the_table_states(one):
    given, x = one.make(), images(4, one.size)
    module = as_classifier(as_module(given).module, x)
    found = split(module, x)
    assert (found.kind, found.layer, found.shape) == (one.kind, one.layer, (one.features,))
    fresh = images(3, one.size, seed=1).requires_grad_()
    features = found.features(fresh)
    with torch.no_grad():
        logits, tolerance = module(fresh), tolerance_of(module, single=1e-4)
        assert float((found.readout(features).float() - logits).abs().max()) <= tolerance * float(logits.abs().max())
        # Hooks count the calls of one pass; what a copy observes is the copy.
        torch.testing.assert_close(copy.deepcopy(found.features)(fresh), features)
    if not one.gradient:
        return
    (gradient,) = torch.autograd.grad((features * torch.randn(features.shape)).sum(), fresh, allow_unused=True)
    assert gradient is not None
    assert bool(gradient.any())
    planted = plant(given, images(2, one.size, seed=2), THREAT, inner_points=20, planted_candidates=8)
    assert len(planted) == 2
    shape = tuple(planted.inputs.shape[1:])
    target = target_of(planted.module, shape, 2)
    options = {"threat_model": THREAT, "generator": torch.Generator().manual_seed(0)}
    assert planted.score(APGD(steps=10).search(target, planted.inputs, planted.labels, **options)) == 1


def test_the_table_is_that_of_the_page():
    assert PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip() == table()


def test_a_layer_of_any_kind_can_be_named_and_large_maps_are_averaged():
    model, x = small(), images(3, 64, seed=5)
    flat, large = (split(model, images(4, size), layer="body.3") for size in (16, 64))
    assert (flat.kind, flat.shape) == ("replayed", (16 * 7 * 7,))
    assert (large.kind, large.shape) == ("beside", (16 + 10,))
    torch.testing.assert_close(large.readout(large.features(x)), model(x))
    torch.testing.assert_close(large.features(x)[:, :16], model.body[:3](x).mean((2, 3)))


def test_features_outside_of_layers_take_one_pass_and_cross_to_other_processes():
    model = small(lambda net, x: torch.cdist(pooled(x), net.bank) + (net.fc(pooled(x)) + net.other(pooled(x).relu())))
    found, x = split(model, images(4, 32)), images(2, 32, seed=3)
    other = cloudpickle.loads(cloudpickle.dumps(found.features))
    torch.testing.assert_close(other(x), found.features(x))
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    found.features(x)
    assert len(calls) == 1


INVERTED = pytest.mark.parametrize("inverted", [False, True])


class Hidden(Detector):
    layers = ("1",)

    def score_of(self, seen):
        return seen.layers["1"][:, 0]


@pytest.fixture
def classifier():
    return network(width=5)


@pytest.fixture
def detector(classifier):
    made = Hidden(classifier)
    made.calibrate(data(100), false_positive_rate=0.3)
    return made


def test_other_networks_are_run_beside(detector):
    # A network that is queried twice, for noise too, is not mistaken for one pass.
    twice, x = Lambda(lambda x: detector.classifier(x) + detector.classifier(x * 0.5)), data(4)
    for other in (nn.Sequential(nn.Flatten(), nn.Linear(6, 2)), twice):
        torch.testing.assert_close(Defended(other, detector).both(x), (other(x), detector.score_margin(x)))
    assert not detector.classifier._forward_hooks


def test_decisions_are_the_detectors_and_win_the_column_of_rejection(classifier, detector):
    x = data(100)
    predicted, rejected = Defended(classifier, detector).decide(x)
    assert torch.equal(predicted, classifier(x).argmax(1))
    assert torch.equal(rejected, detector.decide(x))
    # The input whose score is the threshold itself is let pass, and is the one that the inverted test rejects.
    assert (int(rejected.sum()), int((detector.score(x) == detector.threshold).sum())) == (30, 1)
    assert torch.equal(Defended(classifier, detector, inverted=True).decide(x)[1], ~rejected)
    logits = Defended(classifier, detector, exposure="reject", weight=3.0)(x)
    assert torch.equal(logits[:, :3], classifier(x))
    assert torch.equal(logits.argmax(1) == 3, rejected)
    assert torch.equal(Defended(classifier, detector)(x), classifier(x))


@INVERTED
def test_the_margin_is_positive_exactly_on_success(inverted, classifier, detector):
    defended, x = Defended(classifier, detector, inverted=inverted), data(200).requires_grad_()
    labels = torch.randint(0, 3, (200,), generator=torch.Generator().manual_seed(3))
    predicted, rejected = defended.decide(x)
    success = (predicted != labels) & ~rejected
    assert 0 < int(success.sum()) < 200
    assert torch.equal(SuccessMargin(defended, labels)(x).argmax(1) == 1, success)
    zeros = SuccessMargin(defended, 0)
    assert torch.equal(zeros(x[:7]).argmax(1) == 1, ((predicted != 0) & ~rejected)[:7])
    (gradient,) = torch.autograd.grad(zeros(x)[:, 1].sum(), x)
    assert bool((gradient.flatten(1).abs().sum(1) > 0).all())


@INVERTED
def test_scores_of_nan_let_nothing_pass_and_leave_logits_finite(inverted, classifier):
    def score(x):
        """NaN where the first value is negative, infinite where it is 0."""
        first = x.flatten(1)[:, 0]
        return first.sqrt() - torch.where(first == 0, torch.inf, 0.0)

    detector, x = ScoreDetector(classifier, score), data(4).abs()
    detector.threshold = torch.tensor(0.5)
    x.flatten(1)[:, 0] = torch.tensor([-1.0, 0.0, 0.04, 0.64])
    shown = Defended(classifier, detector, inverted=inverted, exposure="reject")
    assert detector.decide(x).tolist() == [True, False, False, True]
    rejected = [True, *([True, True, False] if inverted else [False, False, True])]
    assert shown.decide(x)[1].tolist() == rejected
    # In the margin, each is misclassified.
    margin = SuccessMargin(shown, (classifier(x).argmax(1) + 1) % 3)
    for logits, winner in ((shown(x), 3), (margin(x), 0)):
        assert (logits.argmax(1) == winner).tolist() == rejected
        assert torch.isfinite(logits).all()
