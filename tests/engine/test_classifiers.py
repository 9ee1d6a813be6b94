"""Models that return more than logits, or compute in another precision, are run as they are."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from robust_ext import ModelError
from robust_ext.core.classifier import check_classifier
from robust_ext.engine.classifiers import as_classifier, parts_in_precision
from robust_ext.models.forms import InPrecision
from robust_ext.models.wrapping import unwrapped

X = torch.rand(4, 1, 6, 6, generator=torch.Generator().manual_seed(0))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 5)).eval()


class Returns(nn.Module):
    """A network whose logits go through a function, computed in bfloat16 where it opens autocast itself."""

    def __init__(self, function, *, autocast=False):
        super().__init__()
        self.network, self.function, self.autocast = network(), function, autocast
        self.eval()

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            out = self.network(x)
        return self.function(out)


TAKEN = {
    "HF output": lambda z: SimpleNamespace(logits=z, hidden_states=(z,)),
    "dict of logits": lambda z: {"features": z * 2, "logits": z},
    "dict with out": lambda z: {"out": z, "aux": z * 2},
    "dict with one": lambda z: {"scores": z, "loss": z.sum()},
    "tuple of one": lambda z: (z,),
    "tuple after a loss": lambda z: (z.sum(), z),
    "logits and their softmax": lambda z: (z.softmax(1), z),
    "the same twice": lambda z: {"a": z, "b": z},
}
REFUSED = {
    "two heads": (lambda z: (z, z * 2), "of several heads"),
    "unnamed": (lambda z: {"a": z, "b": z * 2}, r"LogitsOf\(model, 'a'\) or .*LogitsOf\(model, 'b'\)"),
    "list with features": (lambda z: [z, z[:, :3]], "without labels"),
    "one value": (lambda z: z[:, :1] * 100, "TwoClass"),
    "no tensor": (lambda z: (z.sum(), [z]), "expected a tensor of logits"),
    "text": (lambda z: "logits", "returned str"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_outputs_are_reduced_to_logits_by_the_rule(name):
    module = as_classifier(Returns(TAKEN[name]), X)
    assert torch.equal(module(X), network()(X))
    assert module.get_submodule("network.1").weight is dict(module.named_modules())["network.1"].weight


@pytest.mark.parametrize("name", REFUSED)
def test_outputs_that_mean_nothing_certain_are_refused(name):
    function, words = REFUSED[name]
    with pytest.raises(ModelError, match=words):
        as_classifier(Returns(function), X)


def test_a_module_from_float32_to_a_tensor_stays_as_it_is():
    module = network()
    assert as_classifier(module, X) is module
    pair = (module[:3], module[3])
    assert parts_in_precision(pair, X) is pair


PRECISIONS = {
    "half": (lambda: network().half(), torch.float16),
    "bfloat16": (lambda: network().bfloat16(), torch.bfloat16),
    "double": (lambda: network().double(), torch.float64),
    "autocast": (lambda: Returns(lambda z: z, autocast=True), torch.bfloat16),
    "autocast and back": (lambda: Returns(lambda z: z.float(), autocast=True), torch.bfloat16),
    "bfloat16 in a tuple": (lambda: Returns(lambda z: (z,)).bfloat16(), torch.bfloat16),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_models_compute_in_their_own_precision_with_float32_around(name):
    make, dtype = PRECISIONS[name]
    module = as_classifier(make(), X)
    x = X.clone().requires_grad_()
    logits = module(x)
    assert isinstance(module, InPrecision)
    assert (module.precision, logits.dtype) == (dtype, torch.float32)
    gradient = torch.autograd.grad(logits.sum(), x)[0]
    assert gradient.dtype == torch.float32
    assert bool((gradient != 0).any())
    inner = unwrapped(module)
    raw = inner(X if getattr(inner, "autocast", False) else X.to(dtype))
    raw = raw[0] if isinstance(raw, tuple) else raw
    assert torch.equal(logits, raw.float())
    assert torch.equal(check_classifier(module, X), logits)


def test_autocast_around_the_call_is_kept_by_the_model_wherever_it_runs():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module = as_classifier(network(), X)
        expected = network()(X)
    assert expected.dtype == torch.bfloat16
    assert torch.equal(module(X), expected.float())


def test_a_pair_in_bfloat16_is_run_in_bfloat16():
    whole = network().bfloat16()
    features, readout = parts_in_precision((whole[:3], whole[3]), X)
    assert torch.equal(readout(features(X)), whole(X.bfloat16()).float())
