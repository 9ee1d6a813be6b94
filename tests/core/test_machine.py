"""What evaluations make of a machine: its memory, its cores and its devices."""

import os
import sys
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from robust_ext import InvalidArgumentError, binarization_test, plant
from robust_ext.core import machine
from robust_ext.core.devices import check_device, on_device, run_device
from robust_ext.core.errors import AttackError, ModelError, RobustExtWarning
from robust_ext.core.machine import OutOfMemory, RowLimit, lap, on_free_cores, power_of_two, rows_that_fit
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.binarization.witnesses import find_witnesses

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
