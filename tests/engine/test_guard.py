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
from robust_ext.core.errors import (
    AttackError,
    AttackRefusedError,
    DisturbedError,
    OutOfTimeError,
    RobustExtWarning,
    RunFolderBusyError,
)
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.context import RunContext, run_context

LINF = ThreatModel(norm="linf", epsilon=0.02)
PGD = "robust_ext:APGD(steps=5)"


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4))

        self.strength, self.config = 1.0, {"scale": 1}

    def set_strength(self, value):
        self.strength = value

    def forward(self, x):
        return SIGN["of all"] * self.config["scale"] * self.body(self.strength * x)


SIGN = {"of all": 1}


@pytest.fixture
def given():
    torch.manual_seed(0)
    network, x = Network().eval(), torch.rand(24, 1, 4, 4)
    return network, x, network(x).argmax(1)


def changing(change, *, fails=False):
    """An attack that returns its inputs, or raises, after it changed something of the model."""

    def attack(model, x, y):
        with torch.no_grad():
            change(model)
        if fails:
            raise ValueError("nothing to see here")
        return x

    return attack


def entering(model, x, y):
    torch.no_grad().__enter__()
    return x


def replace(model):
    model.body[4].weight = nn.Parameter(-model.body[4].weight)


def patch(model):
    model.forward = lambda x: -Network.forward(model, x)


def swap_buffers(model):
    model.body[2].running_mean = torch.full((24,), 9.0)
    model.body[2]._buffers["running_var"] = torch.full((24,), 1e-6)


SEEN = {
    "through_data": lambda model: model.body[4].weight.data.neg_(),
    "in_place": lambda model: model.body[4].weight.neg_(),
    "replaced": replace,
    "hook": lambda model: model.register_forward_hook(lambda module, args, out: -out),
    "forward": patch,
    "strength": lambda model: model.set_strength(0),
    "config": lambda model: model.config.update(scale=-1),
}
SILENT = {
    "buffers": (changing(swap_buffers), None),
    "train mode": (changing(lambda model: model.train()(torch.rand(24, 1, 4, 4) * 5)), None),
    "dtype": (changing(lambda model: torch.set_default_dtype(torch.float64)), "the default dtype"),
    "no gradients": (entering, "the gradient mode"),
    "threads": (changing(lambda model: torch.set_num_threads(torch.get_num_threads() + 1)), "the number of threads"),
    "numbers": (changing(lambda model: random.seed(1)), None),
}


@pytest.mark.parametrize("name", [*SEEN, "hidden behind an error"])
def test_a_disturbed_network_ends_the_evaluation_and_is_put_back(given, name):
    network, x, y = given
    before, alone = copy.deepcopy(network.state_dict()), robust_accuracy(network, PGD, x, y, LINF)
    attack = changing(SEEN.get(name, SEEN["in_place"]), fails=name not in SEEN)
    with pytest.raises(DisturbedError if name in SEEN else AttackError, match=r"^one: "):
        robust_accuracy(network, {"one": attack, "pgd": PGD}, x, y, LINF, batch_size=8)
    assert robust_accuracy(network, lambda model, x, y: x, x, y, LINF).robust_accuracy(0.02) == 1
    later = robust_accuracy(network, PGD, x, y, LINF)
    assert 0 < later.robust_accuracy(0.02) == alone.robust_accuracy(0.02) < 1
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("name", SILENT)
def test_what_an_attack_leaves_changed_is_not_met_by_the_next(given, name):
    (network, x, y), (attack, left) = given, SILENT[name]
    before = copy.deepcopy(network.state_dict()), torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    threads = torch.get_num_threads()
    alone = robust_accuracy(network, {"pgd": PGD}, x, y, LINF, batch_size=8)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        both = robust_accuracy(network, {"first": attack, "pgd": PGD}, x, y, LINF, batch_size=8)
    assert both.robust_accuracy(0.02, attack="first") == 1
    assert 0 < both.robust_accuracy(0.02, attack="pgd") == alone.robust_accuracy(0.02) < 1
    expected = [f"first left {left} changed, which was put back"] if left else []
    assert [str(one.message) for one in warned] == expected
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), before[1])
    assert np.array_equal(np.random.get_state()[1], before[2])
    assert random.getstate() == before[3]
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[0][name])


