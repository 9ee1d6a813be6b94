"""What a guarded block changes of a network or of the process is found where it counts, and undone."""

import copy
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from robust_ext.core.guard import guarded


class Layer(nn.Module):
    """A linear layer that keeps what modules keep beside parameters, and counts its passes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("shift", torch.zeros(4))
        self.mean, self.factor, self.passes, self.last = torch.tensor([1.0, float("nan"), 3.0, -0.0]), 2.0, 0, None
        self.hidden = [nn.Linear(4, 4)]

    def forward(self, x):
        self.passes += 1
        self.last = self.factor * self.inner(x) + self.shift
        return self.hidden[0](self.last)


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


def transposed(network):
    with torch.no_grad():
        network[0].inner.weight.t_()


def halved(network):
    network[3].half()


def replaced_parameter(network):
    network[3].weight = nn.Parameter(torch.zeros(3, 4))


def replaced_module(network):
    network[2] = nn.Tanh()


def added_module(network):
    network.append(nn.Softmax(1))


def registers_replaced(network):
    network[3]._parameters = {"weight": nn.Parameter(torch.zeros(3, 4)), "bias": None}


def hook(network):
    network.register_forward_hook(lambda module, args, out: -out)


TAMPERING = {
    in_place: "3.weight",
    through_data: "3.weight",
    another_data: "3.weight",
    another_storage: "3.weight",
    transposed: "0.inner.weight",
    halved: "3.weight",
    replaced_parameter: "the weights of 3",
    replaced_module: "the submodules of Sequential",
    added_module: "the submodules of Sequential",
    registers_replaced: "the weights of 3",
    hook: "the hooks of Sequential",
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
    assert TAMPERING[tamper] in found.network
    assert torch.equal(network(X), expected)
    assert all(now is before for now, before in zip(network.parameters(), parameters, strict=True))
    assert [(type(p), p.requires_grad, p.stride()) for p in parameters] == kinds
    for now, before in zip(network.state_dict().items(), twin.state_dict().items(), strict=True):
        assert now[0] == before[0]
        assert torch.equal(now[1].view(-1).view(torch.uint8), before[1].view(-1).view(torch.uint8))
    assert [type(part) for part in network.modules()] == [type(part) for part in twin.modules()]
    with guarded(network) as again:
        network(X)
    assert (again.network, again.process) == ([], [])


def test_what_careful_attacks_do_is_put_back_without_a_word(network):
    """Train mode, statistics, gradients, and what the network itself notes in a forward pass."""
    before = copy.deepcopy(network.state_dict())
    with guarded(network) as found:
        assert not any(p.requires_grad for p in network.parameters())
        network.train()
        network.requires_grad_(True)
        network(torch.rand(8, 4)).sum().backward()
        network[1].running_mean = torch.ones(4)
        network[0].shift.add_(1)
        network.double().float()
        handle = network.register_forward_hook(lambda *_: None)
        handle.remove()
    assert (found.network, found.process) == ([], [])
    assert not network.training
    assert all(p.grad is None and p.requires_grad for p in network.parameters())
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name])


def test_attributes_are_put_back_without_a_word(network):
    """Also those in plain dicts and lists, where attacks get a copy."""
    network[0].config = {"levels": [8, 16], "on": True}
    with guarded(copy.deepcopy(network), originals=[network]) as found:
        network[0].factor, network[0].mean, network[0].forward = 0.0, torch.zeros(4), None
        network[0].extra = 1
        network[0].config["levels"][0] = 2
        del network[0].config["on"]
    assert (found.network, found.process) == ([], [])
    assert network[0].factor == 2.0
    assert network[0].config == {"levels": [8, 16], "on": True}
    assert not hasattr(network[0], "extra")
    assert float(network[0].mean[0]) == 1
    network(X)


def test_what_a_network_without_a_copy_notes_of_its_queries_is_left_to_it(network):
    network.queries, network.calls = [], 0
    with guarded(network):
        network.queries.append(1)
        network.calls += 1
    assert (network.queries, network.calls) == ([1], 1)


def test_a_probe_sees_attributes_before_they_are_put_back_and_weights_after(network):
    def probe():
        return [f"factor {network[0].factor}", f"weight {float(network[3].weight.abs().sum() > 0)}"]

    with guarded(network, probe=probe) as found:
        network[0].factor = 0.0
        network[3].weight.data.zero_()
    assert found.network == ["3.weight", "factor 0.0", "weight 1.0"]
    assert network[0].factor == 2.0


def test_a_copy_is_guarded_with_its_original(network):
    twin = copy.deepcopy(network)
    for changed in (network, twin):
        with guarded(twin, originals=[network]) as found:
            changed[3].weight.data.zero_()
        assert found.network == ["3.weight"]
        assert torch.equal(network(X), twin(X))
        assert bool(network[3].weight.any())


def test_weights_that_their_owner_changes_between_blocks_are_not_put_back(network):
    with guarded(network):
        pass
    network[3].weight.data.zero_()
    with guarded(network) as found:
        network(X)
    assert not found.network
    assert not network[3].weight.any()


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
    "cuDNN's flags": lambda: setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark),
    "the working folder": lambda: os.chdir(".."),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
}


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
        torch.backends.cudnn.benchmark,
        Path.cwd(),
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
        assert found.process == [name]
        assert settings() == before
        assert not found.network


def test_the_default_device_of_the_caller_stays():
    torch.set_default_device("cpu")
    try:
        stack = torch._C._len_torch_function_stack()
        with guarded(nn.Linear(2, 2)) as found:
            torch.set_default_device("meta")
        assert "the default device" in found.process
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
        assert (found.network, found.process) == ([], [])
    assert torch.equal(run(), expected)
