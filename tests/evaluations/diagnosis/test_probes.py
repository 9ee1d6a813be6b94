"""What probes find in a model: each fault by its code and layer, none in healthy ones; and how they look."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from robust_ext.core.target import Counted, PassCounter
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.causes.probes import probe_model
from robust_ext.evaluations.causes.secants import near_identity, secants
from robust_ext.evaluations.causes.tracing import traced
from tests.evaluations.diagnosis.models import (
    FAULTS,
    HEALTHY,
    Apply,
    Opposite,
    Own,
    X,
    Y,
    inserted,
    jpeg,
    rounded,
    winners,
)
from tests.evaluations.diagnosis.zoo.cases import LINF
from tests.evaluations.diagnosis.zoo.layers import Silent


def probed(model, inputs=X, labels=Y):
    return probe_model(model, inputs, labels, threat_model=LINF)


def hooks(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [len(getattr(part, kind)) for part in model.modules() for kind in kinds]


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named_first_with_its_layer(name):
    make, code, layer = FAULTS[name]
    found = probed(make())
    assert (found.findings[0].code, found.findings[0].layer) == (code, layer), found
    assert found.findings[0].remedies
    assert found.random == (code == "random_output")


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_have_no_findings(name):
    assert probed(HEALTHY[name]()).findings == ()


WRAPPERS = {
    "sequential": (nn.Sequential, "0.", X),
    "counted": (lambda model: Counted(model, PassCounter()), "module.", X),
    "double": (nn.Module.double, "", X.double()),
}


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", WRAPPERS)
def test_models_in_others_and_of_other_types_and_callers_without_gradients(name, context):
    wrap, prefix, inputs = WRAPPERS[name]
    sound, faulty = wrap(digits_network()), wrap(inserted(0, rounded))
    with context():
        assert probed(sound, inputs.clone()).findings == ()
        (found,) = probed(faulty, inputs.clone()).findings
    assert (found.code, found.layer) == ("zero_gradient", f"{prefix}0")


@pytest.mark.parametrize(
    ("step", "code"), [(rounded, "zero_gradient"), (winners, "wrong_gradient"), (torch.detach, "cut_gradient")]
)
def test_several_layers_at_fault_are_fixed_together(step, code):
    (found,) = probed(nn.Sequential(Apply(step), inserted(4, step)).eval()).findings
    assert found.code == code
    assert set(found.remedies[0].view["bpda"].split(",")) == {"0", "1.4"}
    assert found.layer in ("0", "1.4")


def test_a_model_is_left_as_it_was():
    model = inserted(1, nn.Sequential(nn.Dropout(0.5), nn.BatchNorm2d(16))).train()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    state = {name: value.clone() for name, value in model.state_dict().items()}
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
    assert all(part.training for part in model[1].modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert not any(hooks(model))


def raising(x):
    raise ValueError("no such thing")


@pytest.mark.parametrize("function", [raising, lambda x: x.numpy().tolist(), lambda x: x.view(32, -1)[:, :4].sum(1)])
def test_a_model_that_raises_is_a_finding_and_left_as_it_was(function):
    model = inserted(8, function)
    assert probed(model).findings[0].code in ("crashed", "cut_gradient")
    assert not any(hooks(model))
    assert all(parameter.requires_grad for parameter in model.parameters())


CHANGES = {
    "zero": (torch.zeros_like, ["zero_gradient"]),
    "turned round": (torch.neg, ["wrong_gradient"]),
    "signs": (torch.sign, ["wrong_gradient"]),
    "NaN": (lambda g: g * torch.nan, ["non_finite_gradient"]),
    # Those that look or scale are no faults.
    "the same": (torch.clone, []),
    "twice as much": (lambda g: 2 * g, []),
    "nothing": (lambda g: None, []),
}


@pytest.mark.parametrize("layer", ["2", "5", "", "before 2", "tensor"])
@pytest.mark.parametrize("name", CHANGES)
def test_hooks_that_change_gradients_are_named_with_their_module(name, layer):
    (change, codes), model, own = CHANGES[name], digits_network(), not layer.startswith("before")

    def changed(gradients):
        found = [None if one is None else change(one) for one in gradients]
        return None if any(one is None for one in found) else tuple(found)

    def tensors(x):
        if x.requires_grad:
            x.register_hook(change)
        return x

    layer = layer.removeprefix("before ")
    if layer == "tensor":
        model, layer = Own(tensors), ""
    elif own:
        model.get_submodule(layer).register_full_backward_hook(lambda module, down, up: changed(down))
    else:
        model.get_submodule(layer).register_full_backward_pre_hook(lambda module, up: changed(up))
    before = hooks(model)
    found = probed(model).findings
    assert [(one.code, one.layer) for one in found] == [(code, layer) for code in codes]
    assert hooks(model) == before


# Secants by closed forms; places of operations, cuts and dead nodes in traced passes.
U = torch.randn(4, 200, generator=torch.Generator().manual_seed(0))


def compared(function, points=U):
    return secants(lambda given: [function(*given)], (points,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [0.001, 0.5, 2.0, 10.0])
def test_a_gradient_of_another_size_has_the_error_of_its_factor(factor, dtype):
    found = compared(lambda x: factor * x + (1 - factor) * x.detach(), U.to(dtype))
    expected = abs(1 - factor) / (1 + factor)
    assert (found.small, found.large, found.steepness) == pytest.approx((expected, expected, 1), abs=1e-3)
    assert found.fault == ("wrong_gradient" if expected > 0.4 else None)


def test_a_parabola_has_no_error_a_cube_that_of_its_curvature_and_zeros_at_a_kink_are_looked_at_beside_it():
    assert compared(torch.square).large < 1e-3
    # The point lies at up to 1.1, moved by .1 of it: ((p + h)^3 - (p - h)^3) / 2 h = 3 p^2 + h^2.
    assert compared(lambda x: x**3, torch.ones(4, 50)).large == pytest.approx(0.01 / 6, rel=0.3)
    sparse = torch.where(torch.rand(U.shape, generator=torch.Generator().manual_seed(1)) < 0.9, 0.0, U)
    assert compared(torch.relu, sparse).large < 0.3


class Net(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.first, self.second, self.step = nn.Linear(64, 16), nn.Sequential(nn.ReLU(), nn.Linear(16, 3)), step
        self.requires_grad_(False)

    def forward(self, x):
        return self.second(self.step(self.first(x.flatten(1))))


def trace_of(net, *, backward=True):
    with traced(net, 4) as trace:
        out = net(X[:4].clone().requires_grad_())
        if backward:
            out.sum().backward()
    return trace, out


CUTS = {
    "detach": (torch.detach, "detach", False),
    "data": (lambda x: x.data + 1, "data", False),
    "item": (lambda x: torch.full_like(x, x.sum().item()), "item", False),
    "argmax": (lambda x: nn.functional.one_hot(x.argmax(1), 16).float(), "argmax", False),
    "comparison": (lambda x: (x > 0).float(), "gt", False),
    "no_grad": (torch.no_grad()(lambda x: x * 2), "mul", True),
}


@pytest.mark.parametrize("inside", [False, True], ids=["in the forward", "in a module"])
@pytest.mark.parametrize("name", CUTS)
def test_the_operation_that_cuts_the_graph(name, inside):
    step, operation, off = CUTS[name]
    trace, out = trace_of(Net(Apply(step) if inside else step), backward=False)
    assert not out.requires_grad
    place = trace.cut.place
    assert (place.call.name, place.operation, trace.cut.graph_off) == ("step" if inside else "", operation, off)


def test_gradient_norms_are_those_of_the_layers():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 5, bias=False), nn.Linear(5, 1, bias=False)).requires_grad_(False)
    found = {call.name: call.gradient.float() for call in trace_of(net)[0].calls}
    assert torch.allclose(found["2"], torch.ones(4))
    assert torch.allclose(found["1"], net[2].weight.norm().expand(4))
    assert torch.allclose(found["0"], (net[2].weight @ net[1].weight).norm().expand(4), rtol=1e-4)


@pytest.mark.parametrize(
    ("function", "share"), [(rounded, 0.0), (Silent.apply, 0.0), (lambda x: x * 1e-6, 1e-6), (Opposite.apply, 1.0)]
)
def test_what_a_layer_passes_on_is_measured_at_its_input(function, share):
    """A layer that stops the gradient has all of it at its output."""
    net = nn.Sequential(Apply(function), nn.Flatten(), nn.Linear(64, 3)).eval()
    layers = {one.name: one for one in probe_model(net, X[:8], Y[:8] % 3, threat_model=LINF, seed=0).layers}
    assert layers["0"].gradient_norm > 0
    assert layers["0"].passed_norm == pytest.approx(share * layers["0"].gradient_norm, rel=1e-3)
    assert layers["2"].passed_norm == pytest.approx(layers["1"].gradient_norm, rel=1e-6)


NEAR = {
    "the identity": torch.clone,
    "quantised": rounded,
    "detached": torch.detach,
    "of the wrong sign backwards": Opposite.apply,
    "steep sigmoids": lambda x: torch.sigmoid(500 * (x - 0.45)),
    "compressed": jpeg,
    "contrast": lambda x: 1.2 * x - 0.1,
    "ReLU": lambda x: (x - 0.1).relu(),
}
FAR = {
    "few winners": lambda x: winners(x - 0.5, 0.05),
    "turned": lambda x: x.flip(-1),
    "mixed": lambda x: x @ torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0))).Q,
    "negated": torch.neg,
    "constant": torch.zeros_like,
}


@pytest.mark.parametrize(("functions", "near"), [(NEAR, True), (FAR, False)], ids=["near", "far"])
def test_what_is_like_the_identity(functions, near):
    for name, function in functions.items():
        found = near_identity(lambda given, h=function: [h(*given)], [X], generator=torch.Generator().manual_seed(0))
        assert (name, found) == (name, near)
