"""Curriculum adversarial training: train mode loses planted points and is refused; in eval mode attacks pass."""

import pytest
import torch
from torch import nn

from robust_ext import ThreatModel, binarization_test, robust_accuracy
from robust_ext.casestudies.curriculum import Curriculum, planted_in_train_mode
from robust_ext.core.errors import InconsistentModelError
from tests.casestudies.on_digits import measured, on_digits

LINF = ThreatModel(norm="linf", epsilon=0.1)


def test_without_batch_normalisation_nothing_planted_is_lost():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 250), nn.ReLU(), nn.Linear(250, 3)).eval()
    assert planted_in_train_mode(module, torch.rand(4, 1, 4, 4), LINF, seed=0) == (1.0, 1.0)


def test_statistics_of_the_model_are_left_alone():
    torch.manual_seed(0)
    module, inputs = Curriculum().build((1, 8, 8), 10).eval(), torch.rand(4, 1, 8, 8)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    planted_in_train_mode(module, inputs, LINF, seed=0)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not module.training


@pytest.mark.exhaustive
def test_mechanism_and_recipes():
    found = measured("curriculum", 32)
    assert found.present, found.values
    study, case = on_digits("curriculum")
    module, inputs, labels, weak, right = case.module, case.inputs[:32], case.labels[:32], study.weak, study.right
    assert weak.train_mode
    with pytest.raises(InconsistentModelError, match="is in train mode") as refused:
        binarization_test(module.train(), weak.attack, inputs, LINF)
    assert refused.value.kind == "train_mode"
    with pytest.raises(InconsistentModelError, match="is in train mode"):
        robust_accuracy(module, weak.attack, inputs, labels, LINF)
    # In eval mode the steps of the authors find planted points, too.
    for recipe in (weak, right):
        result = binarization_test(module.eval(), recipe.attack, inputs, LINF)
        assert result.verdict == "passed", str(result)
