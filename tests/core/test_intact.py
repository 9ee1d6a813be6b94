"""Whatever a guarded block does to a network, to code or to the process is seen where it counts, and put back."""

import builtins
import copy
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from robust_ext.core import threat
from robust_ext.core.intact.code import settled
from robust_ext.core.intact.guard import guarded
from robust_ext.core.threat import ThreatModel
from robust_ext.models.binarized import identifiable


def shown(x):
    return x


class Layer(nn.Module):
    """A linear layer that keeps what modules keep beside parameters, and counts its passes."""

    sign, calls = 1, 0

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("shift", torch.zeros(4))
        self.mean, self.factor, self.passes, self.last = torch.tensor([1.0, float("nan"), 3.0, -0.0]), 2.0, 0, None
        self.hidden = [nn.Linear(4, 4)]
        held = nn.Linear(4, 4)
        self.lazy = lambda x: held(x)

    def forward(self, x):
        self.passes += 1
        Layer.calls += 1
        self.last = self.factor * self.inner(x) + self.shift
        return self.sign * shown(self.lazy(self.hidden[0](self.last)))


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(Layer(), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).eval()


X = torch.linspace(-1, 1, 20).view(5, 4)


def in_place(network):
    with torch.no_grad():
        network[3].weight.mul_(0.5)


def through_data(network):
    network[3].weight.data.mul_(0.5)


def another_data(network):
    network[3].weight.data = torch.zeros(2, 2)


def another_storage(network):
    with torch.no_grad():
        network[3].weight.set_(torch.zeros(3, 4))


def storage_released(network):
    network[3].weight.data.untyped_storage().resize_(0)


def transposed(network):
    with torch.no_grad():
        network[0].inner.weight.t_()


def halved(network):
    network[3].half()


def replaced_parameter(network):
    network[3].weight = nn.Parameter(torch.zeros(3, 4))


def shadowed_parameter(network):
    vars(network[3])["weight"] = torch.zeros(3, 4)


def hidden_weights(network):
    network[0].hidden[0].weight.data.zero_()


def deceiving_class(network):
    class Same(nn.Parameter):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return True if function is torch.equal else super().__torch_function__(function, types, args, kwargs or {})

    network[3].weight.data.zero_()
    network[3].weight.__class__ = Same


def replaced_module(network):
    network[2] = nn.Tanh()


def added_module(network):
    network.append(nn.Softmax(1))


def registers_replaced(network):
    network[3]._parameters = {"weight": nn.Parameter(torch.zeros(3, 4)), "bias": None}


def hook(network):
    network.register_forward_hook(lambda module, args, out: -out)


def global_hook(network):
    nn.modules.module.register_module_forward_hook(lambda module, args, out: -out)


def forward_of_instance(network):
    network[0].forward = lambda x: torch.zeros(len(x), 4)


def forward_of_class(network):
    Layer.forward = lambda self, x: torch.zeros(len(x), 4)


def call_of_class(network):
    Layer.__call__ = lambda self, x: torch.zeros(len(x), 4)


def call_of_modules(network):
    nn.Module.__call__ = lambda self, x: torch.zeros(len(x), 4)


def class_of_instance(network):
    network[2].__class__ = nn.Tanh


def function_of_torch(network):
    nn.functional.linear = lambda x, *_: torch.zeros(len(x), 4)


def method_of_tensors(network):
    torch.Tensor.argmax = lambda self, *_: torch.zeros(len(self))


def code_of_class(network):
    Layer.forward.__code__ = (lambda self, x: torch.zeros(len(x), 4)).__code__


def defaults_of_judge(network):
    identifiable.__defaults__ = (1,)


def builtin(network):
    builtins.zip = None


def behind_a_closure(network):
    network[0].lazy.__closure__[0].cell_contents.weight.data.zero_()


def parameter_hidden_by_its_class(network):
    nn.Linear.weight = property(lambda self: torch.zeros(self.out_features, self.in_features))


def constant_of_class(network):
    Layer.sign = -1


def function_of_its_file(network):
    globals()["shown"] = lambda x: -x


def judge(network):
    ThreatModel.contains = lambda self, one, other: torch.ones(len(one), dtype=torch.bool)


def constant_of_judge(network):
    threat.NORMS = ("l0",)


def hidden_builtin(network):
    threat.len = lambda _: 0


