import pytest
import torch
from torch import nn

from robust_ext import DataError, InvalidArgumentError, ThreatModel, as_attack, as_module, robust_accuracy
from robust_ext.registry import AdaptedModel, Adapter, adapters


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


def test_a_library_may_have_models_only():
    assert adapters()["robust_ext"].list_models() == []
    assert Shelf().list_attacks() == []
    assert Shelf().adapt_model(nn.Linear(1, 1)) is None
    with pytest.raises(InvalidArgumentError, match="shelf:net, expected an attack of another library"):
        as_attack("shelf:net")


def test_an_evaluation_takes_the_name():
    inputs, threat_model = torch.rand(2, 1, 4, 4), ThreatModel(norm="linf", epsilon=0.3)
    labels = as_module("shelf:some/net-1.5").module(inputs).argmax(1)
    result = robust_accuracy("shelf:some/net-1.5", "robust_ext:APGD(steps=2)", inputs, labels, threat_model)
    assert result.content["clean_accuracy"] == 1
