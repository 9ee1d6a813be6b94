"""What Foolbox 3.3.4 does wrong, shown on Foolbox itself, and what the adapter makes of it."""

import logging
import warnings
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

from robust_ext import AttackError, ThreatModel, as_module
from robust_ext.adapters.foolbox.library import describe
from robust_ext.core.errors import RobustExtWarning
from robust_ext.core.random import seeded_globals
from robust_ext.registry.base import adapters
from tests.adapters import common
from tests.adapters.common import UNIT, Brightness, Downhill, Recorder, conv_network, predicted, require, uniform

foolbox = require("foolbox")

SHAPE = (1, 6, 6)
HOPS = {"steps": 2, "initial_gradient_eval_steps": 10, "max_gradient_eval_steps": 20}


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


def build(name, settings=None, **unguarded):
    """The adapted attack; ``unguarded`` changes what is known of its class, which switches a guard off."""
    attack = adapters()["foolbox"].build_attack(name, dict(settings or {}), name=name)
    if unguarded:
        attack.entry = replace(attack.entry, **unguarded)
        attack.traits = attack.entry.traits
    return attack


def run(attack, module, x, *, norm, epsilon=0.2, bounds=UNIT, labels=None):
    threat_model = ThreatModel(norm=norm, epsilon=epsilon * (bounds[1] - bounds[0]), bounds=bounds)
    labels = zeros(len(x)) if labels is None else labels
    return common.run(attack, module, x, labels, threat_model, classes=2, direct=False)


@contextmanager
def seeded():
    """Foolbox's own run: seeded, and without the one warning that it gives besides raising."""
    with seeded_globals(0), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*failed to draw sufficient", category=UserWarning)
        yield


def host(name, module, x, *, epsilon=None, **settings):
    bounds = settings.pop("bounds", UNIT)
    criterion = settings.pop("criterion", zeros(len(x)))
    model = foolbox.PyTorchModel(module, bounds=bounds, device="cpu")
    with seeded():
        return getattr(foolbox.attacks, name)(**settings)(model, x, criterion, epsilons=epsilon)[1]


WIDE = [(-1.0, 1.0), (0.0, 255.0)]


@pytest.mark.parametrize("bounds", WIDE)
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_hopskipjump_is_run_in_the_unit_interval(bounds, norm):
    """Foolbox clips to [0, 1] whatever the bounds: all of it is class 0 in (0, 255), where its search never ends."""
    x, module = images(bounds), Brightness(0.45, bounds)
    candidates = run(build("HopSkipJumpAttack", HOPS), module, x, norm=norm, bounds=bounds)
    assert module(candidates).argmax(1).tolist() == [1, 1, 1]
    assert float(candidates.max()) > 1 or bounds == (-1.0, 1.0)
    assert float(candidates.min()) < 0 or bounds == (0.0, 255.0)
    low, high = bounds
    unit = run(build("HopSkipJumpAttack", HOPS), Brightness(0.45), (x - low) / (high - low), norm=norm)
    torch.testing.assert_close((candidates - low) / (high - low), unit, rtol=0, atol=1e-4)


@pytest.mark.parametrize("bounds", WIDE)
def test_genattack_clips_to_the_unit_interval(bounds):
    x, module, settings = images(bounds), Brightness(0.45, bounds), {"steps": 20, "population": 4}
    attack = build("GenAttack", settings)
    candidates = run(attack, module, x, norm="linf", bounds=bounds)
    width = bounds[1] - bounds[0]
    assert bool(((candidates - x).abs() <= 0.2 * width * (1 + 1e-5)).all())
    assert bool((module(candidates)[:, 1] > module(x)[:, 1]).all())
    own = run(build("GenAttack", settings, unit_space=False), module, x, norm="linf", bounds=bounds)
    changed = own != x
    assert bool(changed.any())
    # Foolbox clips to [0, 1] and then to the ball, whose nearest edge is where values beyond 1 or below 0 end up.
    beyond = (x < -0.2 * width) | (x > 1 + 0.2 * width)
    assert bool(beyond.any())
    torch.testing.assert_close(
        (own - x).abs()[beyond], torch.full((int(beyond.sum()),), 0.2 * width), rtol=1e-4, atol=0
    )