TAMPERING = {
    in_place: r"3\.weight",
    through_data: r"3\.weight",
    another_data: r"3\.weight",
    another_storage: r"3\.weight",
    storage_released: r"3\.weight",
    transposed: r"0\.inner\.weight",
    halved: r"3\.weight",
    replaced_parameter: "the weights weight of 3",
    shadowed_parameter: "weight of 3",
    hidden_weights: r"0\.hidden\.weight",
    deceiving_class: r"3\.weight",
    replaced_module: "the submodules 2 of Sequential",
    added_module: "the submodules 4 of Sequential",
    registers_replaced: "the weights weight, bias of 3",
    hook: "the hooks of Sequential",
    global_hook: "torch's global forward hooks",
    forward_of_instance: "forward of 0",
    forward_of_class: r"Layer\.forward",
    call_of_class: r"Layer\.__call__",
    call_of_modules: r"Module\.__call__",
    class_of_instance: "the class of 2",
    function_of_torch: r"torch\.nn\.functional\.linear",
    method_of_tensors: r"Tensor\.argmax",
    code_of_class: r"Layer\.forward",
    defaults_of_judge: r"robust_ext\.models\.binarized\.identifiable",
    builtin: r"builtins\.zip",
    behind_a_closure: r"0\.lazy\.weight",
    parameter_hidden_by_its_class: r"Linear\.weight",
    constant_of_class: r"Layer\.sign",
    function_of_its_file: r".*test_intact\.shown",
    judge: r"ThreatModel\.contains",
    constant_of_judge: r"robust_ext\.core\.threat\.NORMS",
    hidden_builtin: r"robust_ext\.core\.threat\.len",
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("tamper", TAMPERING, ids=lambda tamper: tamper.__name__)
def test_tampering_is_seen_and_put_back(network, tamper, fails):
    twin, parameters = copy.deepcopy(network), list(network.parameters())
    kinds = [(type(p), p.requires_grad, p.stride()) for p in parameters]
    expected = network(X)
    try:
        with guarded(network) as found:
            tamper(network)
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert fails
    assert any(re.fullmatch(TAMPERING[tamper], entry) for entry in found.network), found.network
    assert len(threat.NORMS) == 3
    assert torch.equal(network(X), expected)
    assert all(now is before for now, before in zip(network.parameters(), parameters, strict=True))
    assert [(type(p), p.requires_grad, p.stride()) for p in parameters] == kinds
    for now, before in zip(network.state_dict().items(), twin.state_dict().items(), strict=True):
        assert now[0] == before[0]
        assert torch.equal(now[1].view(-1).view(torch.uint8), before[1].view(-1).view(torch.uint8))
    assert [type(part) for part in network.modules()] == [type(part) for part in twin.modules()]
    with guarded(network) as again:
        network(X)
    assert (again.network, again.left) == ([], [])


def test_what_careful_attacks_do_is_put_back_without_a_word(network):
    """Train mode, statistics, gradients, and what the network itself notes in a forward pass."""
    before = copy.deepcopy(network.state_dict())
    mean = network[0].mean.clone()
    with guarded(network) as found:
        assert not any(p.requires_grad for p in network.parameters())
        network.train()
        network.requires_grad_(True)
        network(torch.rand(8, 4)).sum().backward()
        network[1].running_mean = torch.ones(4)
        network[0].shift.add_(1)
        network[0].mean.add_(1)
        network.double().float()
        handle = network.register_forward_hook(lambda *_: None)
        handle.remove()
    assert (found.network, found.left) == ([], [])
    assert not network.training
    assert all(p.grad is None and p.requires_grad for p in network.parameters())
    assert network[0].passes == 1  # Its own count goes on.
    assert torch.equal(network[0].mean, mean) or torch.equal(network[0].mean.nan_to_num(9), mean.nan_to_num(9))
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name])


def test_attributes_are_put_back_and_mentioned(network):
    with guarded(network) as found:
        network[0].factor, network[0].mean, network[0].passes = 0.0, torch.zeros(4), 5
        network[0].extra = 1
    assert (found.network, sorted(found.left)) == ([], ["factor of 0"])
    assert (network[0].factor, network[0].passes) == (2.0, 5)
    assert not hasattr(network[0], "extra")
    assert float(network[0].mean[0]) == 1


def test_weights_that_their_owner_changes_between_blocks_are_not_put_back(network):
    with guarded(network):
        pass
    network[3].weight.data.zero_()
    with guarded(network) as found:
        network(X)
    assert not found.network
    assert not network[3].weight.any()


