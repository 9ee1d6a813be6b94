"""The attacks of case studies: where they end, what they leave alone, and as native classes of Foolbox and ART."""

import numpy as np
import pytest
import torch
from torch import nn

from robust_ext import ThreatModel
from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.casestudies import Trained, load_case_study
from robust_ext.casestudies.ecoc import BITS, Decoder, ThroughCorrelations, code_words
from robust_ext.casestudies.mixup_inference import MeanSoftmax, MixedFeatures, WithoutMixing
from robust_ext.casestudies.mmc import CentreDistances, LeaveCentre
from robust_ext.casestudies.recipes import PredictedLabels
from robust_ext.casestudies.thermometer import LogitSpacePGA, ThermometerCode
from robust_ext.core.errors import AttackRefusedError
from robust_ext.core.random import seeded_globals, stream
from robust_ext.core.target import Target


def search(attack, module, x, y, classes, bounds=(0, 1)):
    """What an attack returns in the linf ball of 0.1."""
    target = Target(module=module.eval(), bounds=bounds, classes=classes, input_shape=x.shape[1:], device=x.device)
    model = ThreatModel(norm="linf", epsilon=0.1, bounds=bounds)
    found = attack.search(target, x, y, threat_model=model, generator=stream(0))
    assert bool(model.contains(found, x).all())
    return found


def test_leaving_a_centre_ends_in_the_corner_away_from_it():
    # On the plane itself, with centres (1, 0) and (-1, 0): from (-.4, .3) away from the second centre is up and right.
    module, x = CentreDistances(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])), torch.tensor([[-0.4, 0.3]])
    for predicted, label, corner in ((True, 0, [-0.3, 0.4]), (False, 0, [-0.5, 0.4]), (False, 1, [-0.3, 0.4])):
        found = search(LeaveCentre(steps=5, predicted=predicted), module, x, torch.tensor([label]), 2, (-1, 1))
        torch.testing.assert_close(found, torch.tensor([corner]))


class OneBit(nn.Module):
    """Class 1 by the sum of the bits, so that more levels are better for label 0."""

    def __init__(self):
        super().__init__()
        self.encode = ThermometerCode()

    def forward(self, x):
        bits = self.encode(x).flatten(1).sum(1)
        return torch.stack([-bits, bits], 1) / 100


@pytest.mark.parametrize("signed", [False, True])
def test_the_attack_on_thermometer_codes_goes_to_the_outermost_level(signed):
    x = torch.tensor([[[[0.5, 0.02, 0.9]]]])
    for label, end in ((0, 0.1), (1, -0.1)):
        found = search(LogitSpacePGA(signed=signed), OneBit(), x, torch.tensor([label]), 2)
        assert torch.equal((15.9998 * found).floor(), (15.9998 * (x + end).clamp(0, 1)).floor())


def test_an_attack_through_correlations_leaves_the_decoder_as_it_is():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Unflatten(1, (BITS, 64)), Decoder(3)).eval()
    module[1].words = code_words(3, generator=torch.Generator().manual_seed(1))
    x = torch.rand(4, BITS * 64)
    before = module(x)
    found = search(ThroughCorrelations(attack=APGD(steps=5, loss="margin")), module, x, before.argmax(1), 3)
    assert torch.equal(module(x), before)
    assert not module[1].linear
    # Linear in the bits: the attack reaches the corner that the margin of two words points to.
    assert bool((module(found).argmax(1) != before.argmax(1)).any())


@pytest.fixture
def parts():
    """A network on 4 values whose prediction is the largest of the first three, and a pool whose images are known."""
    last = nn.Linear(4, 3, bias=False)
    last.weight.data = torch.eye(3, 4)
    pool = torch.arange(3 * 5 * 4.0).view(3, 5, 4) / 60
    return MixedFeatures(nn.Identity(), last, pool, mixes=7, weight=0.6).eval(), MeanSoftmax(last).eval()


@pytest.mark.parametrize("fixed", [False, True])
def test_mixes_and_their_mean_as_in_a_loop(parts, fixed):
    """Fixed mixes repeat, a row's whatever the others are; the rest do not."""
    (mixed, mean), x = parts, torch.rand(6, 4, generator=stream(0))
    part = mixed.fixed(3) if fixed else mixed
    with seeded_globals(1):
        features = part(x)
    assert features.shape == (6, 7, 4)
    flat = mixed.pool.flatten(0, 1)
    for row, own in zip((features - 0.6 * x[:, None]) / 0.4, x, strict=True):
        for partner in row:
            # One of the pool, and of another class than the predicted one.
            distance = (flat - partner).abs().amax(1)
            assert distance.min() < 1e-5
            assert int(distance.argmin()) // 5 != int(own[:3].argmax())
    probabilities = sum(features[:, draw, :3].softmax(1) for draw in range(7)) / 7
    torch.testing.assert_close(mean(features).exp(), probabilities)
    assert torch.equal(part(x), features) == fixed
    assert not fixed or torch.equal(part(x[2:3]), features[2:3])


def test_without_mixing_is_the_attack_on_the_network(parts):
    (mixed, mean), x, y = parts, torch.rand(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    attack = ObjectivePGD(steps=5, rel_step_size=0.3, start="input")
    alone = search(attack, nn.Sequential(mixed.bare(), mean), x, y, 3)
    assert torch.equal(search(WithoutMixing(attack=attack), nn.Sequential(mixed, mean), x, y, 3), alone)
    with pytest.raises(AttackRefusedError, match="nothing to exchange"):
        search(WithoutMixing(attack=attack), nn.Linear(4, 3), x, y, 3)


def test_predicted_labels_move_errors_away_from_what_is_predicted():
    """A misclassified input leaves its wrong class, of two classes for that of its label."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 2)).eval()
    x, attack = torch.rand(50, 1, 4, 4), ObjectivePGD(steps=5, rel_step_size=0.5)
    threat_model = ThreatModel(norm="linf", epsilon=0.5)
    case = Trained(module=module, inputs=x, labels=1 - module(x).argmax(1), threat_model=threat_model, seed=0)
    assert len(case.misclassified(attack)) == len(x)
    assert len(case.misclassified(PredictedLabels(attack=attack))) < len(x) / 2


@pytest.mark.parametrize(("name", "attack"), [("thermometer", LogitSpacePGA), ("mmc", LeaveCentre)])
def test_native_classes_stay_in_the_ball_and_move(name, attack):
    foolbox = pytest.importorskip("foolbox")
    pytest.importorskip("art")
    from robust_ext.adapters.art.attacks import art_class
    from robust_ext.adapters.foolbox.attacks import foolbox_classes
    from tests.adapters.common import art_classifier

    torch.manual_seed(0)
    x, y = torch.rand(3, 1, 8, 8), torch.arange(3)
    module = load_case_study(name).build((1, 8, 8), 10).eval()
    linf = foolbox_classes(attack)[f"Linf{attack.__name__}Attack"]()
    _, found, _ = linf(foolbox.PyTorchModel(module, bounds=(0, 1), device="cpu"), x, y, epsilons=0.1)
    same = art_class(attack)(art_classifier(module, (1, 8, 8), 10), eps=0.1, verbose=False)
    for moved in (found.numpy(), same.generate(x.numpy(), y.numpy())):
        assert 0.01 < np.abs(moved - x.numpy()).max() <= 0.1 + 1e-6
