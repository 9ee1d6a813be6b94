"""The attacks of case studies as native classes of Foolbox and ART."""

import numpy as np
import pytest
import torch

pytest.importorskip("foolbox")
pytest.importorskip("art")

from robust_ext.adapters.art.attacks import art_class
from robust_ext.adapters.foolbox.attacks import foolbox_classes
from robust_ext.casestudies import load_case_study
from robust_ext.casestudies.mmc import LeaveCentre
from robust_ext.casestudies.thermometer import LogitSpacePGA
from tests.adapters.common import art_classifier
from tests.adapters.hosts import foolbox


@pytest.mark.parametrize(("name", "attack"), [("thermometer", LogitSpacePGA), ("mmc", LeaveCentre)])
def test_they_stay_in_the_ball_and_move(name, attack):
    torch.manual_seed(0)
    x, y = torch.rand(3, 1, 8, 8), torch.arange(3)
    module = load_case_study(name).build((1, 8, 8), 10).eval()
    linf = foolbox_classes(attack)[f"Linf{attack.__name__}Attack"]()
    _, found, _ = linf(foolbox.PyTorchModel(module, bounds=(0, 1), device="cpu"), x, y, epsilons=0.1)
    classifier = art_classifier(module, (1, 8, 8), 10)
    same = art_class(attack)(classifier, eps=0.1, verbose=False).generate(x.numpy(), y.numpy())
    for moved in (found.numpy(), same):
        assert 0.01 < np.abs(moved - x.numpy()).max() <= 0.1 + 1e-6
