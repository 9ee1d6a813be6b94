"""What torchattacks does wrong harms no candidate: few classes and channels, bounds, modes, seeds of a clock."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from robust_ext import AttackError, ThreatModel, as_attack
from robust_ext.core.random import seeded_globals
from tests.adapters import common
from tests.adapters.common import Recorder, drawn_seed, predicted, require, uniform

torchattacks = require("torchattacks")
EAD = {"binary_search_steps": 5, "max_iterations": 50, "lr": 0.02, "initial_const": 0.01}


def problem(shape=(1, 8, 8), classes=3, *, bias=0.0):
    """Four inputs, what a network predicts for them, and the network."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        size = int(torch.Size(shape).numel())
        module = nn.Sequential(nn.Flatten(), nn.Linear(size, 32), nn.Tanh(), nn.Linear(32, classes)).eval()
        module[1].weight.mul_(4)
        module[3].bias.add_(bias)
    x = uniform(4, shape)
    return x, predicted(module, x), module


def run(attack, module, x, y, norm="linf", epsilon=0.1, *, classes=3, direct=False):
    attack = as_attack(f"torchattacks:{attack}") if isinstance(attack, str) else attack
    return common.run(attack, module, x, y, ThreatModel(norm=norm, epsilon=epsilon), classes=classes, direct=direct)


@pytest.mark.parametrize("classes", [2, 3])
def test_losses_on_further_logits_have_classes_enough(classes):
    x, y, module = problem(classes=classes)
    names = "APGD(loss='dlr', steps=3)", "UPGD(loss='dlr', steps=3)", "APGDT(steps=3)", "AutoAttack(version='rand')"
    for name in names:
        assert bool((predicted(module, run(name, module, x, y, classes=classes)) != y).any()), name
        # Where nothing can be found, every part of AutoAttack has its turn.
        small = run(name, module, x, y, epsilon=1e-6, classes=classes)
        assert "UPGD" in name or torch.equal(small, x)


@pytest.mark.parametrize("classes", [2, 12])
def test_jsma_aims_at_the_next_class_of_the_target(classes):
    module, x, y = problem(classes=classes)[2], uniform(12, (1, 8, 8)), torch.arange(12) % classes
    candidates = run("JSMA(gamma=0.5)", module, x, y, "l1", 4.0, classes=classes)
    moved = (candidates != x).flatten(1).any(1)
    assert bool((moved & (predicted(module, candidates) == (y + 1) % classes)).any())


@pytest.mark.parametrize(
    ("name", "settings", "norm"),
    [
        ("CW", {"steps": 60, "c": 2.0, "lr": 0.05}, "l2"),
        ("EADL1", EAD, "l1"),
        ("EADEN", EAD, "l1"),
        ("UPGD", {"steps": 3, "loss": "margin", "eps": 2.0}, "linf"),
    ],
)
def test_margins_are_those_of_logits_above_zero_and_need_no_constant(name, settings, norm):
    class Positive(nn.Sequential):
        def forward(self, x):
            logits = super().forward(x)
            return logits - logits.min(1, keepdim=True).values.detach()

    for bias in (-50.0, 50.0):
        x, y, module = problem(classes=2, bias=bias)
        candidates = run(as_attack((getattr(torchattacks, name), settings)), module, x, y, norm, 2.0, classes=2)
        with seeded_globals(drawn_seed()):
            expected = getattr(torchattacks, name)(Positive(module).eval(), **settings)(x, y).detach()
        assert torch.equal(candidates, expected) or bias > 0
        assert bool((predicted(module, candidates) != y)[1:2].all())


@pytest.mark.parametrize("channels", [1, 2])
def test_classes_for_three_channels_run_on_fewer(channels):
    """One step of each, written down for any number of channels."""
    x, y, module = problem((channels, 9, 9))
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(module(leaf), y), leaf)
    kernel = torch.full((channels, 1, 3, 3), 1 / 8)
    kernel[:, :, 1, 1] = 0
    first = 10 * 0.1 * gradient.sign()
    cut = (first.abs() - 0.1) * first.sign()
    spread = 10 * 0.1 * F.conv2d(cut, kernel, padding=1, groups=channels).sign()
    expected = torch.minimum(torch.maximum(x + first + spread, x - 0.1), x + 0.1).clamp(0, 1)
    torch.testing.assert_close(run("PIFGSM(num_iter_set=1)", module, x, y), expected)
    bell = F.conv2d(gradient, torch.full((channels, 1, 5, 5), 1 / 25), padding=2, groups=channels)
    tifgsm = "TIFGSM(steps=1, diversity_prob=0, kernel_name='uniform', len_kernel=5, alpha=0.05)"
    torch.testing.assert_close(run(tifgsm, module, x, y), (x + 0.05 * bell.sign()).clamp(0, 1))


def test_shapes_that_a_class_does_not_work_on_are_refused():
    few = [((4, 8, 8), name) for name in ("TIFGSM", "MultiAttack(attacks=['FGSM', 'PIFGSM'])")]
    square = [((1, 6, 8), "DIFGSM"), ((12,), "TIFGSM"), ((1, 8, 6), "Pixle"), ((1, 6, 8), "AutoAttack")]
    for shape, name in [*few, *square, ((12,), "Square"), ((1, 4, 4), "Square")]:
        x, y, module = problem(shape)
        norm = {"Square": "l2", "AutoAttack": "l2", "Pixle": "l1"}.get(name, "linf")
        with pytest.raises(AttackError, match="at most 3 channels" if shape == (4, 8, 8) else r"at least \d x \d"):
            run(name, module, x, y, norm, 0.5)


