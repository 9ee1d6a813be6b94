"""What Foolbox 3.3.4 does wrong harms no candidate: raises, zeros and NaN for single rows, bounds of [0, 1] alone."""

import logging

import pytest
import torch
from torch import nn

from robust_ext import ThreatModel
from robust_ext.core.errors import RobustExtWarning
from robust_ext.core.random import seeded_globals
from robust_ext.registry.base import adapters
from tests.adapters import common
from tests.adapters.common import UNIT, Brightness, Downhill, Recorder, conv_network, predicted, require, uniform

foolbox = require("foolbox")

SHAPE = (1, 6, 6)
HOPS = {"steps": 2, "initial_gradient_eval_steps": 10, "max_gradient_eval_steps": 20}
SEARCH = {"binary_search_steps": 4, "steps": 50, "initial_const": 1.0}
START = foolbox.attacks.LinearSearchContrastReductionAttack(distance=foolbox.distances.l2, target=1.0, steps=10)


class Constant(nn.Module):
    """Class 0 with gradients of zero in row 0, :class:`Brightness` in the others."""

    def __init__(self):
        super().__init__()
        self.others = Brightness(0.45)
        self.eval()

    def forward(self, x):
        logits = self.others(x)
        return torch.cat([logits[:1] * 0 + torch.tensor([[3.0, -3.0]]), logits[1:]])


def images(bounds=UNIT, rows=3):
    """Dark images, of mean around .4."""
    drawn = torch.rand(rows, *SHAPE, generator=torch.Generator().manual_seed(0)) * 0.8
    return drawn * (bounds[1] - bounds[0]) + bounds[0]


def zeros(rows=3):
    return torch.zeros(rows, dtype=torch.int64)


def build(name, settings=None):
    return adapters()["foolbox"].build_attack(name, dict(settings or {}), name=name)


def run(attack, module, x, *, norm, epsilon=0.2, bounds=UNIT, labels=None):
    threat_model = ThreatModel(norm=norm, epsilon=epsilon * (bounds[1] - bounds[0]), bounds=bounds)
    labels = zeros(len(x)) if labels is None else labels
    return common.run(attack, module, x, labels, threat_model, classes=2, direct=False)


LOST, EASY, HARD = Brightness([0.45, 0.9, 0.45]), Brightness([0.45, 0.1, 0.45]), Brightness([0.45, 5.0, 0.45])
STARTING = [("BoundaryAttack", {"steps": 20}, "l2"), ("HopSkipJumpAttack", HOPS, "l2"), ("PointwiseAttack", {}, "linf")]
# An attack, its settings, what it attacks, a norm, the classes of its candidates, and the row that comes back as it is.
ROWS = [
    # No start is found for row 1, where Foolbox raises for all rows; it is misclassified already.
    *((*case[:2], HARD if case[2] == "linf" else LOST, case[2], [1, 0, 1], 1) for case in STARTING),
    *((*case[:2], EASY, case[2], [1, 1, 1], 1) for case in STARTING),
    # A start that was chosen is used, and may fail.
    *(
        (name, {"steps": 5, "init_attack": START}, HARD, None, [1, 0, 1], 1)
        for name in ("BoundaryAttack", "LInfFMNAttack")
    ),
    # Failures are images of zeros.
    *((name, SEARCH, HARD, None, [1, 0, 1], 1) for name in ("L2CarliniWagnerAttack", "EADAttack")),
    # Knows no numeric epsilon.
    ("PointwiseAttack", {}, Brightness(0.45), "l1", [1, 1, 1], None),
    # NaN where a gradient vanishes.
    ("NewtonFoolAttack", {}, Constant(), "l2", [0, 1, 1], 0),
    # All but the optimizer itself, which numba would compile.
    *(
        (f"{norm}BrendelBethgeAttack", {"steps": 5}, Brightness([5.0, 0.45, 0.45]), None, [0, 1, 1], 0)
        for norm in ("Linfinity", "L2", "L1", "L0")
    ),
]


@pytest.mark.parametrize(("name", "settings", "module", "norm", "classes", "kept"), ROWS)
def test_a_row_that_is_lost_comes_back_and_the_others_are_found(
    name, settings, module, norm, classes, kept, monkeypatch, recwarn
):
    if "BrendelBethge" in name:
        monkeypatch.setattr(getattr(foolbox.attacks, name), "instantiate_optimizer", lambda self: Downhill())
    module, x, attack = Recorder(module), images(), build(name, settings)
    norm = norm or attack.traits.norms[0]
    candidates = run(attack, module, x, norm=norm)
    assert predicted(module, candidates).tolist() == classes
    assert [row for row in range(3) if torch.equal(candidates[row], x[row])] == [kept] * (kept is not None)
    assert bool(ThreatModel(norm="l2", epsilon=9.0).contains(candidates, x).all())
    assert set(module.sizes) == {3}
    assert torch.equal(run(build(name, settings), module, x, norm=norm), candidates)
    if (name, settings, norm) in STARTING:
        # Rows without a start are warned of.
        assert any(one.category is RobustExtWarning for one in recwarn) == (0 in classes)


