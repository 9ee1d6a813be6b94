"""Attacks in the judge's process: what they change of network, code or process does not reach the judge."""

import copy
import random
import signal
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from robust_ext import binarization_test, robust_accuracy
from robust_ext.core.errors import AttackError, AttackRefusedError, DisturbedError, OutOfTimeError, RunFolderBusyError
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.context import RunContext, run_context

LINF = ThreatModel(norm="linf", epsilon=0.02)
PGD = "robust_ext:APGD(steps=5)"
X = torch.rand(24, 1, 4, 4, generator=torch.Generator().manual_seed(0))
SIGN = {"of all": 1}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4))
        self.strength, self.config = 1.0, {"scale": 1}
        self.eval()

    def forward(self, x):
        return SIGN["of all"] * self.config["scale"] * self.body(self.strength * x)


class Unique(Network):
    """Cannot be copied."""

    def __deepcopy__(self, memo):
        raise TypeError("there is one")


Y = Network()(X).argmax(1)


def accuracy(network, attacks, batch_size=8):
    return robust_accuracy(network, attacks, X, Y, LINF, batch_size=batch_size)


def changing(change, *, fails=False):
    """An attack that returns its inputs, or raises, after it changed something of the model."""

    def attack(model, x, y):
        with torch.no_grad():
            change(model)
        if fails:
            raise ValueError("nothing to see here")
        return x

    return attack


def swap_buffers(model):
    model.body[2].running_mean = torch.full((24,), 9.0)
    model.body[2]._buffers["running_var"] = torch.full((24,), 1e-6)


SEEN = {
    "through_data": lambda model: model.body[4].weight.data.neg_(),
    "in_place": lambda model: model.body[4].weight.neg_(),
    "replaced": lambda model: setattr(model.body[4], "weight", nn.Parameter(-model.body[4].weight)),
    "hook": lambda model: model.register_forward_hook(lambda module, args, out: -out),
    "forward": lambda model: setattr(model, "forward", lambda x: -Network.forward(model, x)),
    "strength": lambda model: setattr(model, "strength", 0),
    "config": lambda model: model.config.update(scale=-1),
}
ENDS = [*((name, kind) for name in SEEN for kind in ("copy", "user's own", "without a copy")), ("in_place", "an error")]


@pytest.mark.parametrize(("name", "kind"), ENDS)
@pytest.mark.filterwarnings("ignore:.*Unique cannot be copied")
def test_a_disturbed_network_ends_the_evaluation_and_is_put_back(name, kind):
    network = Unique() if kind == "without a copy" else Network()
    before, alone = copy.deepcopy(network.state_dict()), accuracy(network, PGD).robust_accuracy(0.02)
    attack = changing(SEEN[name], fails=kind == "an error")
    if kind == "user's own":
        attack = changing(lambda model: SEEN[name](network))
    with pytest.raises(AttackError if kind == "an error" else DisturbedError, match=r"^one: "):
        accuracy(network, {"one": attack, "pgd": PGD})
    assert accuracy(network, lambda model, x, y: x).robust_accuracy(0.02) == 1
    assert 0 < accuracy(network, PGD).robust_accuracy(0.02) == alone < 1
    for key, value in network.state_dict().items():
        assert torch.equal(value, before[key])


SILENT = {
    "buffers": (swap_buffers, None),
    "train mode": (lambda model: model.train()(torch.rand(24, 1, 4, 4) * 5), None),
    "numbers": (lambda model: random.seed(1), None),
    "dtype": (lambda model: torch.set_default_dtype(torch.float64), "the default dtype"),
    "threads": (lambda model: torch.set_num_threads(torch.get_num_threads() + 1), "the number of threads"),
}


@pytest.mark.parametrize("name", SILENT)
def test_what_an_attack_leaves_changed_is_not_met_by_the_next(name):
    network, (change, left) = Network(), SILENT[name]
    before = copy.deepcopy(network.state_dict()), torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    alone, threads = accuracy(network, {"pgd": PGD}), torch.get_num_threads()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        both = accuracy(network, {"first": changing(change), "pgd": PGD})
    assert both.robust_accuracy(0.02, attack="first") == 1
    assert 0 < both.robust_accuracy(0.02, attack="pgd") == alone.robust_accuracy(0.02) < 1
    expected = [f"first left {left} changed, which was put back"] if left else []
    assert [str(one.message) for one in warned] == expected
    assert (torch.get_default_dtype(), torch.get_num_threads()) == (torch.float32, threads)
    assert torch.equal(torch.get_rng_state(), before[1])
    assert np.array_equal(np.random.get_state()[1], before[2])
    assert random.getstate() == before[3]
    for key, value in network.state_dict().items():
        assert torch.equal(value, before[0][key])


def test_a_global_that_the_model_reads_ends_the_evaluation():
    def flips(model, x, y):
        SIGN["of all"] = -1
        return x

    try:
        with pytest.raises(DisturbedError, match=r"^flips: .*Network behaves differently on 4 of 4 probe inputs"):
            accuracy(Network(), [flips, PGD])
    finally:
        SIGN["of all"] = 1


def test_the_planted_problem_is_attacked_on_a_copy_and_the_user_is_told_where_there_is_none():
    network, met = Network(), []

    def looks(model, x, y):
        met.extend(part for part in model.modules() if isinstance(part, Network))
        return x

    def weakens(model, x, y):
        next(part for part in model.modules() if isinstance(part, Network)).strength = 0
        return x

    with pytest.raises(DisturbedError, match=r"^weakens: .* behaves differently on 4 of 4"):
        binarization_test(network, weakens, X, LINF, inner_points=20)
    assert network.strength == 1
    binarization_test(network, looks, X, LINF, inner_points=20)
    assert met
    assert network not in met
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        accuracy(Unique(), [PGD, "robust_ext:Square(queries=3)"])
    assert len(warned) == 1
    assert "Unique cannot be copied (TypeError: there is one)" in str(warned[0].message)


class UnreadableError(Exception):
    def __str__(self):
        raise ValueError


RAISED = {
    "tried to exit the process with status 0": SystemExit(0),
    "raised GeneratorExit": GeneratorExit(),
    "raised KeyboardInterrupt": KeyboardInterrupt(),
    "raised UnreadableError: its text cannot be read": UnreadableError(),
    # That the time is over is no attack's to say, nor that a folder is in use or that it is refused.
    "raised OutOfTimeError: the time is over": OutOfTimeError("the time is over"),
    "raised RunFolderBusyError: in use": RunFolderBusyError("in use"),
    "raised AttackRefusedError: not here": AttackRefusedError("not here"),
}


@pytest.mark.parametrize("words", RAISED)
def test_whatever_an_attack_raises_is_its_own_error(words):
    def raises(model, x, y):
        raise RAISED[words]

    for given in ({"raises": raises, "pgd": PGD}, [PGD, raises]):
        with pytest.raises(AttackError, match=f"^raises: {words}") as caught, run_context(RunContext(deadline=1e12)):
            accuracy(Network(), given)
        assert type(caught.value) is AttackError


@pytest.mark.parametrize("catches", [False, True])
def test_ctrl_c_of_the_user_ends_the_evaluation_also_where_the_attack_catches_it(catches):
    def interrupted(model, x, y):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if not catches:
                raise
        return x

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        accuracy(Network(), interrupted)
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_changed_threat_model_is_the_attack_s_own():
    def widens(model, x, y, threat_model):
        object.__setattr__(threat_model, "epsilon", 10.0)
        return torch.rand_like(x)

    assert accuracy(Network(), widens).robust_accuracy(0.02) == 1
