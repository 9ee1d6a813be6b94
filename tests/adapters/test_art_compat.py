"""What the adapter keeps ART 1.20 from doing, each shown on ART itself."""

import importlib
import importlib.util
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from robust_ext import ThreatModel, as_attack
from robust_ext.core.random import seeded_globals
from tests.adapters import common
from tests.adapters.common import UNIT, art_classifier, network_in, predicted, require, uniform

art = require("art")
evasion = art.attacks.evasion
threshold = importlib.import_module("robust_ext.adapters.art.settings").threshold
AttackContext = importlib.import_module("robust_ext.adapters.art.settings").AttackContext

NUMPY_2 = int(np.__version__.split(".")[0]) >= 2
OnNumpy2 = pytest.mark.skipif(not NUMPY_2, reason="numpy 1 still has it")


def network(classes=5, channels=1, bounds=UNIT):
    return network_in(bounds, (channels, 8, 8), classes)


def problem(*, channels=1, bounds=UNIT, **given):
    """A network, four images, and what it predicts for them."""
    module = network(channels=channels, bounds=bounds, **given)
    return module, *batch(module, channels=channels, bounds=bounds)


def batch(module, *, channels=1, bounds=UNIT):
    x = uniform(4, (channels, 8, 8), bounds)
    return x, predicted(module, x)


def run(attack, module, x, y, threat_model, seed=3):
    with torch.no_grad():
        classes = module(x[:1]).shape[1]
    return common.run(attack, module, x, y, threat_model, classes=classes, seed=seed, direct=False)


def classifier(module, *, bounds=UNIT, classes=5):
    return art_classifier(module, (1, 8, 8), classes, clip_values=bounds)


@OnNumpy2
@pytest.mark.parametrize(
    ("name", "given_settings"),
    [
        ("BoundaryAttack", {"targeted": False, "max_iter": 5}),
        ("HopSkipJump", {"max_iter": 2, "max_eval": 20, "init_eval": 5}),
    ],
)
def test_float64_is_cast_for_the_network(name, given_settings):
    # Upstream: on numpy 2 these two send float64 to float32 networks.
    module, x, y = problem()
    with seeded_globals(0), pytest.raises(RuntimeError, match=r"dtype|type"):
        getattr(evasion, name)(classifier(module), verbose=False, **given_settings).generate(x.numpy(), y.numpy())
    attack = as_attack((getattr(evasion, name), {k: v for k, v in given_settings.items() if k != "targeted"}))
    candidates = run(attack, module, x, y, ThreatModel(norm="l2", epsilon=1.0))
    assert bool((module(candidates).argmax(1) != y).all())


@pytest.mark.parametrize(
    "text", ["art:HopSkipJump(max_iter=2, max_eval=20, init_eval=5)", "art:BoundaryAttack(max_iter=5)"]
)
def test_generators_of_their_own_are_seeded(text, monkeypatch):
    # Upstream: RandomState() takes its seed from the system.
    module, x, y = problem()
    threat_model = ThreatModel(norm="l2", epsilon=1.0)
    first, second = (run(as_attack(text), module, x, y, threat_model) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, run(as_attack(text), module, x, y, threat_model, seed=4))
    monkeypatch.setattr("robust_ext.adapters.art.attack.seeded_states", nullcontext)
    assert not torch.equal(first, run(as_attack(text), module, x, y, threat_model))


@pytest.mark.parametrize(
    "name", ["AutoProjectedGradientDescent", "AutoConjugateGradient", "RescalingAutoConjugateGradient"]
)
def test_random_starts_do_not_pass_for_tries(name, monkeypatch):
    # Upstream: for rows that do not succeed, the last random start comes back.
    module, x, y = problem()
    attack = as_attack((getattr(evasion, name), {"max_iter": 3, "nb_random_init": 1}))
    threat_model = ThreatModel(norm="linf", epsilon=1e-3)
    assert torch.equal(run(attack, module, x, y, threat_model), x)
    monkeypatch.setattr("robust_ext.adapters.art.attack.restore_failed", lambda candidates, *_, **__: candidates)
    start = run(attack, module, x, y, threat_model)
    assert bool((threat_model.distance(start, x) > 5e-4).all())


