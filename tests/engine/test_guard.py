"""Attacks in the judge's process: what they change of network, code or process does not reach the judge."""

import copy
import random
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from robust_ext import binarization_test, robust_accuracy
from robust_ext.core.errors import AttackError, DisturbedError
from robust_ext.core.threat import ThreatModel
from robust_ext.engine import verify

LINF = ThreatModel(norm="linf", epsilon=0.02)
PGD = "robust_ext:APGD(steps=5)"


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4))

    def forward(self, x):
        return self.body(x)


@pytest.fixture
def given():
    torch.manual_seed(0)
    network, x = Network().eval(), torch.rand(24, 1, 4, 4)
    return network, x, network(x).argmax(1)


def through_data(model, x, y):
    model.body[4].weight.data.neg_()
    return x


def in_place(model, x, y):
    with torch.no_grad():
        model.body[4].weight.neg_()
    return x


def replaced(model, x, y):
    model.body[4].weight = nn.Parameter(-model.body[4].weight)
    return x


def hook(model, x, y):
    model.register_forward_hook(lambda module, args, out: -out)
    return x


def forward(model, x, y):
    model.forward = lambda x: -Network.forward(model, x)
    return x


def class_forward(model, x, y):
    kept = Network.forward
    Network.forward = lambda self, x: -kept(self, x)
    return x


def judge(model, x, y):
    verify.verify = None
    return x


def hidden_behind_an_error(model, x, y):
    model.body[4].weight.data.neg_()
    raise ValueError("nothing to see here")


def buffer_swapped(model, x, y):
    model.body[2].running_mean = torch.full((24,), 9.0)
    model.body[2]._buffers["running_var"] = torch.full((24,), 1e-6)
    return x


def train_mode(model, x, y):
    model.train()
    model(x * 5)
    return x


def default_dtype(model, x, y):
    torch.set_default_dtype(torch.float64)
    return x


def no_gradients(model, x, y):
    torch.no_grad().__enter__()
    return x


def no_threads(model, x, y):
    torch.set_num_threads(torch.get_num_threads() + 1)
    return x


def numbers(model, x, y):
    random.seed(1)
    return x


class Deceiving(torch.Tensor):
    """Points that claim to be as the judge wants them."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.sub, torch.Tensor.__sub__, torch.Tensor.__rsub__):
            return torch.zeros(24, 1, 4, 4)
        return super().__torch_function__(function, types, args, kwargs or {})


def subclass(model, x, y):
    return torch.rand_like(x).as_subclass(Deceiving)


SEEN = (through_data, in_place, replaced, hook, forward, class_forward, judge)
SILENT = (buffer_swapped, train_mode, default_dtype, no_gradients, no_threads, numbers)


@pytest.mark.parametrize("attack", [*SEEN, hidden_behind_an_error])
def test_a_disturbed_network_ends_the_evaluation_and_is_put_back(given, attack):
    network, x, y = given
    before, alone = copy.deepcopy(network.state_dict()), robust_accuracy(network, PGD, x, y, LINF)
    with pytest.raises(DisturbedError if attack in SEEN else AttackError, match=f"^{attack.__name__}: "):
        robust_accuracy(network, [attack, PGD], x, y, LINF, batch_size=8)
    assert robust_accuracy(network, lambda model, x, y: x, x, y, LINF).robust_accuracy(0.02) == 1
    later = robust_accuracy(network, PGD, x, y, LINF)
    assert 0 < later.robust_accuracy(0.02) == alone.robust_accuracy(0.02) < 1
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("attack", SILENT)
def test_what_an_attack_leaves_changed_is_not_met_by_the_next(given, attack):
    network, x, y = given
    before = copy.deepcopy(network.state_dict()), torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    threads = torch.get_num_threads()
    alone = robust_accuracy(network, {"pgd": PGD}, x, y, LINF, batch_size=8)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        both = robust_accuracy(network, {"first": attack, "pgd": PGD}, x, y, LINF, batch_size=8)
    assert both.robust_accuracy(0.02, attack="first") == 1
    assert 0 < both.robust_accuracy(0.02, attack="pgd") == alone.robust_accuracy(0.02) < 1
    left = {default_dtype: "the default dtype", no_gradients: "the gradient mode", no_threads: "the number of threads"}
    expected = f"first left {left[attack]} changed, which was put back" if attack in left else None
    assert [str(one.message) for one in warned] == ([expected] if expected else [])
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), before[1])
    assert np.array_equal(np.random.get_state()[1], before[2])
    assert random.getstate() == before[3]
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[0][name])


def test_candidates_are_judged_as_plain_tensors(given):
    network, x, y = given
    result = robust_accuracy(network, subclass, x, y, LINF)
    assert result.robust_accuracy(0.02) == 1


def test_a_leaked_default_dtype_does_not_reach_later_groups(given):
    network, x, _ = given
    ball = ThreatModel(norm="linf", epsilon=0.05)
    scores = []
    for leaks in (False, True):

        def search(model, x, y, leaks=leaks):
            if leaks:
                torch.set_default_dtype(torch.float64)
            return x

        result = binarization_test(network, search, x, ball, inner_points=50, batch_size=8)
        scores.append([record["random_reach"] for record in result.records])
    assert scores[0] == scores[1]


def test_an_exit_of_the_process_is_an_error_of_the_attack(given):
    network, x, y = given

    def leaves(model, x, y):
        sys.exit(0)

    with pytest.raises(AttackError, match="leaves: tried to exit the process with status 0"):
        robust_accuracy(network, leaves, x, y, LINF)

    def interrupted(model, x, y):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        robust_accuracy(network, interrupted, x, y, LINF)


def test_a_changed_threat_model_is_the_attack_s_own(given):
    network, x, y = given

    def widens(model, x, y, threat_model):
        object.__setattr__(threat_model, "epsilon", 10.0)
        return torch.rand_like(x)

    assert robust_accuracy(network, widens, x, y, LINF).robust_accuracy(0.02) == 1
