"""Heads that mask gradients behind the features, where the test puts a readout in their place."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import robust_ext
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.binarization.head import OF_HEAD, probe_head
from robust_ext.models.features import split
from tests.evaluations.diagnosis.models import Opposite
from tests.evaluations.subjects import Pattern

LINF = robust_ext.ThreatModel(norm="linf", epsilon=0.1)


class Headed(nn.Module):
    """The digits network with something behind its logits."""

    def __init__(self, head):
        super().__init__()
        self.network, self.head = digits_network(), head
        self.eval()

    def forward(self, x):
        return self.head(self.network(x))


def seeded(*layers):
    generator = torch.Generator().manual_seed(0)
    for layer in layers:
        for part in layer.parameters():
            part.data = torch.randn(part.shape, generator=generator) / part.shape[-1] ** 0.5
    return nn.Sequential(*layers).eval()


CENTRES = torch.eye(10).mul(4)

MASKING = {
    "opposite sign": (lambda z: -z + 2 * z.detach(), "wrong_gradient"),
    "rounded": (lambda z: (z * 100).round() / 100, "zero_gradient"),
    "steep tanh": (lambda z: torch.tanh(1000 * z), "zero_gradient"),
    "function of the other sign": (Opposite.apply, "wrong_gradient"),
    "mostly without a graph": (lambda z: 1.5 * z.detach() - 0.5 * z, "wrong_gradient"),
    "one class detached": (lambda z: torch.cat([z[:, :1].detach(), z[:, 1:]], 1), "wrong_gradient"),
    "steep sigmoids": (lambda z: 5 * torch.sigmoid(50 * z) - 1, "saturated_layer"),
    "without gradients at all": (lambda z: z.detach(), "cut_gradient"),
}

SOUND = {
    "linear": lambda z: z,
    "log-softmax": lambda z: z.log_softmax(1),
    "temperature": lambda z: z / 0.05,
    "softcap": lambda z: 30 * torch.tanh(z / 30),
    "cosine": lambda z: 10 * F.normalize(z, dim=1) @ F.normalize(CENTRES + 0.3, dim=1),
    "distances": lambda z: -torch.cdist(z, CENTRES).square(),
    "layer norm": lambda z: F.layer_norm(z, (10,)),
    "rounded, straight through": lambda z: z + (z.mul(10).round().div(10) - z).detach(),
    "MLP": seeded(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 10)),
    "MLP of two outputs more": seeded(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 12)),
}


@pytest.mark.parametrize("name", MASKING)
def test_heads_that_mask_gradients_are_found(name, digits):
    head, code = MASKING[name]
    parts = split(Headed(head), digits[:4])
    assert probe_head(parts.features, parts.readout, digits[:4]).fault == code


@pytest.mark.parametrize("name", SOUND)
def test_sound_heads_are_silent_and_nothing_draws(name, digits):
    parts = split(Headed(SOUND[name]), digits[:4])
    before = torch.get_rng_state()
    assert probe_head(parts.features, parts.readout, digits[:4]).fault == ""
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", ["opposite sign", "steep tanh"])
def test_no_attack_passes_whose_gradients_die_in_the_head(name, digits):
    attacks = {"pgd": "robust_ext:APGD(steps=10)", "random": "robust_ext:RandomSearch(points=50)"}
    options = {"inner_points": 150, "depths": (1,)}
    result = robust_ext.binarization_test(Headed(MASKING[name][0]), attacks, digits[:32], LINF, **options)
    pgd, random = result.content["attacks"]
    assert (pgd["score"], pgd["verdict"]) == (1, "failed")
    # What takes no gradients meets no mask.
    assert "the head" not in random["reason"].partition("Most likely")[0]
    (found, *_) = [one for one in result.content["findings"] if one["attack"] is None]
    assert (found["code"] in OF_HEAD, found["weight"], bool(found["remedies"])) == (True, "high", True)


@pytest.mark.parametrize("name", ["linear", "log-softmax", "MLP"])
def test_attacks_pass_with_sound_heads(name, digits):
    model, attack = Headed(SOUND[name]), "robust_ext:APGD(steps=10)"
    result = robust_ext.binarization_test(model, attack, digits[:32], LINF, depths=(1,))
    assert (result.verdict, result.content["findings"]) == ("passed", [])
    # Of a linear head nothing is planted a second time.
    assert ("at_logits" in result.content["attacks"][0]) == (name == "log-softmax")


class Noisy(Headed):
    """The same for noisy inputs."""

    def forward(self, x):
        return self.head(self.network(x + 0.01 * torch.randn_like(x)))


class Dropping(Headed):
    """A head that draws."""

    def forward(self, x):
        return self.head(F.dropout(self.network(x), 0.05, training=True))


BEHIND = [
    ("opposite sign", False),
    pytest.param("mostly without a graph", False, marks=pytest.mark.exhaustive),
    ("log-softmax", True),
    pytest.param("cosine", True, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("kind", ["random", "detector"])
@pytest.mark.parametrize(("name", "sound"), BEHIND)
@pytest.mark.filterwarnings("ignore:.* the gradient of some rows was zero")
def test_random_models_and_those_with_a_detector_are_planted_behind_their_heads(kind, name, sound, digits):
    """A sound head is passed, one that masks gradients is named, and no attack passes there."""
    head, options = SOUND[name] if sound else MASKING[name][0], {"inner_points": 60, "depths": (1,), "canaries": 0}
    if kind == "random":
        model, attack, more = Noisy(head), "robust_ext:APGD(steps=10)", {"draws": 3}
    else:
        model, attack = Headed(head), "robust_ext:OrthogonalPGD(steps=100)"
        more = {"detector": Pattern(model)}
        more["detector"].calibrate(digits, false_positive_rate=0.3)
    result = robust_ext.binarization_test(model, attack, digits[:16], LINF, **options, **more)
    (entry,) = result.content["attacks"]
    for test in entry.get("tests", {"": entry}).values():
        assert test["score"] == 1
        counts = test["at_logits"]
        assert counts["samples"] >= 8
        assert counts["found"] == (counts["samples"] if sound else 0)
        assert ("the head, which the test replaces, masks gradients" in test["reason"]) != sound
        assert (test["verdict"] == "failed") != sound


def test_a_head_behind_which_nothing_is_planted_is_said_not_to_be_tested(digits):
    options = {"inner_points": 100, "depths": (1,), "draws": 4}
    with pytest.warns(robust_ext.RobustExtWarning, match="Nothing could be planted at the logits"):
        result = robust_ext.binarization_test(
            Dropping(SOUND["linear"]), "robust_ext:APGD(steps=10)", digits[:32], LINF, **options
        )
    assert result.content["findings"] == []
    assert "at_logits" not in result.content["attacks"][0]
