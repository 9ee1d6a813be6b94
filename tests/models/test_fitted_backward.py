"""Backward passes that are fitted to a layer: against exact gradients, and where no other backward pass leads on."""

import pytest
import torch
from torch import nn

from robust_ext import RobustExtError, ThreatModel, binarization_test, robust_accuracy
from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.apgd import APGD
from robust_ext.datasets.load import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.models.fitted_backward import fit_backward

LINF = ThreatModel(norm="linf", epsilon=0.3)
INPUTS, LABELS = load_dataset("digits").take(range(20))


class Codes(nn.Module):
    """A bit for each of 16 thresholds: no gradient passes comparisons, and the shape is another."""

    def forward(self, x):
        return (x > torch.linspace(0.03, 0.97, 16).view(1, 16, 1, 1)).float()


class Coded(nn.Module):
    """The digits' network behind codes."""

    def __init__(self):
        super().__init__()
        self.codes, self.net = Codes(), digits_network()

    def forward(self, x):
        return self.net(self.codes(x).mean(1, keepdim=True))


@pytest.mark.parametrize(
    "layer", [nn.Sequential(nn.Flatten(), nn.Linear(64, 20)), nn.Conv2d(1, 1, 3, padding=1)], ids=["dense", "images"]
)
def test_of_a_linear_layer_it_is_the_layers_own(layer):
    before = torch.random.get_rng_state()
    fitted = fit_backward(layer, layer, INPUTS, threat_model=LINF, seed=0)
    again = fit_backward(layer, layer, INPUTS, threat_model=LINF, seed=0)
    assert torch.equal(before, torch.random.get_rng_state())
    x = INPUTS.clone().requires_grad_(True)
    cotangent = torch.randn(layer(x).shape, generator=torch.Generator().manual_seed(0))
    exact, found, same = (
        torch.autograd.grad((part(x) * cotangent).sum(), x)[0].flatten(1) for part in (layer, fitted, again)
    )
    assert torch.equal(found, same)
    assert torch.nn.functional.cosine_similarity(exact, found).mean() > 0.8


@pytest.mark.parametrize("settings", [{"bpda": "codes", "gradient_mode": "fitted"}, {"gradient_mode": "fitted"}])
def test_it_leads_through_comparisons(settings):
    plain = APGD(steps=20, loss="margin")
    attack = AdaptedAttack(attack=plain, **settings).named("fitted")
    model = Coded().eval()
    for other in ({"bpda": "codes"}, {"gradient_mode": "straight_through"}):
        with pytest.raises(RobustExtError):
            robust_accuracy(model, [AdaptedAttack(attack=plain, **other)], INPUTS[:2], LABELS[:2], LINF)
    result = robust_accuracy(model, [attack], INPUTS, LABELS, LINF)
    twin = robust_accuracy(digits_network(), [plain], INPUTS, LABELS, LINF)
    assert result.robust_accuracy(0.3, attack="fitted") <= twin.robust_accuracy(0.3, attack=plain.name) + 0.1
    if "bpda" not in settings:
        return
    tested = binarization_test(
        model, attack, INPUTS[:8], ThreatModel(norm="linf", epsilon=0.1), depths=(1,), canaries=0
    )
    assert tested.score >= 0.95
