"""Batches that do not fit into memory: smaller ones where rows are independent, else an error that names what to do."""

import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from robust_ext import binarization_test, plant
from robust_ext.core.errors import AttackError, ModelError, RobustExtWarning
from robust_ext.core.machine import OutOfMemory, RowLimit, power_of_two, rows_that_fit
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.binarization.witnesses import find_witnesses


class Small(nn.Module):
    """A network on a device that holds so many rows, fewer with gradients; ``sizes`` are those of its batches."""

    def __init__(self, network, rows, rows_of_gradients=sys.maxsize):
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
    points, sizes = torch.rand(total, 3), []
    found = RowLimit(most).run(lambda batch: (sizes.append(len(batch)), 2 * batch)[1], points)
    assert torch.equal(found, 2 * points)
    assert sizes == [len(part) for part in points.tensor_split(max(1, -(-total // most)))]


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


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits").take(range(12))[0]


LINF, SETTINGS = ThreatModel(norm="linf", epsilon=0.1), {"inner_points": 60, "forward_batch": 64, "fold": False}


def test_points_and_candidates_are_measured_in_smaller_batches(digits):
    """Nor do all problems at once fit where they are verified."""
    found = []
    for rows in (sys.maxsize, 8):
        module = Small(digits_network(), rows)
        planted = plant(module, digits, LINF, **SETTINGS)
        found.append((planted.planted, planted.verify(planted.planted[:, 0]).outcomes))
        assert max(module.sizes) > 8
    assert len(found[0][1]) > 8
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] == ("found",) * len(found[0][1])


def test_an_attack_that_runs_out_of_memory_names_the_setting(digits):
    def ascend(model, x, y):
        return model(x.requires_grad_(True))

    module = Small(digits_network(), sys.maxsize, rows_of_gradients=4)
    with pytest.raises(AttackError, match=r"ascend: out of memory .*batch_size \(--batch-size\)"):
        binarization_test(module, ascend, digits, LINF, depths=(1,), **SETTINGS)


def test_witnesses_are_looked_for_by_what_fits(digits):
    """Gradients do not fit: Square is left, which needs none."""
    planted = plant(digits_network(), digits, LINF, **SETTINGS)
    features = Small(planted.features, sys.maxsize, rows_of_gradients=4)
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_rows_of_this_gpu():
    network = nn.Conv2d(3, 64, 3, padding=1).cuda()
    assert 64 <= rows_that_fit(network, torch.rand(1, 3, 32, 32, device="cuda"), 4096) <= 4096
