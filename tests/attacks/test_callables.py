"""Plain callables as attacks: what they may be, what they are given, and that they leave no trace."""

import pickle
import random
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from robust_ext.attacks.running import run_attack
from robust_ext.core.errors import AttackError
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.verify import verify
from robust_ext.registry import as_attack

THREAT_MODEL = ThreatModel(norm="l2", epsilon=0.5)
INPUTS, LABELS = torch.full((2, 3), 0.25), torch.tensor([0, 1])
# Made once: making a layer draws from the global generator, whose state some tests compare.
MODULE = nn.Linear(3, 2)
TARGET = Target(module=MODULE, bounds=(0.0, 1.0), classes=2, input_shape=(3,), device=torch.device("cpu"))


def run(attack, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return run_attack(attack, TARGET, INPUTS, LABELS, threat_model=THREAT_MODEL, generator=generator)


def moved(model, x, y, by=0.125):
    return x + by


def shifted(model, x, y, epsilon):
    return x + epsilon


class Mover:
    """A callable that holds its settings."""

    def __init__(self, by):
        self.by = by

    def __call__(self, model, x, y, *, epsilon):
        return x + self.by * epsilon

    def attack(self, model, x, y):
        return x + self.by

    @classmethod
    def half(cls, model, x, y):
        return x + 0.5

    @staticmethod
    def quarter(model, x, y):
        return x + 0.25


class Module(nn.Module):
    """An attack written as a module."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.tensor(0.5))

    def forward(self, model, x, y, epsilon):
        return x + self.by * epsilon


@pytest.mark.parametrize(
    ("attack", "by", "name"),
    [
        (partial(moved, by=0.5), 0.5, "mine"),
        (partial(partial(moved, by=0.5), by=0.25), 0.25, "mine"),
        (shifted, 0.5, "shifted"),
        (partial(shifted, epsilon=2.0), 2.0, "mine"),
        (Mover(0.5), 0.25, "Mover"),
        (Mover(0.5).attack, 0.5, "attack"),
        (Mover.half, 0.5, "half"),
        (Mover.quarter, 0.25, "quarter"),
        (Module(), 0.25, "Module"),
    ],
)
def test_callables_of_every_kind_are_attacks(attack, by, name):
    adapted = as_attack(attack, name="mine" if name == "mine" else None)
    assert adapted.name == name
    assert torch.equal(run(adapted), INPUTS + by)
    assert adapted.description
    assert " at 0x" not in adapted.description


def test_what_a_callable_names_as_parameter_is_what_the_run_has():
    met = []

    def attack(model, x, y, epsilon, *, threat_model, generator, **others):
        met.extend((model, generator, threat_model, epsilon, others, y.tolist()))
        return x

    generator = torch.Generator().manual_seed(3)
    run_attack(as_attack(attack), TARGET, INPUTS, LABELS, threat_model=THREAT_MODEL, generator=generator)
    assert all(one is other for one, other in zip(met[:3], (MODULE, generator, THREAT_MODEL), strict=True))
    assert met[3:] == [0.5, {}, [0, 1]]


def seed_all(seed):
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(seed)


def reseeding(model, x, y, generator):
    start = torch.rand(x.shape, generator=generator)
    seed_all(0)
    return start


DRAWS = {
    "torch": lambda model, x, y: torch.rand_like(x),
    "numpy": lambda model, x, y: torch.from_numpy(np.random.rand(*x.shape)).float(),
    "python": lambda model, x, y: torch.tensor([[random.random() for _ in row] for row in x]),
    "generator": lambda model, x, y, generator: torch.rand(x.shape, generator=generator),
    "reseeding": reseeding,
}


def state():
    kind, keys, *rest = np.random.get_state()
    numpy_state = kind, np.asarray(keys).tobytes(), rest
    return pickle.dumps((random.getstate(), numpy_state, torch.random.get_rng_state().numpy().tobytes()))


@pytest.mark.parametrize("function", DRAWS.values(), ids=DRAWS)
@given(seed=st.integers(0, 2**31), before=st.integers(0, 2**31))
@settings(max_examples=20)
def test_randomness_of_every_kind_follows_the_generator(function, seed, before):
    attack = as_attack(function)
    first = run(attack, seed)
    seed_all(before)
    expected = state()
    assert torch.equal(run(attack, seed), first)
    unchanged = state() == expected
    assert unchanged
    assert not torch.equal(run(attack, seed + 1), first)


def test_random_states_are_restored_when_a_callable_raises():
    def failing(model, x, y):
        torch.rand(3)
        np.random.rand(3)
        random.random()
        raise KeyError("step")

    expected = state()
    with pytest.raises(AttackError, match="failing: raised KeyError: 'step'"):
        run(as_attack(failing))
    unchanged = state() == expected
    assert unchanged


@pytest.mark.parametrize("returned", [lambda x: x.numpy(), lambda x: x.T, lambda x: (x * 255).to(torch.uint8)])
def test_what_is_no_batch_of_candidates_is_refused_by_name(returned):
    attack = as_attack(lambda model, x, y: returned(x), name="mine")
    with pytest.raises(AttackError, match="mine: returned "):
        verify(run(attack), INPUTS, LABELS, module=MODULE, threat_model=THREAT_MODEL, attack=attack.name)
