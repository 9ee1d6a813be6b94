"""What a guarded or frozen block changes of a network or the process is undone; a machine's memory, cores, devices."""

import copy
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from robust_ext import InvalidArgumentError, binarization_test, plant
from robust_ext.core import machine
from robust_ext.core.devices import check_device, on_device, run_device
from robust_ext.core.errors import AttackError, ModelError, RobustExtWarning
from robust_ext.core.guard import frozen, guarded
from robust_ext.core.machine import OutOfMemory, RowLimit, lap, on_free_cores, power_of_two, rows_that_fit
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.binarization.witnesses import find_witnesses


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
    return nn.Sequential(Layer(), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3), nn.Dropout(0.5)).eval()


X = torch.linspace(-1, 1, 20).view(5, 4)
ZEROS = torch.zeros(3, 4)
TAMPERING = {
    "in place": (lambda net: net[3].weight.mul_(0.5), "3.weight"),
    "through data": (lambda net: net[3].weight.data.mul_(0.5), "3.weight"),
    "another data": (lambda net: setattr(net[3].weight, "data", torch.zeros(2, 2)), "3.weight"),
    "another storage": (lambda net: net[3].weight.set_(ZEROS.clone()), "3.weight"),
    "transposed": (lambda net: net[0].inner.weight.t_(), "0.inner.weight"),
    "halved": (lambda net: net[3].half(), "3.weight"),
    "replaced parameter": (lambda net: setattr(net[3], "weight", nn.Parameter(ZEROS)), "the weights of 3"),
    "registers": (lambda net: setattr(net[3], "_parameters", {"weight": nn.Parameter(ZEROS)}), "the weights of 3"),
    "replaced module": (lambda net: setattr(net, "2", nn.Tanh()), "the submodules of Sequential"),
    "added module": (lambda net: net.append(nn.Softmax(1)), "the submodules of Sequential"),
    "hook": (lambda net: net.register_forward_hook(lambda module, args, out: -out), "the hooks of Sequential"),
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", TAMPERING)
def test_tampering_is_seen_and_put_back(network, name, fails):
    tamper, words = TAMPERING[name]
    twin, parameters = copy.deepcopy(network), list(network.parameters())
    kinds = [(type(p), p.requires_grad, p.stride()) for p in parameters]
    expected = network(X)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), guarded(network) as found:
        with torch.no_grad():
            tamper(network)
        if fails:
            raise ZeroDivisionError
    assert words in found.network
    assert torch.equal(network(X), expected)
    assert all(now is before for now, before in zip(network.parameters(), parameters, strict=True))
    assert [(type(p), p.requires_grad, p.stride()) for p in parameters] == kinds
    for now, before in zip(network.state_dict().items(), twin.state_dict().items(), strict=True):
        assert now[0] == before[0]
        assert torch.equal(now[1].view(-1).view(torch.uint8), before[1].view(-1).view(torch.uint8))
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
        network.register_forward_hook(lambda *_: None).remove()
    assert (found.network, found.process) == ([], [])
    assert not network.training
    assert all(p.grad is None and p.requires_grad for p in network.parameters())
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name])


def test_attributes_are_put_back_without_a_word_and_what_a_network_without_a_copy_notes_is_left_to_it(network):
    """Also those in plain dicts and lists, where attacks get a copy."""
    network[0].config = {"levels": [8, 16], "on": True}
    with guarded(copy.deepcopy(network), originals=[network]) as found:
        network[0].factor, network[0].mean, network[0].forward = 0.0, torch.zeros(4), None
        network[0].extra = 1
        network[0].config["levels"][0] = 2
        del network[0].config["on"]
    assert (found.network, found.process) == ([], [])
    assert (network[0].factor, network[0].config) == (2.0, {"levels": [8, 16], "on": True})
    assert not hasattr(network[0], "extra")
    assert float(network[0].mean[0]) == 1
    network(X)
    network.queries = []
    with guarded(network):
        network.queries.append(1)
    assert network.queries == [1]