def test_genattack_aims_at_the_likeliest_wrong_class():
    class Three(nn.Module):
        def forward(self, x):
            return torch.stack([x[:, 0, 0, 0], x[:, 0, 0, 1] + 0.2, x[:, 0, 0, 2]], 1)

    x = torch.full((3, *SHAPE), 0.5)
    x[0, 0, 0, 2], x[1, 0, 0, 0], x[2, 0, 0, 0] = 1.0, 1.0, 0.0
    labels = torch.tensor([0, 0, 1])
    own = host(
        "GenAttack",
        Three().eval(),
        x,
        epsilon=0.3,
        criterion=foolbox.criteria.TargetedMisclassification(torch.tensor([2, 1, 2])),
        steps=5,
        population=4,
    )
    attack = build("GenAttack", {"steps": 5, "population": 4})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("robust_ext.adapters.foolbox.attack.draw_seed", lambda generator: 0)
        candidates = run(attack, Three().eval(), x, norm="linf", epsilon=0.3, labels=labels)
    assert torch.equal(candidates, own)


def test_genattack_overflows_on_large_logits():
    module, settings = Brightness(0.45, slope=3000.0), {"steps": 5, "population": 4}
    targets = foolbox.criteria.TargetedMisclassification(torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="NaN"):
        host("GenAttack", module, images(), epsilon=0.01, criterion=targets, **settings)
    candidates = run(build("GenAttack", settings), module, images(), norm="linf", epsilon=0.01)
    assert bool((module(candidates)[:, 1] > module(images())[:, 1]).all())


@pytest.mark.parametrize("name", ["L2CarliniWagnerAttack", "EADAttack"])
def test_failures_of_cw_and_ead_are_images_of_zeros(name):
    module, x = Brightness([0.45, 5.0, 0.45]), images()
    settings = {"binary_search_steps": 4, "steps": 50, "initial_const": 1.0}
    assert not host(name, module, x, **settings)[1].any()
    norm = build(name).traits.norms[0]
    candidates = run(build(name, settings), module, x, norm=norm)
    assert torch.equal(candidates[1], x[1])
    assert module(candidates).argmax(1).tolist() == [1, 0, 1]
    unguarded = replace(build(name).traits, failure="last")
    assert not run(build(name, settings, traits=unguarded), module, x, norm=norm)[1].any()


def test_pointwise_knows_no_numeric_epsilon():
    module, x = Brightness(0.45), images()
    with pytest.raises(AttributeError, match="_distance"):
        host("PointwiseAttack", module, x, epsilon=0.2)
    candidates = run(build("PointwiseAttack"), module, x, norm="l1")
    assert module(candidates).argmax(1).tolist() == [1, 1, 1]


def test_linf_noise_is_scaled_by_its_largest_value():
    module, x = Brightness(5.0), images(rows=20) / 4 + 0.3
    attack = foolbox.attacks.LinfAdditiveUniformNoiseAttack()
    with seeded():
        own = attack.run(foolbox.PyTorchModel(module, bounds=UNIT, device="cpu"), x, zeros(20), epsilon=0.1)
    assert float((own - x).abs().max()) > 0.1005
    candidates = run(build("LinfAdditiveUniformNoiseAttack"), module, x, norm="linf", epsilon=0.1)
    assert bool(ThreatModel(norm="linf", epsilon=0.1).contains(candidates, x).all())


STARTING = [("BoundaryAttack", {"steps": 20}, "l2"), ("HopSkipJumpAttack", HOPS, "l2"), ("PointwiseAttack", {}, "linf")]


