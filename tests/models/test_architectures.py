"""Architectures are split as the table states, parts make the model's logits, and what is planted is found."""

import copy

import cloudpickle
import pytest
import torch

from robust_ext import ThreatModel
from robust_ext.attacks.apgd import APGD
from robust_ext.core.devices import tolerance_of
from robust_ext.core.target import Target
from robust_ext.engine.classifiers import as_classifier
from robust_ext.evaluations.binarization.planting import plant
from robust_ext.models.features import split
from robust_ext.registry.model import as_module
from tests.models.architectures import ARCHITECTURES, BEGIN, END, PAGE, pooled, small, table

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning", "UserWarning")
]
CASES = [pytest.param(one, id=one.name, marks=() if one.quick else pytest.mark.exhaustive) for one in ARCHITECTURES]


THREAT = ThreatModel(norm="linf", epsilon=16 / 255)


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


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
    target = Target(module=planted.module, bounds=(0.0, 1.0), classes=2, input_shape=shape, device=torch.device("cpu"))
    options = {"threat_model": THREAT, "generator": torch.Generator().manual_seed(0)}
    candidates = APGD(steps=10).search(target, planted.inputs, planted.labels, **options)
    assert planted.score(candidates) == 1


def test_the_table_is_that_of_the_page():
    assert PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip() == table()


def test_a_layer_of_any_kind_can_be_named_and_large_maps_are_averaged():
    model = small()
    flat, large = (split(model, images(4, size), layer="body.3") for size in (16, 64))
    assert (flat.kind, flat.shape) == ("replayed", (16 * 7 * 7,))
    assert (large.kind, large.shape) == ("beside", (16 + 10,))
    x = images(3, 64, seed=5)
    torch.testing.assert_close(large.readout(large.features(x)), model(x))
    torch.testing.assert_close(large.features(x)[:, :16], model.body[:3](x).mean((2, 3)))


def test_features_outside_of_layers_cross_to_other_processes():
    model = small(lambda net, x: torch.cdist(pooled(x), net.bank))
    found, x = split(model, images(4, 32)), images(2, 32, seed=3)
    other = cloudpickle.loads(cloudpickle.dumps(found.features))
    torch.testing.assert_close(other(x), found.features(x))


def test_one_pass_gives_the_features(monkeypatch):
    model = small(lambda net, x: (net.fc(pooled(x)) + net.other(pooled(x).relu())) / 2)
    found, calls = split(model, images(4, 32)), []
    model.register_forward_hook(lambda *_: calls.append(1))
    found.features(images(5, 32))
    assert len(calls) == 1
