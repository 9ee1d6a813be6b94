"""Heads that mask gradients behind the features, where the test puts a readout in their place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import robust_ext
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.binarization.head import OF_HEAD, probe_head
from robust_ext.models.features import split
from tests.evaluations.subjects import Pattern

LINF = robust_ext.ThreatModel(norm="linf", epsilon=0.1)


class Flipped(torch.autograd.Function):
    """The identity, with a gradient of the other sign."""

    @staticmethod
    def forward(ctx: object, logits: Tensor) -> Tensor:
        return logits.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return -gradient


class Headed(nn.Module):
    """The digits network with something behind its logits."""

    def __init__(self, head: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.network, self.head = digits_network(), head
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.network(x))


def half_without_graph(logits: Tensor) -> Tensor:
    with torch.no_grad():
        rest = 1.5 * logits
    return rest - 0.5 * logits


def seeded(*layers: nn.Module) -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    for layer in layers:
        for part in layer.parameters():
            part.data = torch.randn(part.shape, generator=generator) / part.shape[-1] ** 0.5
    return nn.Sequential(*layers).eval()


CENTRES = torch.eye(10).mul(4)

MASKING: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "opposite sign": (lambda z: -z + 2 * z.detach(), "wrong_gradient"),
    "rounded": (lambda z: (z * 100).round() / 100, "zero_gradient"),
    "steep tanh": (lambda z: torch.tanh(1000 * z), "zero_gradient"),
    "function of the other sign": (Flipped.apply, "wrong_gradient"),
    "mostly without a graph": (half_without_graph, "wrong_gradient"),
    "one class detached": (lambda z: torch.cat([z[:, :1].detach(), z[:, 1:]], 1), "wrong_gradient"),
    "detached": (lambda z: z.detach() + 0 * z, "zero_gradient"),
    "steep sigmoids": (lambda z: 5 * torch.sigmoid(50 * z) - 1, "saturated_layer"),
    "floor": (lambda z: torch.floor(z * 20), "zero_gradient"),
    "without gradients at all": (lambda z: z.detach(), "cut_gradient"),
}

SOUND: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda z: z,
    "log-softmax": lambda z: z.log_softmax(1),
    "temperature": lambda z: z / 0.05,
    "centred": lambda z: z - z.mean(1, keepdim=True),
    "softcap": lambda z: 30 * torch.tanh(z / 30),
    "cosine": lambda z: 10 * F.normalize(z, dim=1) @ F.normalize(CENTRES + 0.3, dim=1),
    "distances": lambda z: -torch.cdist(z, CENTRES).square(),
    "layer norm": lambda z: F.layer_norm(z, (10,)),
    "rounded, straight through": lambda z: z + (z.mul(10).round().div(10) - z).detach(),
    "MLP": seeded(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 10)),
    "MLP of two outputs more": seeded(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 12)),
}


@pytest.mark.parametrize("name", MASKING)
def test_heads_that_mask_gradients_are_found(name: str, digits: Tensor) -> None:
    head, code = MASKING[name]
    parts = split(Headed(head), digits[:4])
    assert probe_head(parts.features, parts.readout, digits[:4]).fault == code


@pytest.mark.parametrize("name", SOUND)
def test_sound_heads_are_silent_and_nothing_draws(name: str, digits: Tensor) -> None:
    parts = split(Headed(SOUND[name]), digits[:4])
    before = torch.get_rng_state()
    assert probe_head(parts.features, parts.readout, digits[:4]).fault == ""
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", ["opposite sign", "rounded", "steep tanh", "function of the other sign"])
def test_no_attack_passes_whose_gradients_die_in_the_head(name: str, digits: Tensor) -> None:
    result = robust_ext.binarization_test(
        Headed(MASKING[name][0]),
        {"pgd": "robust_ext:APGD(steps=10)", "random": "robust_ext:RandomSearch(points=50)"},
        digits[:32],
        LINF,
        inner_points=150,
        depths=(1,),
    )
    pgd, random = result.content["attacks"]
    assert pgd["score"] == 1
    assert pgd["verdict"] == "failed"
    # What takes no gradients meets no mask.
    assert "the head" not in random["reason"].partition("Most likely")[0]
    (found, *_) = [one for one in result.content["findings"] if one["attack"] is None]
    assert found["code"] in OF_HEAD
    assert found["weight"] == "high"
    assert found["remedies"]


@pytest.mark.parametrize("name", ["linear", "log-softmax", "cosine", "MLP"])
def test_attacks_pass_with_sound_heads(name: str, digits: Tensor) -> None:
    result = robust_ext.binarization_test(
        Headed(SOUND[name]), "robust_ext:APGD(steps=10)", digits[:32], LINF, depths=(1,)
    )
    assert (result.verdict, result.content["findings"]) == ("passed", [])
    (attack,) = result.content["attacks"]
    # Of a linear head nothing is planted a second time.
    assert ("at_logits" in attack) == (name in ("log-softmax", "cosine"))


class Noisy(Headed):
    """The same for noisy inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.network(x + 0.01 * torch.randn_like(x)))


