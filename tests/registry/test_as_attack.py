import pytest
import torch
from torch import nn

from robust_ext.attacks import CallableAttack
from robust_ext.attacks.apgd import APGD
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.registry import adapters, as_attack

THREAT_MODEL = ThreatModel(norm="linf", epsilon=0.25)


def shifted(model, x, y):
    return x + 0.25


def run(attack):
    target = Target(module=nn.Linear(3, 2), bounds=(0.0, 1.0), classes=2, input_shape=(3,), device=torch.device("cpu"))
    labels = torch.zeros(2, dtype=torch.int64)
    return attack.search(
        target, torch.zeros(2, 3), labels, threat_model=THREAT_MODEL, generator=torch.Generator().manual_seed(0)
    )


def test_an_attack_is_returned_or_renamed_as_a_copy():
    attack = CallableAttack(shifted)
    assert as_attack(attack) is attack
    renamed = as_attack(attack, name="other")
    assert (renamed.name, attack.name) == ("other", "shifted")
    assert torch.equal(run(renamed), torch.full((2, 3), 0.25))


def test_strings_name_attacks_in_files(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def add(model, x, y):\n    return x + 1\n\ndef make(by):\n    return lambda model, x, y: x + by\n")
    assert as_attack(f"{file}:add").name == f"{file}:add"
    assert as_attack(f"{file}:add", name="mine").name == "mine"
    assert torch.equal(run(as_attack(f"{file}:make(by=3)")), torch.full((2, 3), 3.0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("foolbxo:LinfPGD", r"did you mean foolbox\?"),
        ("os:sep", "it names a string"),
        ("robust_ext:APGD(step=3)", r"did you mean steps\?"),
        ("robust_ext:APGD(loss='hinge')", "loss: got 'hinge'"),
        ((APGD, 3), "dict of keyword arguments"),
    ],
)
def test_what_names_no_attack_is_refused(text, message):
    with pytest.raises(InvalidArgumentError, match=message):
        as_attack(text)


def test_own_attacks_are_built_by_name_class_and_settings():
    attack = as_attack("robust_ext:APGD(steps=7, loss='margin')")
    assert (type(attack), attack.steps, attack.loss) == (APGD, 7, "margin")
    assert attack.name == "robust_ext:APGD(steps=7, loss='margin')"
    for form in (APGD, (APGD, {"steps": 7})):
        assert (type(as_attack(form, name="mine")), as_attack(form, name="mine").name) == (APGD, "mine")
    own = adapters()["robust_ext"]
    for listing in own.list_attacks():
        assert own.build_attack(listing.name, listing.trial, name="x").traits == listing.traits
