import pytest
import torch
from torch import nn

from robust_ext import DataError, InvalidArgumentError, ThreatModel, as_attack, as_module, robust_accuracy
from robust_ext.attacks import CallableAttack
from robust_ext.attacks.apgd import APGD
from robust_ext.registry import AdaptedModel, Adapter, adapters

THREAT_MODEL = ThreatModel(norm="linf", epsilon=0.25)


def shifted(model, x, y):
    return x + 0.25


def test_an_attack_is_returned_or_renamed_as_a_copy():
    attack = CallableAttack(shifted)
    assert as_attack(attack) is attack
    renamed = as_attack(attack, name="other")
    assert (renamed.name, attack.name) == ("other", "shifted")


def test_strings_name_attacks_in_files(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def add(model, x, y):\n    return x + 1\n\ndef make(by):\n    return lambda model, x, y: x + by\n")
    assert as_attack(f"{file}:add").name == f"{file}:add"
    assert as_attack(f"{file}:add", name="mine").name == "mine"
    assert as_attack(f"{file}:make(by=3)").function(None, torch.zeros(2), None).tolist() == [3, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("foolbxo:LinfPGD", r"did you mean foolbox\?"),
        ("os:sep", "it names a string"),
        ("robust_ext:APGD(step=3)", r"did you mean steps\?"),
        ("robust_ext:APGD(loss='hinge')", "loss: got 'hinge'"),
        ("shelf:net", "expected an attack of another library"),
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
    for form in ("robust_ext:APGD", APGD, (APGD, {"steps": 7})):
        assert (type(as_attack(form, name="mine")), as_attack(form, name="mine").name) == (APGD, "mine")
    own = adapters()["robust_ext"]
    for listing in own.list_attacks():
        assert own.build_attack(listing.name, listing.trial, name="x").traits == listing.traits


class Shelf(Adapter):
    """Models only."""

    name = "shelf"

    def list_models(self):
        return ["some/net-1.5"]

    def build_model(self, model, settings):
        if model not in self.list_models():
            raise DataError(f"no {model}")
        network = nn.Sequential(nn.Flatten(), nn.Linear(16, settings.get("classes", 10))).eval()
        return AdaptedModel(module=network, bounds=(0.0, 1.0), input_shape=(1, 4, 4))


@pytest.fixture(autouse=True)
def shelf(monkeypatch):
    found = {**adapters(), "shelf": Shelf()}
    monkeypatch.setattr("robust_ext.registry.base.adapters", lambda: found)
    monkeypatch.setattr("robust_ext.registry.model.adapters", lambda: found)


def test_a_module_is_its_own_module_and_models_of_no_library_are_refused():
    module = nn.Linear(3, 2)
    adapted = as_module(module)
    assert (adapted.module, adapted.bounds, adapted.input_shape) == (module, None, None)
    with pytest.raises(InvalidArgumentError, match=r"--model: got int, expected a torch\.nn\.Module"):
        as_module(3, argument="--model")


def test_a_name_has_the_same_weights_each_time_and_draws_nothing_of_others():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second = as_module("shelf:some/net-1.5"), as_module(" shelf : some/net-1.5 ( classes=10 ) ")
    assert torch.equal(first.module[1].weight, second.module[1].weight)
    assert first.input_shape == (1, 4, 4)
    assert torch.equal(torch.get_rng_state(), state)
    inputs = torch.rand(2, 1, 4, 4)
    attack, labels = "robust_ext:APGD(steps=2)", first.module(inputs).argmax(1)
    result = robust_accuracy("shelf:some/net-1.5", attack, inputs, labels, THREAT_MODEL)
    assert result.content["clean_accuracy"] == 1