def test_code_that_changes_between_blocks_is_put_back_where_it_has_to_be_settled(network, monkeypatch):
    contains = ThreatModel.contains
    with settled():
        with guarded(network):
            pass
        # As a thread does that an attack left running.
        monkeypatch.setattr(ThreatModel, "contains", shown)
        with guarded(network) as found:
            network(X)
        assert found.network == ["ThreatModel.contains"]
        assert ThreatModel.contains is contains
    monkeypatch.setattr(ThreatModel, "contains", shown)
    with guarded(network) as found:
        network(X)
    assert not found.network


KEPT = []


def enter(context):
    KEPT.append(context)
    context.__enter__()


LEFT = {
    "the default dtype": lambda: torch.set_default_dtype(torch.float64),
    "the gradient mode": lambda: torch.set_grad_enabled(not torch.is_grad_enabled()),
    "inference mode": lambda: enter(torch.inference_mode()),
    "the number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "the precision of matrix products": lambda: torch.set_float32_matmul_precision("medium"),
    "the default device": lambda: torch.set_default_device("meta"),
    "numpy's error handling": lambda: np.seterr(all="raise"),
    "the working folder": lambda: os.chdir(".."),
    "the profile function": lambda: sys.setprofile(lambda *_: None),
    "torch's dispatch modes": lambda: enter(Counting()),
    "torch's function modes": lambda: enter(Silent()),
    "autocast on cpu": lambda: torch.set_autocast_enabled("cpu", True),
}


class Silent(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def settings():
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_anomaly_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_default_device(),
        torch._C._len_torch_function_stack(),
        np.geterr(),
        Path.cwd(),
        sys.getprofile(),
        torch._C._len_torch_dispatch_stack(),
        torch.is_autocast_enabled("cpu"),
        torch.rand(1).dtype,
        (torch.ones(1, requires_grad=True) * 2).requires_grad,
    )


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", LEFT)
@pytest.mark.parametrize("gradients", [True, False])
def test_settings_of_the_process_do_not_leak(network, name, gradients):
    with torch.set_grad_enabled(gradients):
        before = settings()
        with guarded(network) as found:
            LEFT[name]()
        assert found.left == [name, *(["torch's function modes"] if name == "the default device" else [])]
        assert settings() == before
        assert not found.network


def test_the_default_device_of_the_caller_stays():
    torch.set_default_device("cpu")
    try:
        stack = torch._C._len_torch_function_stack()
        with guarded(nn.Linear(2, 2)) as found:
            torch.set_default_device("meta")
        assert "the default device" in found.left
        assert torch._C._len_torch_function_stack() == stack
        assert torch.rand(1).device.type == "cpu"
    finally:
        torch.set_default_device(None)
    assert torch._C._len_torch_function_stack() == 0


def linear():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).eval()


def expanded():
    network = linear()
    network.register_buffer("wide", torch.ones(1).expand(5))
    return network


def sparse():
    network = linear()
    network.register_buffer("few", torch.eye(3).to_sparse())
    return network


def complex_buffer():
    network = linear()
    network.register_buffer("waves", torch.fft.fft(torch.ones(3)))
    return network


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    {
        "script": lambda: torch.jit.script(linear()),
        "trace": lambda: torch.jit.trace(linear(), X),
        "fx": lambda: torch.fx.symbolic_trace(linear()),
        "parametrised": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))).eval(),
        "weight norm": lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 3))).eval(),
        "spectral norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 3))).eval(),
        "lstm": lambda: nn.LSTM(4, 3).eval(),
        "half": lambda: linear().bfloat16().float(),
        "parallel": lambda: nn.DataParallel(linear()),
        "expanded": expanded,
        "sparse": sparse,
        "complex": complex_buffer,
    }.items(),
    ids=lambda item: item[0],
)
def test_networks_of_many_kinds_are_left_alone(make):
    network = make[1]()

    def run():
        out = network(X)
        return out[0] if isinstance(out, tuple) else out

    expected = run()
    for _ in range(2):
        with guarded(network) as found:
            run()
            x = X.clone().requires_grad_()
            out = network(x)
            (out[0] if isinstance(out, tuple) else out).sum().backward()
        assert (found.network, found.left) == ([], [])
    assert torch.equal(run(), expected)