class Dropping(Headed):
    """A head that draws."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.network(x), 0.05, training=True))


BEHIND = [
    ("opposite sign", False),
    pytest.param("rounded", False, marks=pytest.mark.exhaustive),
    pytest.param("function of the other sign", False, marks=pytest.mark.exhaustive),
    pytest.param("mostly without a graph", False, marks=pytest.mark.exhaustive),
    ("log-softmax", True),
    pytest.param("cosine", True, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("name", "sound"), BEHIND)
@pytest.mark.filterwarnings("ignore:APGD. some rows had a gradient of zeros")
def test_random_models_are_planted_behind_their_heads(name: str, sound: bool, digits: Tensor) -> None:
    head = SOUND[name] if sound else MASKING[name][0]
    options = {"inner_points": 60, "depths": (1,), "draws": 3, "canaries": 0}
    result = robust_ext.binarization_test(Noisy(head), "robust_ext:APGD(steps=10)", digits[:16], LINF, **options)
    (attack,) = result.content["attacks"]
    assert attack["score"] == 1
    check_behind(attack, sound=sound)
    assert not any("at the logits" in one for one in result.content["warnings"])


@pytest.mark.parametrize(("name", "sound"), BEHIND)
@pytest.mark.filterwarnings("ignore:.* some rows had a gradient of zeros")
def test_classifiers_with_a_detector_are_planted_behind_their_heads(name: str, sound: bool, digits: Tensor) -> None:
    model = Headed(SOUND[name] if sound else MASKING[name][0])
    detector = Pattern(model)
    detector.calibrate(digits, false_positive_rate=0.3)
    options = {"inner_points": 60, "depths": (1,), "canaries": 0, "detector": detector}
    attack = "robust_ext:OrthogonalPGD(steps=100)"
    result = robust_ext.binarization_test(model, attack, digits[:16], LINF, **options)
    for test in result.content["attacks"][0]["tests"].values():
        assert test["score"] == 1
        check_behind(test, sound=sound)


def check_behind(attack: dict[str, object], *, sound: bool) -> None:
    """A sound head is passed, one that masks gradients is named, and no attack passes there."""
    counts, reason = attack["at_logits"], str(attack["reason"])
    assert isinstance(counts, dict)
    assert counts["samples"] >= 8
    assert counts["found"] == (counts["samples"] if sound else 0)
    assert ("the head, which the test replaces, masks gradients" in reason) != sound
    assert (attack["verdict"] == "failed") != sound


def test_a_head_behind_which_nothing_is_planted_is_said_not_to_be_tested(digits: Tensor) -> None:
    with pytest.warns(robust_ext.RobustExtWarning, match="Nothing could be planted at the logits"):
        result = robust_ext.binarization_test(
            Dropping(SOUND["linear"]),
            "robust_ext:APGD(steps=10)",
            digits[:32],
            LINF,
            inner_points=100,
            depths=(1,),
            draws=4,
        )
    assert result.content["findings"] == []
    assert "at_logits" not in result.content["attacks"][0]