@pytest.mark.parametrize("fails", [False, True])
def test_frozen_passes_gradients_of_inputs_and_leaves_no_trace(network, fails):
    """Whatever attacks do: train mode, gradients on weights or zeroed in place, buffers replaced, errors."""
    parameters = list(network.parameters())
    parameters[0].requires_grad_(False)
    parameters[1].grad = torch.full_like(parameters[1], 3.0)
    network[2].train()
    network[0].hidden = [nn.Identity()]
    network.register_buffer("unknown", torch.tensor(float("nan")))
    required, grads = [p.requires_grad for p in parameters], [p.grad for p in parameters]
    before, kept = copy.deepcopy(network), [id(buffer) for buffer in network.buffers()]
    x = torch.rand(2, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(network(x).sum(), x)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), frozen(network):
        assert not any(p.requires_grad for p in parameters)
        torch.testing.assert_close(torch.autograd.grad(network(x).sum(), x)[0], expected)
        assert not network(x.detach()).requires_grad
        network.train().requires_grad_(True)
        network(torch.rand(8, 4)).sum().backward()
        network.zero_grad(set_to_none=False)
        network[1].running_var = torch.zeros(4)
        network.unknown.zero_()
        network[1].num_batches_tracked.add_(7)
        if fails:
            raise ZeroDivisionError
    assert [p.requires_grad for p in parameters] == required
    assert [part.training for part in network.modules()] == [part.training for part in before.modules()]
    assert [id(buffer) for buffer in network.buffers()] == kept
    assert all(now.grad is grad for now, grad in zip(parameters, grads, strict=True))
    assert torch.equal(parameters[1].grad, torch.full_like(parameters[1], 3.0))
    torch.testing.assert_close(dict(network.named_buffers()), dict(before.named_buffers()), equal_nan=True)


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
        *(torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        *(torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled()),
        *(torch.get_float32_matmul_precision(), torch.get_default_device(), torch._C._len_torch_function_stack()),
        *(np.geterr(), torch.backends.cudnn.benchmark, Path.cwd(), torch.is_autocast_enabled("cpu")),
        *(torch.rand(1).dtype, (torch.ones(1, requires_grad=True) * 2).requires_grad),
    )


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("gradients", [True, False])
def test_settings_of_the_process_do_not_leak(network, gradients):
    with torch.set_grad_enabled(gradients):
        before = settings()
        for name, leave in LEFT.items():
            with guarded(network) as found:
                leave()
            assert (found.process, found.network, settings()) == ([name], [], before)


def linear(buffer=None):
    network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    network.register_buffer("more", buffer)
    return network


KINDS = {
    "script": lambda: torch.jit.script(linear()),
    "trace": lambda: torch.jit.trace(linear(), X),
    "parametrised": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))).eval(),
    "weight norm": lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 3))).eval(),
    "spectral norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 3))).eval(),
    "lstm": lambda: nn.LSTM(4, 3).eval(),
    "expanded": lambda: linear(torch.ones(1).expand(5)),
    "sparse": lambda: linear(torch.eye(3).to_sparse()),
    "complex": lambda: linear(torch.fft.fft(torch.ones(3))),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_networks_of_many_kinds_are_left_alone(kind):
    network = KINDS[kind]()

    def run(x=X):
        out = network(x)
        return out[0] if isinstance(out, tuple) else out

    expected = run()
    for _ in range(2):
        with guarded(network) as found:
            run(X.clone().requires_grad_()).sum().backward()
        assert (found.network, found.process) == ([], [])
    assert torch.equal(run(), expected)


LINF, SETTINGS = ThreatModel(norm="linf", epsilon=0.1), {"inner_points": 60, "forward_batch": 64, "fold": False}
DIGITS = load_dataset("digits").take(range(12))[0]


