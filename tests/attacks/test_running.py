"""What attacks are given and leave untouched; plain callables as attacks."""

import pickle
import random
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from robust_ext.adapters.wrapped import restore_failed
from robust_ext.attacks import Attack, AttackTraits
from robust_ext.attacks.running import run_attack
from robust_ext.core.errors import AttackError, DisturbedError, InvalidArgumentError
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.verify import verify
from robust_ext.registry import as_attack
from tests.attacks.problems import target_of

THREAT_MODEL = ThreatModel(norm="l2", epsilon=0.5)
INPUTS, LABELS = torch.full((2, 3), 0.25), torch.tensor([0, 1])
# Made once: making a layer draws from the global generator, whose state some tests compare.
MODULE = nn.Linear(3, 2).eval()


def run(attack, seed=0, classes=2):
    module = MODULE if classes == 2 else nn.Linear(3, classes)
    generator = torch.Generator().manual_seed(seed)
    return run_attack(
        attack, target_of(module, (3,), classes), INPUTS, LABELS, threat_model=THREAT_MODEL, generator=generator
    )


class Probe(Attack):
    """Notes what it meets, and changes what it is given."""

    def __init__(self, **traits):
        self.name, self.traits = "probe", AttackTraits(**traits)

    def search(self, target, inputs, labels, *, threat_model, generator):
        self.classes, self.columns = target.classes, target.module(inputs).shape[1]
        self.required = [p.requires_grad for p in target.module.parameters()]
        nn.functional.cross_entropy(target.module(inputs.clone().requires_grad_()), labels).backward()
        inputs.zero_()
        labels.zero_()
        target.module.train()
        return inputs


def test_targets_with_too_few_classes_are_padded_and_nothing_of_the_callers_is_changed():
    for fewest, classes, seen in ((5, 2, 5), (3, 4, 4)):
        probe = Probe(minimum_classes=fewest)
        run(probe, classes=classes)
        assert (probe.classes, probe.columns) == (seen, seen)
    probe = Probe()
    run(probe)
    assert INPUTS.unique().tolist() == [0.25]
    assert LABELS.tolist() == [0, 1]
    assert probe.required == [False, False]
    assert all(p.grad is None and p.requires_grad for p in MODULE.parameters())
    assert not MODULE.training


def careless(model, x, y):
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)
    return x


def failing(model, x, y):
    torch.rand(3)
    np.random.rand(3)
    random.random()
    raise KeyError("step")


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (failing, AttackError, "failing: raised KeyError: 'step'"),
        (lambda model, x, y: ThreatModel(norm="l7", epsilon=1.0), InvalidArgumentError, "norm: got 'l7'"),
        (careless, DisturbedError, r"careless: changed what it attacks .*; what changed of the model was put back"),
        *(
            (lambda model, x, y, returned=returned: returned(x), AttackError, "mine: returned ")
            for returned in (lambda x: x.numpy(), lambda x: x.T, lambda x: (x * 255).to(torch.uint8))
        ),
    ],
)
def test_what_an_attack_raises_returns_and_disturbs_is_put_right_and_names_it(function, error, message):
    attack = as_attack(function, name="mine" if function.__name__ == "<lambda>" else None)
    weight, expected = MODULE.weight.clone(), state()
    with pytest.raises(error, match=message):
        verify(run(attack), INPUTS, LABELS, module=MODULE, threat_model=THREAT_MODEL, attack=attack.name)
    assert torch.equal(MODULE.weight, weight)
    unchanged = state() == expected
    assert unchanged


def test_failed_rows_become_the_input():
    target, generator = target_of(nn.Linear(3, 2), (3,), 2), torch.Generator().manual_seed(0)
    inputs, candidates = torch.rand(2, 50, 3, generator=generator)
    labels = target.module(inputs).argmax(1)
    with torch.no_grad():
        target.module.module.bias += target.module(inputs).mean(0).flip(0)
        adversarial = target.module(candidates).argmax(1) != labels
    restored = restore_failed(candidates, inputs, labels, target=target)
    assert 0 < int(adversarial.sum()) < 50
    assert torch.equal(restored, torch.where(adversarial[:, None], candidates, inputs))


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


@pytest.mark.parametrize(
    ("attack", "by", "name"),
    [
        (shifted, 0.5, "shifted"),
        (partial(shifted, epsilon=2.0), 2.0, "mine"),
        (Mover(0.5), 0.25, "Mover"),
        (Mover(0.5).attack, 0.5, "attack"),
        (Mover.half, 0.5, "half"),
    ],
)
def test_callables_of_every_kind_are_attacks(attack, by, name):
    adapted = as_attack(attack, name="mine" if name == "mine" else None)
    assert adapted.name == name
    assert torch.equal(run(adapted), INPUTS + by)
    assert adapted.description
    assert " at 0x" not in adapted.description


def test_what_a_callable_names_as_parameter_is_what_the_run_has():
    met = {}

    def attack(model, x, y, epsilon, *, threat_model, generator, **others):
        met.update(locals())
        return x

    run(as_attack(attack), seed=3)
    assert met["generator"].initial_seed() == 3
    assert (met["threat_model"], met["epsilon"], met["others"]) == (THREAT_MODEL, 0.5, {})
    assert met["y"].tolist() == [0, 1]


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
