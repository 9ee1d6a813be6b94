import pytest
import torch
from torch import nn

from robust_ext.adapters.wrapped import restore_failed
from robust_ext.attacks import Attack, AttackTraits, CallableAttack
from robust_ext.attacks.running import run_attack
from robust_ext.core.errors import (
    AttackError,
    DisturbedError,
    InvalidArgumentError,
)
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel

LINF = ThreatModel(norm="linf", epsilon=0.1)


class Probe(Attack):
    """Notes what it meets, and returns or raises what it is given."""

    def __init__(self, outcome=None, **traits):
        self.name = "probe"
        self.traits = AttackTraits(**traits)
        self.outcome = outcome

    def search(self, target, inputs, labels, *, threat_model, generator):
        self.classes, self.columns = target.classes, target.module(inputs).shape[1]
        self.required = [p.requires_grad for p in target.module.parameters()]
        nn.functional.cross_entropy(target.module(inputs.clone().requires_grad_()), labels).backward()
        inputs.zero_()
        labels.zero_()
        target.module.train()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return inputs


def target(classes=2):
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, classes)).eval()
    return Target(module=module, bounds=(0.0, 1.0), classes=classes, input_shape=(2, 2), device=torch.device("cpu"))


def run(attack, met, inputs, labels):
    return run_attack(attack, met, inputs, labels, threat_model=LINF, generator=torch.Generator())


def test_targets_with_too_few_classes_are_padded():
    for fewest, classes, seen in ((5, 2, 5), (3, 4, 4)):
        probe = Probe(minimum_classes=fewest)
        run(probe, target(classes), torch.rand(3, 2, 2), torch.zeros(3, dtype=torch.int64))
        assert (probe.classes, probe.columns) == (seen, seen)


def test_nothing_of_the_callers_is_changed():
    met, inputs, labels = target(), torch.rand(3, 2, 2), torch.ones(3, dtype=torch.int64)
    before = inputs.clone()
    probe = Probe()
    run(probe, met, inputs, labels)
    assert torch.equal(inputs, before)
    assert labels.tolist() == [1, 1, 1]
    assert probe.required == [False, False]
    assert all(p.grad is None and p.requires_grad for p in met.module.parameters())
    assert not met.module.training


def test_what_an_attack_raises_and_changed_weights_name_it():
    def careless(model, x, y):
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)
        return x

    for attack, error, message in (
        (Probe(ZeroDivisionError("by nothing")), AttackError, "probe: raised ZeroDivisionError: by nothing"),
        (Probe(InvalidArgumentError("eps", 3, "less")), AttackError, "probe: raised InvalidArgumentError: eps: got 3"),
        (
            CallableAttack(lambda model, x, y: ThreatModel(norm="l7", epsilon=1.0)),
            InvalidArgumentError,
            "norm: got 'l7'",
        ),
        (
            CallableAttack(careless),
            DisturbedError,
            r"careless: changed what it attacks .* \(1\.weight\); what changed of the model was put back",
        ),
    ):
        with pytest.raises(error, match=message):
            run(attack, target(), torch.rand(3, 2, 2), torch.ones(3).long())


def test_failed_rows_become_the_input():
    met = target()
    inputs = torch.rand(50, 2, 2, generator=torch.Generator().manual_seed(0))
    candidates = torch.rand(50, 2, 2, generator=torch.Generator().manual_seed(1))
    labels = met.module(inputs).argmax(1)
    with torch.no_grad():
        met.module[1].bias += met.module(inputs).mean(0).flip(0)
        adversarial = met.module(candidates).argmax(1) != labels
    restored = restore_failed(candidates, inputs, labels, target=met)
    assert 0 < int(adversarial.sum()) < 50
    assert torch.equal(restored[adversarial], candidates[adversarial])
    assert torch.equal(restored[~adversarial], inputs[~adversarial])
