"""What torchattacks does wrong harms no candidate: few classes and channels, bounds, modes, seeds of a clock."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from robust_ext import AttackError, ThreatModel, as_attack
from tests.adapters import common
from tests.adapters.common import predicted, require, uniform

torchattacks = require("torchattacks")

LINF = ThreatModel(norm="linf", epsilon=0.1)


def problem(shape=(1, 8, 8), classes=3, *, bias=0.0, bounds=(0.0, 1.0)):
    """Four inputs, what a network predicts for them, and the network."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        size = int(torch.Size(shape).numel())
        module = nn.Sequential(nn.Flatten(), nn.Linear(size, 32), nn.Tanh(), nn.Linear(32, classes)).eval()
    with torch.no_grad():
        module[1].weight.mul_(4 / (bounds[1] - bounds[0]))
        module[3].bias.add_(bias)
    x = uniform(4, shape, bounds)
    return x, predicted(module, x), module


def run(attack, module, x, y, *, classes=3, threat_model=LINF, direct=False):
    attack = as_attack(f"torchattacks:{attack}") if isinstance(attack, str) else attack
    return common.run(attack, module, x, y, threat_model, classes=classes, direct=direct)


@pytest.mark.parametrize("classes", [2, 3])
def test_losses_on_further_logits_have_classes_enough(classes):
    x, y, module = problem(classes=classes)
    for name in (
        "APGD(loss='dlr', steps=3)",
        "UPGD(loss='dlr', steps=3)",
        "APGDT(steps=3)",
        "AutoAttack(version='rand')",
    ):
        candidates = run(name, module, x, y, classes=classes)
        assert bool((module(candidates).argmax(1) != y).any()), name
        # Where nothing can be found, every part of AutoAttack has its turn.
        small = run(name, module, x, y, classes=classes, threat_model=ThreatModel(norm="linf", epsilon=1e-6))
        assert "UPGD" in name or torch.equal(small, x)


@pytest.mark.parametrize("classes", [2, 3, 10, 12])
def test_jsma_aims_at_the_next_class_of_the_target(classes):
    _, _, module = problem(classes=classes)
    x, y = uniform(12, (1, 8, 8)), torch.arange(12) % classes
    candidates = run("JSMA(gamma=0.5)", module, x, y, classes=classes, threat_model=ThreatModel(norm="l1", epsilon=4.0))
    moved = (candidates != x).flatten(1).any(1)
    assert bool((moved & (module(candidates).argmax(1) == (y + 1) % classes)).any())


@pytest.mark.parametrize("bias", [-50.0, 50.0])
@pytest.mark.parametrize(
    ("name", "settings", "norm"),
    [("CW", {"steps": 60, "c": 2.0, "lr": 0.05}, "l2")]
    + [(name, {"lr": 0.02, "initial_const": 0.01, "binary_search_steps": 5}, "l1") for name in ("EADL1", "EADEN")],
)
def test_margins_do_not_depend_on_a_constant_in_the_logits(name, settings, norm, bias):
    x, y, module = problem(classes=2, bias=bias)
    attack = as_attack((getattr(torchattacks, name), settings))
    candidates = run(attack, module, x, y, classes=2, threat_model=ThreatModel(norm=norm, epsilon=2.0))
    assert bool((module(candidates).argmax(1) != y).all())


@pytest.mark.parametrize("channels", [1, 2])
def test_classes_for_three_channels_run_on_fewer(channels):
    """One step of each, written down for any number of channels."""
    x, y, module = problem((channels, 9, 9))
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(module(leaf), y), leaf)
    kernel = torch.full((channels, 1, 3, 3), 1 / 8)
    kernel[:, :, 1, 1] = 0
    first = 10 * LINF.epsilon * gradient.sign()
    cut = (first.abs() - LINF.epsilon) * first.sign()
    spread = 10 * LINF.epsilon * F.conv2d(cut, kernel, padding=1, groups=channels).sign()
    expected = torch.minimum(torch.maximum(x + first + spread, x - LINF.epsilon), x + LINF.epsilon).clamp(0, 1)
    torch.testing.assert_close(run("PIFGSM(num_iter_set=1)", module, x, y), expected)
    bell = F.conv2d(gradient, torch.full((channels, 1, 5, 5), 1 / 25), padding=2, groups=channels)
    tifgsm = "TIFGSM(steps=1, diversity_prob=0, kernel_name='uniform', len_kernel=5, alpha=0.05)"
    torch.testing.assert_close(run(tifgsm, module, x, y), (x + 0.05 * bell.sign()).clamp(0, 1))


SQUARE = [("DIFGSM", "linf"), ("TIFGSM", "linf"), ("Pixle", "l1"), ("Square", "l2"), ("AutoAttack", "l2")]
FEW = [
    ((4, 8, 8), name, "linf") for name in ("TIFGSM", "PIFGSM", "PIFGSMPP", "MultiAttack(attacks=['FGSM', 'PIFGSM'])")
]