class Small(nn.Module):
    """A network on a device that holds so many rows, fewer with gradients; ``sizes`` are those of its batches."""

    def __init__(self, network, rows=sys.maxsize, rows_of_gradients=sys.maxsize):
        super().__init__()
        self.network, self.rows, self.rows_of_gradients, self.sizes = network, rows, rows_of_gradients, []
        self.eval()

    def forward(self, x):
        self.sizes.append(len(x))
        if len(x) > (self.rows_of_gradients if torch.is_grad_enabled() else self.rows):
            raise OutOfMemory("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return self.network(x)


@pytest.mark.parametrize(("total", "most"), [(0, 4), (1, 4), (13, 4), (64, 64), (433, 64)])
def test_rows_go_through_in_batches_of_nearly_equal_size(total, most):
    points, module = torch.rand(total, 3), Small(nn.Identity())
    assert torch.equal(RowLimit(most).run(module, points), points)
    assert module.sizes == [len(part) for part in points.tensor_split(max(1, -(-total // most)))]


def test_a_batch_that_does_not_fit_is_halved_for_good_and_noted_once():
    module, limit, points = Small(nn.Identity(), 5), RowLimit(64), torch.rand(100, 3)
    with pytest.warns(RobustExtWarning, match="out of memory") as warned, torch.no_grad():
        found = [limit.run(module, points), module.sizes.clear(), limit.run(module, points)]
    assert torch.equal(found[0], points)
    assert torch.equal(found[2], points)
    assert max(module.sizes) <= 5 <= 2 * limit.rows
    assert len(warned) == 1
    with pytest.raises(ModelError, match=r"single row of shape \(3,\)"), torch.no_grad():
        RowLimit(64).run(Small(nn.Identity(), 0), points)


def test_where_gradients_do_not_fit_attacks_name_the_setting_and_witnesses_do_without():
    def ascend(model, x, y):
        return model(x.requires_grad_(True))

    with pytest.raises(AttackError, match=r"ascend: out of memory .*batch_size \(--batch-size\)"):
        binarization_test(Small(digits_network(), rows_of_gradients=4), ascend, DIGITS, LINF, depths=(1,), **SETTINGS)
    planted = plant(digits_network(), DIGITS, LINF, **SETTINGS)
    features = Small(planted.features, rows_of_gradients=4)
    settings = replace(planted.settings, witness_queries=20)
    assert [one.name for one in find_witnesses(features, planted.problems, settings)] == ["Square"]


def test_rows_of_a_gpu_follow_from_its_memory(monkeypatch):
    """With the counters of torch.cuda as a network has them that takes 1 MiB a row."""
    mebibyte, taken = 2**20, []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100 * mebibyte)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 150 * mebibyte)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: (100 + sum(taken)) * mebibyte)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (650 * mebibyte, 10**12))
    found = rows_that_fit(lambda batch: taken.append(len(batch)) or batch, torch.rand(1, 3), 4096)
    assert found == power_of_two(350) == 256
    assert rows_that_fit(lambda batch: batch, torch.rand(1, 3), 64) == 64
    assert [power_of_two(size) for size in (0, 1, 2.5, 64, 127)] == [1, 1, 2, 64, 64]


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("others", "expected"), [(0.0, 4), (0.4, 4), (1.0, 3), (2.2, 2), (3.0, 1), (3.9, 1), (9.0, 1)])
def test_a_thread_for_each_free_core(monkeypatch, four_threads, others, expected):
    """Four cores, on which this process uses two and others so many."""
    clock = iter(range(100))

    def usage():
        now = next(clock)
        return time.perf_counter() - 50 + now, (2 + others) * now, 2 * now

    monkeypatch.setattr(machine, "_usage", usage)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    with on_free_cores():
        for _ in range(3):
            lap()
        assert torch.get_num_threads() == expected
        with on_free_cores():
            lap(own=False)
        assert torch.get_num_threads() == expected
    assert torch.get_num_threads() == 4


class Elsewhere(nn.Linear):
    """A layer on the device meta, standing in for another device, whose move gives it values."""

    def __init__(self):
        super().__init__(2, 2, device="meta")

    def to(self, device):
        self.to_empty(device=device)
        nn.init.ones_(self.weight)
        return self


def test_a_device_moves_a_copy_and_leaves_the_model_where_it_is():
    elsewhere, network = Elsewhere(), nn.Linear(2, 2)
    moved = on_device(elsewhere, "cpu")
    assert (elsewhere.weight.device.type, moved.weight.device.type) == ("meta", "cpu")
    assert moved.weight.tolist() == [[1, 1], [1, 1]]
    assert run_device(elsewhere, None).type == "meta"
    assert on_device(network, None) is on_device(network, "cpu") is on_device(network, torch.device("cpu")) is network
    for device in ("meta", "nowhere", "cpu:nine", 3.5):
        with pytest.raises(InvalidArgumentError, match=r"^--device: got .*, expected a device this torch computes on"):
            check_device(device, argument="--device")
