"""Planting on a GPU does not wait for it within a group: shown without one, by tensors that have no values."""

import copy

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from robust_ext.core.target import Counted, PassCounter
from robust_ext.core.threat import ThreatModel
from robust_ext.evaluations.binarization.forward import Forward
from robust_ext.evaluations.binarization.posing import random_reach
from robust_ext.evaluations.binarization.problems import fit, measure
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.models.features import split

LINF = ThreatModel(norm="linf", epsilon=0.1)


class Operations(TorchDispatchMode):
    """Those inside that wait for a device: copies from the host that it has to be done with, and checks of values."""

    def __init__(self):
        super().__init__()
        self.waiting = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        if name in ("_linalg_check_errors", "_local_scalar_dense", "nonzero", "equal"):
            self.waiting.append(name)
        if name in ("_to_copy", "copy_"):
            from_host = any(isinstance(one, torch.Tensor) and one.device.type == "cpu" for one in args)
            there = torch.device(kwargs.get("device") or args[0].device).type != "cpu"
            if from_host and there and not (kwargs.get("non_blocking") or args[2:3] == (True,)):
                self.waiting.append(name)
        return func(*args, **kwargs)


class Reads(TorchFunctionMode):
    """How often a value is read inside: on a GPU, each waits for it."""

    NAMES = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        masked = name in ("__getitem__", "__setitem__") and any(
            isinstance(one, torch.Tensor) and one.dtype == torch.bool
            for one in (args[1] if isinstance(args[1], tuple) else args[1:2])
        )
        self.count += name in self.NAMES or masked
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("norm", "epsilon", "inner_points"), [("linf", 0.1, 40), ("linf", 0.1, 300), ("l2", 0.8, 40), ("l1", 4.0, 40)]
)
def test_points_are_drawn_measured_and_chosen_without_waiting(network, norm, epsilon, inner_points):
    """On the meta device nothing can be read. Features are more than inner points, and fewer."""
    threat_model = ThreatModel(norm=norm, epsilon=epsilon)
    settings = BinarizationSettings(threat_model=threat_model, inner_points=inner_points, boundary_points=2)
    features = Counted(copy.deepcopy(network[:-1]), PassCounter()).to("meta")
    inputs = torch.zeros(5, 1, 8, 8, device="meta")
    # Tables are copied to a device once.
    measure(Forward(features, 256), inputs[:1], [0], settings)
    with Operations() as seen:
        measured = measure(Forward(features, 256), inputs, range(5), settings)
    assert seen.waiting == []
    assert measured.features.shape == (5, inner_points + 3, 128)


def test_the_checks_of_this_file_see_what_waits():
    values, matrix = torch.rand(3, device="meta"), torch.eye(3, device="meta")
    for wait in (values.tolist, values.cpu, lambda: values[values > 0], lambda: bool(values[0] > 0)):
        with pytest.raises((NotImplementedError, RuntimeError)):
            wait()
    with Operations() as seen:
        torch.linalg.solve(matrix, matrix)
        torch.tensor([1, 2], device="cpu").to("meta")
        torch.tensor([1, 2], device="cpu").to("meta", non_blocking=True)
    assert seen.waiting == ["_linalg_check_errors", "_to_copy"]
    known = torch.rand(3)
    with Reads() as reads:
        known.tolist(), float(known[0]), bool(known[1] > 0), known[known > 0], known[1:], known.sum()
    assert reads.count == 4


def test_random_search_waits_once_a_round_whatever_the_number_of_samples(network, digits):
    settings = BinarizationSettings(threat_model=LINF, inner_points=40, random_inner=60, random_corners=60)
    parts = split(network, digits[:2])
    for samples in (4, 16):
        inputs = digits[:samples]
        problems = fit(measure(Forward(parts.features, 256), inputs, range(samples), settings), parts.readout, settings)
        with Reads() as reads:
            # No position can be reached, so every point is drawn, in three rounds.
            random_reach(Forward(parts.features, 256), [problems], [float("inf")], settings)
        assert reads.count == 4


def test_fitting_waits_for_steps_of_all_problems_at_once(network, digits):
    settings = BinarizationSettings(threat_model=LINF, inner_points=40)
    parts, counts = split(network, digits[:2]), []
    for samples in (4, 16):
        measured = measure(Forward(parts.features, 256), digits[:samples], range(samples), settings)
        with Reads() as reads:
            fit(measured, parts.readout, settings)
        counts.append(reads.count)
    assert counts[1] < 1.5 * counts[0]
