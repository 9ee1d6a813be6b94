"""What probes find in a model: each fault by its code and layer, nothing in healthy ones; nothing is left behind."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from robust_ext import ThreatModel
from robust_ext.core.target import Counted, PassCounter
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.causes.probes import probe_model
from tests.evaluations.diagnosis.models import FAULTS, HEALTHY, Apply, X, Y, inserted, partly, rounded, winners
from tests.evaluations.diagnosis.zoo import cases as zoo
from tests.evaluations.diagnosis.zoo.networks import digits

LINF = ThreatModel(norm="linf", epsilon=0.1)


def probed(model, inputs=X, labels=Y, **kwargs):
    return probe_model(model, inputs, labels, threat_model=LINF, **kwargs)


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named_first_with_its_layer(name):
    make, code, layer = FAULTS[name]
    found = probed(make()).findings
    assert (found[0].code, found[0].layer) == (code, layer), found
    assert found[0].evidence
    assert found[0].remedies


# Logarithms of probabilities are found as such; what they do to a loss, an attack shows.
NAMED = [one for one in zoo.FAULTS if one.of_model and not one.published and one.name != "log outputs"]
ZOO = {fault.name: fault for fault in NAMED}


@pytest.mark.parametrize("name", ZOO)
def test_each_fault_of_the_zoo_is_named_first_and_its_twin_is_not(name):
    fault, (inputs, labels) = ZOO[name], digits()
    faulty, healthy = fault.models()
    found = probed(faulty, inputs, labels).findings
    assert (found[0].code, found[0].layer) == (fault.code, fault.layer), found
    assert [one.code for one in probed(healthy, inputs, labels).findings if one.weight != "low"] == []


# Importing checkpoints takes two seconds.
SLOW = [pytest.param(name, marks=pytest.mark.exhaustive if name == "checkpoint" else ()) for name in HEALTHY]


@pytest.mark.parametrize("name", SLOW)
def test_healthy_models_have_no_findings(name):
    assert probed(HEALTHY[name]()).findings == ()


@pytest.mark.parametrize(
    ("name", "random"),
    [("dropout in train mode", True), ("functional dropout", True), ("batch statistics", False), ("detach", False)],
)
def test_whether_a_model_is_random_in_the_mode_it_is_in(name, random):
    assert probed(FAULTS[name][0]()).random == random


def counted(model):
    return Counted(model, PassCounter())


WRAPPERS = {"sequential": (nn.Sequential, "0."), "counted": (counted, "module."), "double": (nn.Module.double, "")}


@pytest.mark.parametrize("name", WRAPPERS)
def test_models_in_others_and_of_other_types(name):
    wrap, prefix = WRAPPERS[name]
    inputs = X.double() if name == "double" else X
    assert probed(wrap(digits_network()), inputs).findings == ()
    (found,) = probed(wrap(inserted(0, Apply(rounded))), inputs).findings
    assert (found.code, found.layer) == ("zero_gradient", f"{prefix}0")


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_caller_without_gradients(context):
    sound, faulty = digits_network(), inserted(0, Apply(rounded))
    with context():
        assert probed(sound, X.clone()).findings == ()
        assert probed(faulty, X.clone()).findings[0].code == "zero_gradient"


@pytest.mark.parametrize(
    ("step", "code"), [(rounded, "zero_gradient"), (winners, "wrong_gradient"), (torch.detach, "cut_gradient")]
)
def test_several_layers_at_fault_are_fixed_together(step, code):
    model = nn.Sequential(Apply(step), inserted(4, Apply(step))).eval()
    (found,) = probed(model).findings
    assert found.code == code
    assert set(found.remedies[0].view["bpda"].split(",")) == {"0", "1.4"}
    assert found.layer in ("0", "1.4")


def test_accuracy_is_that_of_the_rows():
    model = digits_network()
    with torch.no_grad():
        expected = (model(X).argmax(1) == Y).double().mean().item()
    assert probed(model).clean_accuracy == expected
    assert 0.5 < expected < 1


def test_a_model_is_left_as_it_was():
    model = inserted(1, nn.Sequential(nn.Dropout(0.5), nn.BatchNorm2d(16))).train()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    flags = {name: part.training for name, part in model.named_modules()}
    inputs, drawn = X.clone(), []
    for seed in (3, 3):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        if drawn:
            probed(model, inputs)
        drawn.append((torch.rand(1).item(), np.random.rand(), random.random()))
    assert drawn[0] == drawn[1]
    assert torch.equal(inputs, X)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert {name: part.training for name, part in model.named_modules()} == flags
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def raising(x):
    raise ValueError("no such thing")


@pytest.mark.parametrize("function", [raising, lambda x: x.numpy().tolist(), lambda x: x.view(32, -1)[:, :4].sum(1)])
def test_a_model_that_raises_is_a_finding_and_left_as_it_was(function):
    model = inserted(8, Apply(function))
    found = probed(model).findings
    assert found[0].code in ("crashed", "cut_gradient"), found
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_probe_costs_at_most_fifty_passes():
    rows = {"forward": 0, "backward": 0}
    model = inserted(0, Apply(partly))
    first = model[1]

    def forward(_module, _inputs, out):
        rows["forward"] += len(out)
        if out.requires_grad:
            out.register_hook(lambda gradient: rows.__setitem__("backward", rows["backward"] + len(gradient)))

    first.register_forward_hook(forward)
    probed(model)
    # A backward pass costs two forward passes.
    assert 0 < rows["forward"] + 2 * rows["backward"] <= 50 * 4 * 3