def test_genattack_does_not_overflow_on_large_logits():
    module, x = Brightness(0.45, slope=3000.0), images()
    candidates = run(build("GenAttack", {"steps": 5, "population": 4}), module, x, norm="linf", epsilon=0.01)
    assert bool((module(candidates)[:, 1] > module(x)[:, 1]).all())


def test_genattack_aims_at_the_likeliest_wrong_class():
    class Three(nn.Module):
        def forward(self, x):
            return torch.stack([x[:, 0, 0, 0], x[:, 0, 0, 1] + 0.2, x[:, 0, 0, 2]], 1)

    x, settings, module = torch.full((3, *SHAPE), 0.5), {"steps": 5, "population": 4}, Three().eval()
    x[0, 0, 0, 2], x[1, 0, 0, 0], x[2, 0, 0, 0] = 1.0, 1.0, 0.0
    criterion = foolbox.criteria.TargetedMisclassification(torch.tensor([2, 1, 2]))
    with seeded_globals(common.drawn_seed()):
        model = foolbox.PyTorchModel(module, bounds=UNIT, device="cpu")
        expected = foolbox.attacks.GenAttack(**settings)(model, x, criterion, epsilons=0.3)[1]
    labels = torch.tensor([0, 0, 1])
    assert torch.equal(run(build("GenAttack", settings), module, x, norm="linf", epsilon=0.3, labels=labels), expected)


def test_noise_and_virtual_adversaries_are_in_the_ball_where_foolbox_scales_wrongly_or_divides_by_zero():
    cases = [("LinfAdditiveUniformNoiseAttack", {}, Brightness(5.0), images(rows=20) / 4 + 0.3, "linf", 0.1)]
    cases += [("VirtualAdversarialAttack", {"steps": 1, "xi": 0.01}, Constant(), images(), "l2", 1.0)]
    for name, settings, module, x, norm, epsilon in cases:
        candidates = run(build(name, settings), module, x, norm=norm, epsilon=epsilon)
        assert bool(ThreatModel(norm=norm, epsilon=epsilon).contains(candidates, x).all())
        assert not torch.equal(candidates[1:], x[1:])


def test_refinement_goes_on_where_one_row_is_lost():
    """A model that binarizes its inputs, as the attack is made for, and one row whose threshold is another."""

    class Binarizing(nn.Module):
        def forward(self, x):
            cut = torch.tensor([0.5, 0.5, 0.8])[: len(x)].view(-1, 1, 1, 1)
            count = (x >= cut).float().mean((1, 2, 3)) - 0.6
            return torch.stack([-count, count], 1)

    module, x = Binarizing().eval(), images() * 0.9
    attack = build("BinarizationRefinementAttack")
    assert attack.traits.starting_points
    points = torch.where(torch.arange(36).view(SHAPE) < 30, 0.95, x)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("robust_ext.adapters.foolbox.attack.starting_points", lambda *a, **k: (points, zeros() == 0))
        candidates = run(attack, module, x, norm="l2")
    model, own = foolbox.PyTorchModel(module, bounds=UNIT, device="cpu"), foolbox.attacks.BinarizationRefinementAttack()
    assert torch.equal(candidates[2], x[2])
    assert torch.equal(candidates[:2], own(model, x[:2], zeros(2), starting_points=points[:2], epsilons=None)[1])
    assert module(candidates).argmax(1).tolist() == [1, 1, 0]


def test_foolbox_does_not_configure_the_callers_logging():
    """It writes to the root logger by functions that add a handler where there is none."""
    root = logging.getLogger()
    before = list(root.handlers)
    for handler in before:
        root.removeHandler(handler)
    try:
        run(build("BoundaryAttack", {"steps": 2}), Brightness(0.45), images(), norm="l2")
        assert root.handlers == []
    finally:
        root.handlers[:] = before


@pytest.mark.slow
@pytest.mark.exhaustive
def test_brendel_bethge_compiled_is_what_its_python_is(request):
    """The optimizer that numba compiles and the one that the other tests run find the same points."""
    x, module = uniform(4, SHAPE), conv_network(SHAPE, 3)
    attack, labels = build("L2BrendelBethgeAttack", {"steps": 5}), predicted(module, x)
    compiled = run(attack, module, x, norm="l2", labels=labels)
    request.getfixturevalue("uncompiled_brendel_bethge")
    assert not torch.equal(compiled, x)
    attack = build("L2BrendelBethgeAttack", {"steps": 5})
    torch.testing.assert_close(run(attack, module, x, norm="l2", labels=labels), compiled, rtol=0, atol=1e-5)