def test_deepfool_does_not_overshoot_by_the_width_of_the_bounds():
    # Upstream: each step is multiplied by the width of the bounds.
    bounds = (0.0, 255.0)
    wide, unit = network(bounds=bounds), network()
    x, y = batch(wide, bounds=bounds)
    attack = as_attack("art:DeepFool")
    there = run(attack, unit, x / 255, y, ThreatModel(norm="l2", epsilon=1.0))
    here = run(attack, wide, x, y, ThreatModel(norm="l2", epsilon=255.0, bounds=bounds))
    torch.testing.assert_close(here / 255, there, rtol=0, atol=1e-4)
    host = evasion.DeepFool(classifier(wide, bounds=bounds), verbose=False).generate(x.numpy(), y.numpy())
    far = (torch.from_numpy(host) - x).flatten(1).norm(dim=1)
    assert bool((far > 3 * (here - x).flatten(1).norm(dim=1)).all())


def test_sum_and_shift_of_colours_are_clipped_to_the_bounds_at_hand():
    # Upstream: the laser clips to [0, 1] whatever clip_values are.
    bounds = (-1.0, 1.0)
    module, x, y = problem(channels=3, bounds=bounds)
    attack = as_attack("art:LaserAttack(iterations=30)")
    candidates = run(attack, module, x, y, ThreatModel(norm="l2", epsilon=2.0, bounds=bounds))
    changed = (candidates != x).flatten(1).any(1)
    assert bool(changed.any())
    # A beam only adds light: nothing that was dark is made brighter by the clipping itself.
    assert bool((candidates >= x - 1e-6).all())
    assert float(candidates[changed].min()) < -0.5


def test_what_needs_probabilities_is_given_them():
    # Upstream: on logits VAT raises, and NewtonFool hardly ever reaches the boundary.
    module, x, y = problem()
    with pytest.raises(TypeError, match="probabilities"):
        evasion.VirtualAdversarialMethod(classifier(module), verbose=False).generate(x.numpy(), y.numpy())
    run(as_attack("art:VirtualAdversarialMethod(max_iter=1)"), module, x, y, ThreatModel(norm="l2", epsilon=1.0))
    host = evasion.NewtonFool(classifier(module), verbose=False).generate(x.numpy(), y.numpy())
    candidates = run(as_attack("art:NewtonFool"), module, x, y, ThreatModel(norm="l2", epsilon=1.0))
    with torch.no_grad():
        by_host = int((module(torch.from_numpy(host)).argmax(1) != y).sum())
        here = int((module(candidates).argmax(1) != y).sum())
    assert here > by_host


@OnNumpy2
def test_geoda_runs_on_numpy_2_and_keeps_off_the_current_folder(tmp_path, monkeypatch):
    # Upstream: np.mat is gone, and the basis is written to the current folder and read from there.
    module, x, y = problem()
    monkeypatch.chdir(tmp_path)
    with seeded_globals(0), pytest.raises(AttributeError, match="mat"):
        evasion.GeoDA(classifier(module), sub_dim=4, verbose=False).generate(x.numpy(), y.numpy())
    attack, threat_model = as_attack("art:GeoDA(max_iter=500, sub_dim=4)"), ThreatModel(norm="l2", epsilon=1.0)
    candidates = run(attack, module, x, y, threat_model)
    assert list(tmp_path.iterdir()) == []
    np.save(tmp_path / "2d_dct_basis_4_8.npy", np.zeros((64, 16)))
    assert torch.equal(run(attack, module, x, y, threat_model), candidates)
    assert not hasattr(np, "mat")


