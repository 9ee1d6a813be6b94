import pytest
import torch
from torch import nn

from robust_ext import ThreatModel, as_attack
from robust_ext.core.random import seeded_globals
from tests.adapters import common
from tests.adapters.common import Recorder, conv_network, drawn_seed, predicted, require, uniform

torchattacks = require("torchattacks")

SHAPE = (3, 8, 8)
CLASSES = 10


def network(classes=CLASSES):
    return conv_network(SHAPE, classes)


def problem(classes=CLASSES):
    """A network, four images, and what it predicts for them."""
    module, x = network(classes), uniform(4, SHAPE)
    return module, x, predicted(module, x)


def run(attack, module, x, y, threat_model):
    return common.run(attack, module, x, y, threat_model, classes=CLASSES, direct=False)


def by_hand(name, module, x, y, settings):
    with seeded_globals(drawn_seed()):
        out = getattr(torchattacks, name)(module, **settings)(x, y)
    return out.detach()


LINF, L2, L1 = ("linf", 0.0625), ("l2", 0.5), ("l1", 4.0)


@pytest.mark.parametrize(
    ("name", "ball", "settings"),
    [
        ("CW", L2, {"steps": 20, "c": 10, "lr": 0.05}),
        ("EADL1", L1, {"binary_search_steps": 4, "max_iterations": 50, "lr": 0.02, "initial_const": 0.01}),
        ("EADEN", L1, {"binary_search_steps": 4, "max_iterations": 50, "lr": 0.02, "initial_const": 0.01}),
        ("UPGD", LINF, {"steps": 3, "loss": "margin", "eps": 0.0625}),
    ],
)
def test_attacks_that_mask_logits_by_zeros_equal_torchattacks_on_logits_above_zero(name, ball, settings):
    module, x, y = problem()
    threat_model = ThreatModel(norm=ball[0], epsilon=ball[1])
    candidates = run(as_attack((getattr(torchattacks, name), settings)), module, x, y, threat_model)

    class Positive(nn.Sequential):
        def forward(self, x):
            logits = super().forward(x)
            return logits - logits.min(1, keepdim=True).values.detach()

    assert torch.equal(candidates, by_hand(name, Positive(module).eval(), x, y, settings))
    assert bool((module(candidates).argmax(1) != y).any())


def made(attack, threat_model, classes=CLASSES):
    """The torchattacks object that is made for a target."""
    seen = []
    kind = attack.made_of
    forward = kind.forward

    def note(self, *arguments):
        seen.append(self)
        return forward(self, *arguments)

    module, x, y = problem(classes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "forward", note)
        common.run(attack, module, x, y, threat_model, classes=classes)
    return seen[0]


@pytest.mark.parametrize(
    ("name", "epsilon", "alpha"),
    [
        # torchattacks' 2/255 is below epsilon.
        ("PGD", 0.3, 2 / 255),
        # It is not: 2.5 epsilon over 10 steps, a tenth of epsilon over 100, and never more than epsilon.
        ("PGD", 0.004, 0.001),
        ("PGD(steps=100)", 0.004, 0.0004),
        ("PGD(steps=1)", 0.004, 0.004),
        ("PGD(alpha=0.5)", 0.004, 0.5),
        ("FFGSM", 8 / 255, 10 / 255),
        ("FFGSM", 0.004, 0.005),
        ("FFGSM", 0.3, 10 / 255),
    ],
)
def test_step_sizes_fit_epsilon(name, epsilon, alpha):
    attack = made(as_attack(f"torchattacks:{name}"), ThreatModel(norm="linf", epsilon=epsilon))
    assert attack.alpha == pytest.approx(alpha, rel=1e-9)
    assert attack.eps == epsilon


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("APGD", {"rho": 0.5, "seed": 4, "norm": "L2", "loss": "dlr", "eot_iter": 2}),
        ("APGDT", {"rho": 0.5, "n_restarts": 2}),
        ("FAB", {"multi_targeted": True, "alpha_max": 0.2}),
        ("Square", {"resc_schedule": False, "p_init": 0.3, "loss": "ce"}),
        ("Pixle", {"x_dimensions": (1, 3), "y_dimensions": (0.1, 0.2), "pixel_mapping": "distance"}),
        ("Pixle", {"max_iterations": 7}),
        ("PGDRS", {"noise_type": "uniform", "noise_sd": 0.25, "noise_batch_size": 3, "batch_max": 7}),
        ("PGDRSL2", {"noise_sd": 0.25, "eps_for_division": 1e-6}),
        ("TIFGSM", {"kernel_name": "linear", "len_kernel": 5, "resize_rate": 0.5}),
        ("SPSA", {"delta": 0.5, "nb_sample": 3, "max_batch_size": 2}),
        ("EADL1", {"kappa": 1, "initial_const": 0.5, "abort_early": False}),
        ("VMIFGSM", {"N": 2, "beta": 0.5}),
        ("PIFGSMPP", {"project_factor": 0.5, "max_epsilon": 0.5}),
        ("JSMA", {"theta": 0.5, "gamma": 0.25}),
        ("OnePixel", {"pixels": 3, "inf_batch": 5}),
        ("AutoAttack", {"version": "plus", "seed": 3}),
    ],
)
def test_every_setting_of_an_object_is_read_back(name, settings):
    attack = as_attack(getattr(torchattacks, name)(network(), **settings))
    assert attack.settings == settings


def test_multi_attack_binds_its_parts_anew():
    old = Recorder(network()).eval()
    parts = [torchattacks.FGSM(old, eps=0.03), torchattacks.PGD(old, eps=0.03, steps=3)]
    attack = as_attack(torchattacks.MultiAttack(parts))
    module, x, y = problem()
    candidates = run(attack, module, x, y, ThreatModel(norm="linf", epsilon=0.03))
    assert old.sizes == []
    with seeded_globals(drawn_seed()):
        new = [torchattacks.FGSM(module, eps=0.03), torchattacks.PGD(module, eps=0.03, steps=3)]
        expected = torchattacks.MultiAttack(new)(x, y)
    assert torch.equal(candidates, expected)
    assert attack.traits.batching == "any"
    assert attack.description == (
        "torchattacks MultiAttack(attacks=[torchattacks FGSM(eps=0.03), torchattacks PGD(eps=0.03, steps=3)])"
    )


def test_classes_of_others_are_attacked_row_by_row():
    class Brighter(torchattacks.attack.Attack):
        def __init__(self, model, eps=0.1):
            super().__init__("Brighter", model)
            self.eps = eps
            self.supported_mode = ["default"]

        def forward(self, images, labels):
            return (images + self.eps).clamp(0, 1)

    attack = as_attack(Brighter(network(), eps=0.25))
    _, x, y = problem()
    assert attack.traits.batching == "single"
    candidates = run(attack, network(), x, y, ThreatModel(norm="linf", epsilon=0.25))
    assert torch.equal(candidates, (x + 0.25).clamp(0, 1))