@pytest.mark.parametrize(("name", "settings", "norm"), STARTING)
def test_a_row_that_cannot_be_started_does_not_lose_the_others(name, settings, norm, monkeypatch):
    """All noise is of class 0 in row 1: Foolbox raises for all three rows."""
    module, x = Brightness([0.45, 0.9, 0.45]), images()
    if name == "PointwiseAttack":
        module = Brightness([0.45, 5.0, 0.45])
    with pytest.raises((ValueError, AssertionError)):
        host(name, module, x, **settings)
    with pytest.warns(RobustExtWarning, match=f"{name}: found no adversarial point to start at for some samples"):
        candidates = run(build(name, settings), module, x, norm=norm)
    assert torch.equal(candidates[1], x[1])
    assert module(candidates).argmax(1).tolist() == [1, 0, 1]
    assert bool(ThreatModel(norm="l2", epsilon=9.0).contains(candidates, x).all())
    monkeypatch.setattr("robust_ext.adapters.foolbox.attack.with_start", lambda attack, start: attack)
    with pytest.raises(AttackError, match="Foolbox raised"):
        run(build(name, settings), module, x, norm=norm)


@pytest.mark.parametrize(("name", "settings", "norm"), STARTING)
def test_a_row_that_is_wrong_already_comes_back_and_the_others_are_found(name, settings, norm, recwarn):
    module, x = Brightness([0.45, 0.1, 0.45]), images()
    candidates = run(build(name, settings), module, x, norm=norm)
    assert torch.equal(candidates[1], x[1])
    assert module(candidates).argmax(1).tolist() == [1, 1, 1]
    assert not torch.equal(candidates[0], x[0])
    assert not [one for one in recwarn if one.category is RobustExtWarning]


def test_a_start_that_was_chosen_is_used_and_may_fail():
    start = foolbox.attacks.LinearSearchContrastReductionAttack(distance=foolbox.distances.l2, target=1.0, steps=10)
    for name in ("BoundaryAttack", "LInfFMNAttack"):
        settings = {"steps": 5, "init_attack": start}
        module, x = Brightness([0.45, 5.0, 0.45]), images()
        with pytest.raises((ValueError, AssertionError)):
            host(name, module, x, **settings)
        attack = build(name, settings)
        candidates = run(attack, module, x, norm=attack.traits.norms[0])
        assert torch.equal(candidates[1], x[1])
        assert module(candidates).argmax(1).tolist() == [1, 0, 1]
        assert attack.attack.init_attack is start


def test_refinement_raises_where_one_row_is_lost():
    """A model that binarizes its inputs, as the attack is made for, and one row whose threshold is another."""

    class Binarizing(nn.Module):
        def forward(self, x):
            cut = torch.tensor([0.5, 0.5, 0.8])[: len(x)].view(-1, 1, 1, 1)
            count = (x >= cut).float().mean((1, 2, 3)) - 0.6
            return torch.stack([-count, count], 1)

    module, x = Binarizing().eval(), images() * 0.9
    attack = build("BinarizationRefinementAttack")
    assert attack.traits.starting_points
    with pytest.MonkeyPatch.context() as patched:
        points = torch.where(torch.arange(36).view(SHAPE) < 30, 0.95, x)
        patched.setattr("robust_ext.adapters.foolbox.attack.starting_points", lambda *a, **k: (points, zeros() == 0))
        candidates = run(attack, module, x, norm="l2")
    model = foolbox.PyTorchModel(module, bounds=UNIT, device="cpu")
    own = foolbox.attacks.BinarizationRefinementAttack()
    with pytest.raises(ValueError, match="threshold"):
        own(model, x, zeros(), starting_points=points, epsilons=None)
    assert torch.equal(candidates[2], x[2])
    expected = own(model, x[:2], zeros(2), starting_points=points[:2], epsilons=None)[1]
    assert torch.equal(candidates[:2], expected)
    assert module(candidates).argmax(1).tolist() == [1, 1, 0]
    distance = ThreatModel(norm="l2", epsilon=1.0).distance
    assert bool((distance(candidates, x)[:2] < distance(points, x)[:2]).all())