@pytest.mark.parametrize(
    ("shape", "name", "norm"),
    [
        *FEW,
        *((shape, *case) for shape in [(1, 6, 8), (1, 8, 6), (12,)] for case in SQUARE),
        ((1, 4, 4), "Square", "l2"),
    ],
)
def test_shapes_that_a_class_does_not_work_on_are_refused(shape, name, norm):
    x, y, module = problem(shape)
    with pytest.raises(AttackError, match="at most 3 channels" if shape == (4, 8, 8) else r"at least \d x \d"):
        run(name, module, x, y, threat_model=ThreatModel(norm=norm, epsilon=0.5))


@pytest.mark.parametrize("shape", [(12,), (6, 8), (1, 6, 8), (2, 3, 4, 5)])
@pytest.mark.parametrize(
    ("name", "norm"),
    [
        *((name, "linf") for name in ("PGD(steps=3)", "MIFGSM(steps=3)", "Square(n_queries=5)")),
        *((name, "l2") for name in ("APGD(steps=3)", "FAB(steps=3)", "PGDL2(steps=3)", "DeepFool(steps=5)")),
        *((name, "l1") for name in ("JSMA", "OnePixel(steps=2)", "SparseFool(steps=2)")),
    ],
)
def test_inputs_of_any_shape_are_images(name, norm, shape):
    x, y, module = problem(shape)
    candidates = run(name, module, x, y, threat_model=ThreatModel(norm=norm, epsilon=0.3))
    assert candidates.shape == x.shape
    assert bool(torch.isfinite(candidates).all())
    assert not torch.equal(candidates, x)


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


@pytest.mark.parametrize("direct", [True, False])
def test_modes_are_those_of_the_target(direct):
    x, y, _ = problem()
    module = Modes()
    module.dropout.train()
    run("PGD(steps=2)", module, x, y, direct=direct)
    assert module.seen == {(False, False, True)} == {module.modes}


@pytest.mark.parametrize("wrapped", [False, True])
def test_train_mode_is_kept_where_an_object_asks_for_it(wrapped):
    x, y, network = problem()
    module = Modes()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    attack = torchattacks.PGD(network, steps=2)
    attack.set_model_training_mode(model_training=True, batchnorm_training=True)
    if wrapped:
        attack = torchattacks.MultiAttack([attack, torchattacks.FGSM(attack.model)])
    run(as_attack(attack), module, x, y, direct=True)
    assert (True, True, False) in module.seen
    assert module.modes == (False, False, False)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize("name", ["EADL1", "EADEN"])
def test_candidates_of_ead_stay_in_bounds(name):
    settings = {"initial_const": 10.0, "lr": 0.1, "max_iterations": 20, "binary_search_steps": 2}
    # The first step is taken on the clean image as well, so values near the bounds leave them.
    x, _, module = problem()
    x = x.round() * 0.98 + 0.01
    y, attack = predicted(module, x), as_attack((getattr(torchattacks, name), settings))
    candidates = run(attack, module, x, y, threat_model=ThreatModel(norm="l1", epsilon=3.0))
    assert bool(((candidates >= 0) & (candidates <= 1)).all())
    assert not torch.equal(candidates, x)


@pytest.mark.parametrize("name", ["DeepFool", "FAB", "Square(n_queries=50)", "APGD(steps=2)", "SparseFool"])
def test_rows_that_are_misclassified_already_are_returned(name):
    x, y, module = problem()
    y[1] = (y[1] + 1) % 3
    attack = as_attack(f"torchattacks:{name}")
    candidates = run(attack, module, x, y, threat_model=ThreatModel(norm=attack.traits.norms[0], epsilon=0.3))
    assert torch.equal(candidates[1], x[1])
    assert not torch.equal(candidates[0], x[0])


class SometimesFlat(nn.Module):
    """Class 0 from a brightness of .45; no gradient in row 1 at first, or wherever the brightness is .35."""

    def __init__(self, at_first):
        super().__init__()
        self.at_first, self.calls = at_first, 0

    def forward(self, x):
        brightness = x.flatten(1).mean(1)
        logits = torch.stack([brightness, 0.9 - brightness], 1)
        self.calls += 1
        first = (torch.arange(len(x)) == 1) & (self.calls == 1)
        flat = first if self.at_first else (brightness - 0.35).abs() < 1e-3
        return torch.where(flat[:, None], logits.detach() + 0 * logits, logits)


@pytest.mark.parametrize(
    ("name", "norm", "epsilon"),
    [(name, "linf", 0.02) for name in ("BIM", "MIFGSM", "NIFGSM", "SINIFGSM(m=1)", "UPGD", "DIFGSM(diversity_prob=0)")]
    + [("DeepFool", "l2", 2.0), ("SparseFool", "l1", 2.0)],
)
def test_a_row_without_gradient_stops_momentum_or_becomes_nan_as_listed_and_harms_no_other(name, norm, epsilon):
    x = torch.tensor([0.3, 0.35, 0.4]).view(3, 1, 1, 1).expand(3, 1, 8, 8).clone()
    y, module = torch.ones(3, dtype=torch.int64), SometimesFlat(norm == "linf")
    candidates = run(name, module, x, y, classes=2, threat_model=ThreatModel(norm=norm, epsilon=epsilon))
    if norm == "linf":
        assert [torch.equal(*pair) for pair in zip(candidates, x, strict=True)] == [False, name != "BIM", False]
    else:
        assert torch.isnan(candidates).flatten(1).any(1).tolist() == [False, True, False]