def test_geoda_does_not_look_for_ever_for_a_point_to_begin_at():
    # Upstream: it draws noise until some is misclassified.
    class Constant(nn.Module):
        def forward(self, x):
            return torch.tensor([1.0, 0.0, 0.0]).expand(len(x), 3)

    x = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    y = torch.zeros(2, dtype=torch.int64)
    attack = as_attack("art:GeoDA(max_iter=500, sub_dim=4)")
    assert torch.equal(run(attack, Constant().eval(), x, y, ThreatModel(norm="l2", epsilon=1.0)), x)


@OnNumpy2
def test_the_laser_moves_on_numpy_2():
    # Upstream: np.asfarray is gone.
    module, x, y = problem(channels=3)
    attacks = art.attacks.evasion.laser_attack.laser_attack
    beam = attacks.LaserBeam.from_array
    generator = attacks.LaserBeamGenerator(beam([380, 0, 1, 1]), beam([780, 3, 8, 8]))
    with seeded_globals(0), pytest.raises(AttributeError, match="asfarray"):
        generator.update_params(generator.random())
    candidates = run(as_attack("art:LaserAttack(iterations=30)"), module, x, y, ThreatModel(norm="l2", epsilon=2.0))
    assert not torch.equal(candidates, x)


def test_the_numpy_patch_can_be_made():
    # Upstream: a numpy float32 among the clip values is taken for a patch, and there is none yet.
    module, x, y = problem()
    with pytest.raises(AttributeError, match="patch"):
        evasion.AdversarialPatchNumpy(classifier(module))
    attack = as_attack("art:AdversarialPatchNumpy(max_iter=30, scale_min=0.8, scale_max=0.9)")
    candidates = run(attack, module, x, y, ThreatModel(norm="l2", epsilon=1.0))
    with torch.no_grad():
        second = module(x).scatter(1, y[:, None], -torch.inf).argmax(1)[:, None]
        before, after = (module(z).softmax(1).gather(1, second).mean() for z in (x, candidates))
    assert float(after) > float(before)


def test_targets_are_the_runners_up_where_an_attack_aims():
    # Upstream: the attack inside the targeted universal perturbation moves away from the target by default.
    module, x, y = problem()
    with torch.no_grad():
        second = module(x).scatter(1, y[:, None], -torch.inf).argmax(1)
    attack = as_attack("art:TargetedUniversalPerturbation(max_iter=3)")
    threat_model = ThreatModel(norm="linf", epsilon=0.3)
    assert torch.equal(module(run(attack, module, x, y, threat_model)).argmax(1), second)
    one_hot = nn.functional.one_hot(second, 5).numpy()
    host = evasion.TargetedUniversalPerturbation(classifier(module), max_iter=3, eps=0.3)
    missed = [
        int(module(torch.from_numpy(host.generate(x[[i]].numpy(), one_hot[[i]]))).argmax(1)) != second[i]
        for i in range(4)
    ]
    assert any(missed)


def test_layers_keep_no_hooks():
    # Upstream: get_activations leaves a hook behind at each call.
    module, x, y = problem()
    guide = x.flip(0).numpy()
    estimator = classifier(module)
    evasion.FeatureAdversariesPyTorch(estimator, delta=0.1, step_size=0.05, max_iter=2, layer=-1).generate(
        x.numpy(), guide
    )
    leaked = sum(len(part._forward_hooks) for part in module.modules())
    assert leaked > 0
    for part in module.modules():
        part._forward_hooks.clear()
    for layer in ("module", "logits"):
        attack = as_attack(f"art:FeatureAdversariesPyTorch(max_iter=2, layer='{layer}')")
        run(attack, module, x, y, ThreatModel(norm="linf", epsilon=0.1))
        assert sum(len(part._forward_hooks) for part in module.modules()) == 0


def test_no_bars_are_shown(capfd, monkeypatch):
    # Upstream: the attack inside another shows its own.
    module, x, y = problem()
    attack, threat_model = as_attack("art:UniversalPerturbation(max_iter=2)"), ThreatModel(norm="l2", epsilon=1.0)
    run(attack, module, x, y, threat_model)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr("robust_ext.adapters.art.library._silence", lambda part: part)
    run(attack, module, x, y, threat_model)
    assert "DeepFool" in capfd.readouterr().err