@pytest.mark.parametrize("shape", [(12,), (6, 8), (1, 6, 8), (2, 3, 4, 5)])
def test_inputs_of_any_shape_are_images_and_what_is_misclassified_comes_back(shape):
    x, y, module = problem(shape)
    y[1] = (y[1] + 1) % 3
    for norm, names in {
        "linf": ("PGD(steps=3)", "MIFGSM(steps=3)", "Square(n_queries=50)"),
        "l2": ("APGD(steps=3)", "FAB(steps=3)", "PGDL2(steps=3)", "DeepFool(steps=5)"),
        "l1": ("JSMA", "OnePixel(steps=2)", "SparseFool(steps=2)"),
    }.items():
        for name in names:
            candidates = run(name, module, x, y, norm, 0.3)
            assert bool(torch.isfinite(candidates).all())
            assert not torch.equal(candidates, x)
            back = name.startswith(("Deep", "FAB", "Square", "APGD", "Sparse"))
            assert torch.equal(candidates[1], x[1]) or not back


class Modes(nn.Module):
    """A network with a dropout that is meant to be random, noting the modes of its parts."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout, self.linear = nn.BatchNorm2d(1), nn.Dropout(0.5), nn.Linear(64, 3)
        self.seen = set()
        self.eval()

    @property
    def modes(self):
        return self.training, self.norm.training, self.dropout.training

    def forward(self, x):
        self.seen.add(self.modes)
        return self.linear(self.dropout(self.norm(x)).flatten(1))


@pytest.mark.parametrize("asked", [None, "object", "part of another"])
def test_modes_are_those_of_the_target_unless_an_object_asks_for_train_mode(asked):
    x, y, network = problem()
    module = Modes()
    if asked is None:
        module.dropout.train()
        for direct in (True, False):
            run("PGD(steps=2)", module, x, y, direct=direct)
        assert module.seen == {(False, False, True)} == {module.modes}
        return
    before, attack = copy.deepcopy(module.state_dict()), torchattacks.PGD(network, steps=2)
    attack.set_model_training_mode(model_training=True, batchnorm_training=True)
    if asked == "part of another":
        attack = torchattacks.MultiAttack([attack, torchattacks.FGSM(attack.model)])
    run(as_attack(attack), module, x, y, direct=True)
    assert (True, True, False) in module.seen
    assert module.modes == (False, False, False)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_candidates_of_ead_stay_in_bounds():
    # The first step is taken on the clean image as well, so values near the bounds leave them.
    x, _, module = problem()
    x = x.round() * 0.98 + 0.01
    few = "initial_const=10.0, lr=0.1, max_iterations=20, binary_search_steps=2"
    for name in ("EADL1", "EADEN"):
        candidates = run(f"{name}({few})", module, x, predicted(module, x), "l1", 3.0)
        assert torch.equal(candidates, candidates.clamp(0, 1))
        assert not torch.equal(candidates, x)


def test_step_sizes_fit_epsilon(monkeypatch):
    """torchattacks' 2/255 where it is below epsilon; else 2.5 epsilon over the steps, or a tenth of it, or all."""
    seen = []
    x, y, module = problem()
    for kind in (torchattacks.PGD, torchattacks.FFGSM):
        forward = kind.forward
        monkeypatch.setattr(kind, "forward", lambda self, *a, forward=forward: seen.append(self) or forward(self, *a))
    for name, epsilon, alpha in (
        *(("PGD", 0.3, 2 / 255), ("PGD", 0.004, 0.001), ("PGD(steps=100)", 0.004, 0.0004)),
        *(("PGD(steps=1)", 0.004, 0.004), ("PGD(alpha=0.5)", 0.004, 0.5)),
        *(("FFGSM", 8 / 255, 10 / 255), ("FFGSM", 0.004, 0.005), ("FFGSM", 0.3, 10 / 255)),
    ):
        run(name, module, x, y, epsilon=epsilon)
        assert (seen[-1].alpha, seen[-1].eps) == (pytest.approx(alpha, rel=1e-9), epsilon)


def test_every_setting_of_an_object_is_read_back():
    for name, settings in (
        ("APGD", {"rho": 0.5, "seed": 4, "norm": "L2", "loss": "dlr", "eot_iter": 2}),
        ("APGDT", {"rho": 0.5, "n_restarts": 2}),
        ("Square", {"resc_schedule": False, "p_init": 0.3, "loss": "ce"}),
        ("Pixle", {"x_dimensions": (1, 3), "y_dimensions": (0.1, 0.2), "max_iterations": 7}),
        ("TIFGSM", {"kernel_name": "linear", "len_kernel": 5, "resize_rate": 0.5}),
    ):
        assert as_attack(getattr(torchattacks, name)(problem()[2], **settings)).settings == settings


def test_multi_attack_binds_its_parts_again():
    x, y, module = problem()
    old = Recorder(problem(classes=5)[2]).eval()

    def multi(network):
        parts = torchattacks.FGSM(network, eps=0.03), torchattacks.PGD(network, eps=0.03, steps=3)
        return torchattacks.MultiAttack(list(parts))

    attack = as_attack(multi(old))
    candidates = run(attack, module, x, y, epsilon=0.03)
    assert old.sizes == []
    with seeded_globals(drawn_seed()):
        assert torch.equal(candidates, multi(module)(x, y))
    expected = "torchattacks MultiAttack(attacks=[torchattacks FGSM(eps=0.03), torchattacks PGD(eps=0.03, steps=3)])"
    assert attack.description == expected