@pytest.mark.parametrize("name", SEEN)
def test_the_users_own_model_is_put_back_too(given, name):
    network, x, y = given
    logits = network(x)
    with pytest.raises(DisturbedError, match=r"^one: "):
        robust_accuracy(network, {"one": changing(lambda model: SEEN[name](network)), "pgd": PGD}, x, y, LINF)
    assert torch.equal(network(x), logits)


def test_a_global_that_the_model_reads_ends_the_evaluation(given):
    network, x, y = given

    def flips(model, x, y):
        SIGN["of all"] = -1
        return x

    try:
        with pytest.raises(DisturbedError, match=r"^flips: .*Network behaves differently on 4 of 4 probe inputs"):
            robust_accuracy(network, [flips, PGD], x, y, LINF)
    finally:
        SIGN["of all"] = 1


def test_the_planted_problem_is_attacked_on_a_copy_of_the_network(given):
    network, x, _ = given
    met = []

    def looks(model, x, y):
        met.extend(part for part in model.modules() if isinstance(part, Network))
        return x

    def weakens(model, x, y):
        next(part for part in model.modules() if isinstance(part, Network)).set_strength(0)
        return x

    with pytest.raises(DisturbedError, match=r"^weakens: .* behaves differently on 4 of 4"):
        binarization_test(network, weakens, x, LINF, inner_points=20)
    assert network.strength == 1
    binarization_test(network, looks, x, LINF, inner_points=20)
    assert met
    assert network not in met


class Unique(Network):
    """Cannot be copied."""

    def __deepcopy__(self, memo):
        raise TypeError("there is one")


@pytest.mark.parametrize("name", SEEN)
def test_a_model_that_cannot_be_copied_is_guarded_itself_and_the_user_is_told(given, name):
    x, network = given[1], Unique().eval()
    y, logits = network(x).argmax(1), network(x)
    with pytest.warns(RobustExtWarning, match=r"Unique cannot be copied .TypeError: there is one.") as warned:
        robust_accuracy(network, [PGD, "robust_ext:Square(queries=3)"], x, y, LINF, batch_size=8)
    assert len(warned) == 1
    with pytest.warns(RobustExtWarning), pytest.raises(DisturbedError, match=r"^one: "):
        robust_accuracy(network, {"one": changing(SEEN[name]), "pgd": PGD}, x, y, LINF)
    assert torch.equal(network(x), logits)


class UnreadableError(Exception):
    def __str__(self):
        raise ValueError


RAISED = {
    "exit": (SystemExit(0), "tried to exit the process with status 0"),
    "generator": (GeneratorExit(), "raised GeneratorExit"),
    "interrupt": (KeyboardInterrupt(), "raised KeyboardInterrupt"),
    "unreadable": (UnreadableError(), "raised UnreadableError: its text cannot be read"),
    "out of time": (OutOfTimeError("the time is over"), "raised OutOfTimeError: the time is over"),
    "busy": (RunFolderBusyError("in use"), "raised RunFolderBusyError: in use"),
    "refused": (AttackRefusedError("not here"), "raised AttackRefusedError: not here"),
}


@pytest.mark.parametrize("kind", RAISED)
def test_whatever_an_attack_raises_is_its_own_error(given, kind):
    network, x, y = given
    error, words = RAISED[kind]

    def raises(model, x, y):
        raise error

    with pytest.raises(AttackError, match=f"^raises: {words}") as caught:
        robust_accuracy(network, {"raises": raises, "pgd": PGD}, x, y, LINF)
    assert type(caught.value) is AttackError


@pytest.mark.parametrize("catches", [False, True])
def test_ctrl_c_of_the_user_ends_the_evaluation_also_where_the_attack_catches_it(given, catches):
    network, x, y = given

    def interrupted(model, x, y):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if not catches:
                raise
        return x

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        robust_accuracy(network, interrupted, x, y, LINF)
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_changed_threat_model_is_the_attack_s_own(given):
    network, x, y = given

    def widens(model, x, y, threat_model):
        object.__setattr__(threat_model, "epsilon", 10.0)
        return torch.rand_like(x)

    assert robust_accuracy(network, widens, x, y, LINF).robust_accuracy(0.02) == 1


def test_an_attack_that_claims_that_the_time_is_over_stops_no_other(given):
    network, x, _ = given

    def claims(model, x, y):
        raise OutOfTimeError("the time that was given is over")

    with pytest.raises(AttackError, match=r"^claims: raised OutOfTimeError"), run_context(RunContext(deadline=1e12)):
        binarization_test(network, [PGD, claims], x, LINF, inner_points=20)
