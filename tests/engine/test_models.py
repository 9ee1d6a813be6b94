"""Models as they come: their outputs, precision, behaviour on probe inputs, and what code of others raises in them."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.ao.quantization import quantize_fx

from robust_ext import AdaptedAttack, ThreatModel, binarization_test, diagnose, robust_accuracy
from robust_ext.attacks.apgd import APGD
from robust_ext.core.errors import AttackError, RobustExtError
from robust_ext.demo.network import digits_network
from robust_ext.engine.classifiers import as_classifier, parts_in_precision
from robust_ext.engine.copies import PROBES, behaviour, compare_behaviour
from robust_ext.engine.isolation.messages import Unpickler, pickled
from robust_ext.evaluations.causes.probes import probe_model
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.forms import float_twin
from robust_ext.models.rows import Solution
from robust_ext.models.wrapping import unwrapped

LINF = ThreatModel(norm="linf", epsilon=0.1)
X = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 3
BOUNDS = (-1.0, 3.0)
SQUARE = "robust_ext:Square(queries=4)"
quiet = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::robust_ext.RobustExtWarning"
)


class Applied(nn.Module):
    """A network with something done to its logits, computed in bfloat16 where it opens autocast itself."""

    def __init__(self, function=lambda logits, x: logits, module=None, *, autocast=False):
        super().__init__()
        self.module, self.function, self.autocast = module or digits_network(), function, autocast

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            logits = self.module(x)
        return self.function(logits, x)


PRECISIONS = {
    "half": (lambda: digits_network().half(), torch.float16),
    "double": (lambda: digits_network().double(), torch.float64),
    "autocast": (lambda: Applied(autocast=True), torch.bfloat16),
    "autocast and back": (lambda: Applied(lambda z, x: z.float(), autocast=True), torch.bfloat16),
    "bfloat16 in a tuple": (lambda: Applied(lambda z, x: (z,)).bfloat16(), torch.bfloat16),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_models_compute_in_their_own_precision_with_float32_around(name):
    make, dtype = PRECISIONS[name]
    module, x = as_classifier(make().eval(), X), X.clone().requires_grad_()
    logits = module(x)
    assert (module.precision, logits.dtype) == (dtype, torch.float32)
    assert bool((torch.autograd.grad(logits.sum(), x)[0] != 0).any())
    inner = unwrapped(module)
    raw = inner(X if getattr(inner, "autocast", False) else X.to(dtype))
    assert torch.equal(logits, (raw[0] if isinstance(raw, tuple) else raw).float())


def test_autocast_around_the_call_and_the_precision_of_a_pair_are_kept():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module, expected = as_classifier(digits_network(), X), digits_network()(X)
    assert expected.dtype == torch.bfloat16
    assert torch.equal(module(X), expected.float())
    whole = digits_network().bfloat16()
    features, readout = parts_in_precision((whole[:5], whole[5:]), X)
    assert torch.equal(readout(features(X)), whole(X.bfloat16()).float())


def of(module):
    return behaviour(module, torch.zeros(1, 1, 8, 8), BOUNDS)


class Counting(nn.Module):
    def __init__(self, columns=1000):
        super().__init__()
        self.calls, self.columns = 0, columns

    def forward(self, x):
        self.calls += 1
        SEEN.append(x)
        return x.flatten(1).repeat(1, 100)[:, : self.columns]


SEEN = []


def noisy(module=None, scale=1.0):
    return Applied(lambda out, x: out + scale * torch.randn(len(x), 1), module)


def changed(limit=-9.0, change=lambda out: out + 1):
    return Applied(lambda out, x: torch.where(x.flatten(1).mean(1, keepdim=True) > limit, change(out), out))


class Centred(AdaptiveDefense):
    """Takes the mean of its group off every input."""

    batch_level = True

    def solve(self, x, rng, *, record):
        return Solution(x - x.mean(0, keepdim=True), (x,))


def test_probes_lie_in_bounds_are_whole_groups_and_leave_nothing_behind():
    SEEN.clear()
    module, state = Counting(), torch.get_rng_state()
    found = of(module)
    assert module.calls == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(x.shape == (PROBES, 1, 8, 8) for x in SEEN)
    assert BOUNDS[0] <= SEEN[0].min() < -0.9
    assert 2.9 < SEEN[0].max() <= BOUNDS[1]
    # Of many outputs a few sums are kept.
    assert torch.tensor(found["values"]).shape == (PROBES, 16)
    assert found == of(Counting())
    SEEN.clear()
    found = of(Centred(Counting(columns=3), group_size=3))
    assert [len(x) for x in SEEN] == [6]
    assert torch.tensor(found["values"]).shape == (PROBES, 3)


def test_threads_batches_and_precision_are_tolerated_and_what_differs_is_counted():
    network, found = digits_network(), of(digits_network())
    try:
        torch.set_num_threads(2)
        assert compare_behaviour(found, of(network)) is None
    finally:
        torch.set_num_threads(1)
    double = copy.deepcopy(network).double()
    assert compare_behaviour(found, of(Applied(lambda out, x: double(x.double())))) is None
    SEEN.clear()
    of(Counting())
    means = SEEN[0].flatten(1).mean(1).sort().values
    for count, limit in ((4, -9.0), (1, float(means[-2:].mean())), (0, 9.0)):
        expected = f"behaves differently on {count} of 4 probe inputs (largest difference 1)" if count else None
        assert compare_behaviour(found, of(changed(limit))) == expected
    # Small changes count where they are above rounding.
    assert compare_behaviour(found, of(changed(change=lambda out: out * 1.01))) is not None
    infinite = of(changed(change=lambda out: out / 0))
    assert "other values are not finite" in compare_behaviour(found, infinite)
    assert compare_behaviour(infinite, infinite) is None


def test_random_networks_are_compared_by_equal_draws_and_others_by_what_they_raise():
    plain, found = of(digits_network()), of(noisy())
    assert (found["random"], plain["random"]) == (True, False)
    assert compare_behaviour(found, of(noisy())) is None
    other = of(noisy(scale=2.0))
    assert compare_behaviour(found, other) is not None
    # Another device draws other numbers.
    assert compare_behaviour(found, {**other, "device": "cuda"}) is None
    assert compare_behaviour(plain, {**of(changed()), "device": "cuda"}) is not None
    raising = of(nn.Linear(3, 2))
    assert compare_behaviour(raising, of(nn.Linear(3, 2))) is None
    assert "raised RuntimeError before" in compare_behaviour(raising, plain)
    assert "another number of values" in compare_behaviour(of(Counting(2)), of(Counting(3)))


class Dispatching(torch.Tensor):
    __torch_dispatch__ = classmethod(lambda *_: 1 / 0)


class UnreadableError(Exception):
    def __str__(self):
        raise ValueError


def raising(error, after=0):
    """Logits as they are for some calls, then an error."""
    calls = iter(range(after))

    def function(logits, x):
        if next(calls, None) is None:
            raise error
        return logits

    return Applied(function)


def convolutions():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()


def quantised_layers():
    ao = torch.ao.quantization
    network = nn.Sequential(ao.QuantStub(), *convolutions(), ao.DeQuantStub()).eval()
    network.qconfig = ao.get_default_qconfig(torch.backends.quantized.engine)
    prepared = ao.prepare(network)
    prepared(X)
    return ao.convert(prepared)


def quantised_graph():
    mapping = torch.ao.quantization.get_default_qconfig_mapping(torch.backends.quantized.engine)
    prepared = quantize_fx.prepare_fx(convolutions(), mapping, (X,))
    prepared(X)
    return quantize_fx.convert_fx(prepared)


MODELS = {
    "static int8": (quantised_layers, None),
    "numpy": (lambda: Applied(lambda z, x: torch.from_numpy(x.numpy().reshape(len(x), -1)[:, :3])), None),
    "lazy": (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), "hold no values yet"),
    "sparse": (lambda: Applied(lambda z, x: z.to_sparse()), "of layout torch.sparse_coo"),
    "nested": (lambda: Applied(lambda z, x: torch.nested.nested_tensor(list(z))), "that is nested"),
    "float8": (lambda: Applied(lambda z, x: z.to(torch.float8_e4m3fn)), "of dtype torch.float8_e4m3fn"),
    "meta": (lambda: Applied(lambda z, x: z.to("meta")), "on the meta device"),
    "subclass": (lambda: Applied(lambda z, x: z.detach().as_subclass(Dispatching)), "of Dispatching, a class that"),
    "late exit": (lambda: raising(SystemExit(0), after=8), r"raised SystemExit( on a batch of \d rows)?: 0"),
    "generator": (lambda: raising(GeneratorExit()), "raised GeneratorExit"),
    "unreadable": (lambda: raising(UnreadableError()), "raised UnreadableError.*its text cannot be read"),
}
EVALUATIONS = {
    "robust accuracy": lambda model: robust_accuracy(model, SQUARE, X, Y, LINF),
    "binarization": lambda model: binarization_test(model, SQUARE, X, LINF, inner_points=20, depths=(1,)),
    "diagnosis": lambda model: diagnose(model, SQUARE, X, Y, LINF, planted=0, references=False),
}


@quiet
@pytest.mark.parametrize("evaluation", EVALUATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_no_exception_of_others_escapes(name, evaluation):
    make, words = MODELS[name]
    model = make().eval()
    if words is None:
        EVALUATIONS[evaluation](model)
    elif (name, evaluation) == ("unreadable", "diagnosis"):
        # A diagnosis reports what a forward pass raises as a finding.
        assert re.search(words, " ".join(str(EVALUATIONS[evaluation](model)).split()))
    else:
        with pytest.raises(RobustExtError, match=words):
            EVALUATIONS[evaluation](model)


class Recurrent(nn.LSTM):
    def forward(self, x):
        return super().forward(x[:, 0])[0][:, -1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_recurrent_layers_in_eval_mode_have_gradients_on_a_gpu():
    model = Recurrent(8, 3, batch_first=True).eval()
    assert robust_accuracy(model, "robust_ext:APGD(steps=2)", X, Y, LINF, device="cuda").content["samples"] == len(X)


@quiet
@pytest.mark.parametrize("make", [quantised_layers, quantised_graph])
def test_quantised_convolutions_travel_and_their_float_twin_computes_and_attacks_by_the_rounded_weights(make):
    model = make()
    arrived = Unpickler(pickled(model, {}, to="it"), {}).load()
    assert torch.equal(arrived(X), model(X))
    labels = model(X).argmax(1)
    there, here = (robust_accuracy(model, SQUARE, X, labels, LINF, isolate=isolate) for isolate in (True, False))
    assert there.robust_accuracy(0.1) == here.robust_accuracy(0.1)
    inside = list(model.modules())
    first = next(one for one in inside if "Conv" in type(one).__name__)
    last = next(one for one in inside if type(one).__name__ == "Linear")
    x = X.clone().requires_grad_()
    hidden = nn.functional.conv2d(x, first.weight().dequantize(), first.bias()).relu().flatten(1)
    expected, seen = nn.functional.linear(hidden, last.weight().dequantize(), last.bias()), float_twin(model)(x)
    torch.testing.assert_close(seen, expected)
    torch.testing.assert_close(*(torch.autograd.grad(z[:, 0].sum(), x, retain_graph=True)[0] for z in (seen, expected)))
    assert float_twin(convolutions()) is None
    # What a probe of it names: those gradients, which find what is planted.
    (found,) = probe_model(model, X, labels, threat_model=LINF, seed=0).findings
    view = found.remedies[0].view
    assert (found.code, view) == ("cut_gradient", {"gradient_mode": "float_twin"})
    attack = AdaptedAttack(attack=APGD(loss="margin"), **view)
    assert binarization_test(model, attack, X, LINF, inner_points=50, depths=(1,)).score == 1
    with pytest.raises(AttackError, match="gives no gradients"):
        binarization_test(model, APGD(loss="margin"), X, LINF, inner_points=50, depths=(1,))
