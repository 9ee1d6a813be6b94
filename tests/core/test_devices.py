"""Where evaluations run: a device that computes, and a copy of a model that lies elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from robust_ext import InvalidArgumentError
from robust_ext.core.devices import check_device, on_device, run_device


class Elsewhere(nn.Linear):
    """A layer on the device meta, standing in for another device, whose move gives it values."""

    def __init__(self) -> None:
        super().__init__(2, 2, device="meta")

    def to(self, device: torch.device) -> Elsewhere:  # type: ignore[override]
        """On the device, all ones."""
        self.to_empty(device=device)
        nn.init.ones_(self.weight)
        return self


def test_device_moves_a_copy_and_leaves_the_model_where_it_is():
    given = Elsewhere()
    moved = on_device(given, "cpu")
    assert (given.weight.device.type, moved.weight.device.type) == ("meta", "cpu")
    assert moved.weight.tolist() == [[1, 1], [1, 1]]
    assert run_device(given, None).type == "meta"


def test_without_a_device_or_on_it_the_model_is_itself():
    network = nn.Linear(2, 2)
    assert on_device(network, None) is on_device(network, "cpu") is on_device(network, torch.device("cpu")) is network


@pytest.mark.parametrize("device", ["meta", "nowhere", "cpu:nine", 3.5])
def test_devices_that_compute_nothing_are_refused(device):
    with pytest.raises(InvalidArgumentError, match=r"^--device: got .*, expected a device this torch computes on"):
        check_device(device, argument="--device")