def test_several_random_starts_warn_of_nothing():
    # Upstream: PGD hands tensors to numpy, which numpy 2 calls deprecated; warnings are errors here.
    module, x, y = problem()
    threat_model = ThreatModel(norm="linf", epsilon=0.1)
    run(as_attack("art:ProjectedGradientDescent(max_iter=2, num_random_init=2)"), module, x, y, threat_model)


def test_progress_is_shown_again_afterwards():
    import tqdm.auto

    before = tqdm.auto.trange
    guards = importlib.import_module("robust_ext.adapters.art.library")
    with guards.without_bars():
        assert list(tqdm.auto.trange(1, 4)) == [1, 2, 3]
        assert tqdm.auto.trange is not before
    assert tqdm.auto.trange is before


@pytest.mark.parametrize("name", ["ThresholdAttack", "PixelAttack"])
def test_two_classes_are_padded(name):
    # Upstream: with labels and two classes, numbers are taken for columns.
    module, x, y = problem(classes=2)
    with pytest.raises(ValueError, match="binary classification"):
        getattr(evasion, name)(classifier(module, classes=2), th=10, es=1).generate(x.numpy(), y.numpy())
    epsilon = {"ThresholdAttack": ("linf", 0.5), "PixelAttack": ("l1", 10.0)}[name]
    threat_model = ThreatModel(norm=epsilon[0], epsilon=epsilon[1])
    candidates = run(as_attack((getattr(evasion, name), {"max_iter": 5})), module, x, y, threat_model)
    assert bool((module(candidates).argmax(1) != y).any())


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "art:AutoProjectedGradientDescent(max_iter=5, nb_random_init=1, loss_type='difference_logits_ratio')",
            IndexError,
        ),
        ("art:SignOPTAttack(max_iter=2, num_trial=5, k=5)", Exception),
    ],
)
def test_what_compares_three_classes_runs_on_two(text, error):
    # Upstream: the third largest logit, and a class among the others, are taken for granted.
    module, x, y = problem(classes=2)
    attack = as_attack(text)
    given_settings = {**attack.settings, "targeted": False}
    host = attack.made_of(classifier(module, classes=2), verbose=False, **given_settings)
    with seeded_globals(0), pytest.raises(error):
        host.generate(x.numpy(), y.numpy())
    candidates = run(attack, module, x, y, ThreatModel(norm="l2", epsilon=2.0))
    assert bool((module(candidates).argmax(1) != y).any())


@settings(deadline=None, max_examples=50)
@example(epsilon=0.5, values=[0.0, 0.0, 0.0, 0.6196063160896301], grid=False)
@given(
    epsilon=st.floats(2.5 / 255, 0.5),
    values=st.lists(st.floats(0, 1, width=32), min_size=4, max_size=4),
    grid=st.booleans(),
)
def test_thresholds_stay_within_epsilon(epsilon, values, grid):
    x = torch.tensor(values).view(1, 1, 2, 2)
    if grid:
        x = (x * 255).round() / 255
    steps = threshold(AttackContext(inputs=x, threat_model=ThreatModel(norm="linf", epsilon=epsilon)))["th"]
    there = x * 255
    lowest = (there - steps).clamp_min(0).floor()
    assert float((there - lowest).max()) <= epsilon * 255 + 0.002
    # It is the largest that does: one more would leave the ball, or only rounding keeps it in.
    if grid:
        assert steps + 1 > epsilon * 255 - 0.01


@pytest.mark.skipif(importlib.util.find_spec("cv2") is None, reason="GRAPHITE needs cv2")
def test_graphite_ends_where_the_input_passes_for_its_target():
    # Upstream: with an empty mask it goes on for ever.
    module, x, y = problem(classes=3)
    attack = as_attack("art:GRAPHITEWhiteboxPyTorch(num_xforms=2, steps=2, first_steps=3)")
    wrong = (y + 1) % 3
    assert run(attack, module, x, wrong, ThreatModel(norm="l2", epsilon=1.0)).shape == x.shape