def test_newtonfool_returns_nan_where_a_gradient_vanishes():
    module, x = Constant(), images()
    assert bool(host("NewtonFoolAttack", module, x)[0].isnan().all())
    candidates = run(build("NewtonFoolAttack"), module, x, norm="l2")
    assert torch.equal(candidates[0], x[0])
    assert module(candidates).argmax(1).tolist() == [0, 1, 1]
    assert bool(run(build("NewtonFoolAttack", flat=0), module, x, norm="l2")[0].isnan().all())
    assert torch.equal(candidates[1:], host("NewtonFoolAttack", module, x)[1:])


def test_virtual_adversarial_returns_nan_where_a_gradient_vanishes():
    module, x, settings = Constant(), images(), {"steps": 1, "xi": 0.01}
    assert bool(host("VirtualAdversarialAttack", module, x, epsilon=1.0, **settings)[0].isnan().all())
    candidates = run(build("VirtualAdversarialAttack", settings), module, x, norm="l2", epsilon=1.0)
    assert bool(ThreatModel(norm="l2", epsilon=1.0).contains(candidates, x).all())
    assert bool(run(build("VirtualAdversarialAttack", settings, flat=0), module, x, norm="l2")[0].isnan().all())


def test_assertions_without_a_text_are_explained():
    class Noisy(nn.Module):
        def forward(self, x):
            mean = x.flatten(1).mean(1) - 0.45 + torch.randn(len(x)) * 0.001
            return torch.stack([-mean, mean], 1)

    with pytest.raises(AttackError, match=r"AssertionError: assert ep\.all.*hop_skip_jump\.py.*predictions are random"):
        run(build("HopSkipJumpAttack", {**HOPS, "steps": 30}), Noisy().eval(), images(), norm="l2")


def test_models_without_gradients_are_explained():
    inner = foolbox.PyTorchModel(Brightness(0.5), bounds=UNIT, device="cpu")
    module = as_module(foolbox.models.ThresholdingWrapper(inner, 0.5)).module
    with pytest.raises(AttackError, match="choose an attack without gradients"):
        run(build("LinfPGD"), module, images(), norm="linf")
    candidates = run(build("SaltAndPepperNoiseAttack", {"steps": 50}), module, images(), norm="l2")
    assert module(candidates).argmax(1).tolist() == [1, 1, 1]


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


@pytest.mark.parametrize("name", [f"{norm}BrendelBethgeAttack" for norm in ("Linfinity", "L2", "L1", "L0")])
def test_brendel_bethge_without_its_compiler(name, monkeypatch):
    """All but the optimizer itself: samples that cannot be started do not lose the others, and runs repeat."""
    monkeypatch.setattr(getattr(foolbox.attacks, name), "instantiate_optimizer", lambda self: Downhill())
    module, x = Recorder(Brightness([5.0, 0.45, 0.45])), images()
    norm = build(name).traits.norms[0]
    first = run(build(name, {"steps": 5}), module, x, norm=norm)
    assert torch.equal(first[0], x[0])
    assert module(first).argmax(1).tolist() == [0, 1, 1]
    assert torch.equal(run(build(name, {"steps": 5}), module, x, norm=norm), first)
    assert set(module.sizes) == {3}


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


def test_an_init_attack_that_needs_a_budget_is_named():
    model = foolbox.PyTorchModel(nn.Flatten().eval(), bounds=(0, 1))
    with pytest.raises(TypeError) as raised:
        foolbox.attacks.LinfPGD(steps=1).run(
            model, torch.rand(2, 1, 1, 3), foolbox.Misclassification(torch.zeros(2).long())
        )
    words = describe("L2BrendelBethgeAttack: Foolbox", raised.value)
    assert "as init_attack choose a minimum-norm attack" in words
