"""What ART 1.20 does wrong harms no candidate: float64, two classes, bounds, numpy 2, hooks, files."""

import importlib
import importlib.util

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from robust_ext import ThreatModel, as_attack
from tests.adapters import common
from tests.adapters.common import UNIT, network_in, predicted, require, uniform

art = require("art")
adapted_settings = importlib.import_module("robust_ext.adapters.art.settings")


def problem(classes=5, channels=1, bounds=UNIT):
    """A network, four images, and what it predicts for them."""
    module, x = network_in(bounds, (channels, 8, 8), classes), uniform(4, (channels, 8, 8), bounds)
    return module, x, predicted(module, x)


def run(attack, module, x, y, norm="l2", epsilon=1.0, *, bounds=UNIT, seed=3):
    with torch.no_grad():
        classes = module(x[:1]).shape[1]
    threat_model, attack = ThreatModel(norm=norm, epsilon=epsilon, bounds=bounds), as_attack(attack)
    return common.run(attack, module, x, y, threat_model, classes=classes, seed=seed, direct=False)


@pytest.mark.parametrize(
    "name", ["AutoProjectedGradientDescent", "AutoConjugateGradient", "RescalingAutoConjugateGradient"]
)
def test_random_starts_do_not_pass_for_tries(name):
    # Upstream: for rows that do not succeed, the last random start comes back.
    module, x, y = problem()
    assert torch.equal(run(f"art:{name}(max_iter=3, nb_random_init=1)", module, x, y, "linf", 1e-3), x)


@pytest.mark.parametrize("bounds", [UNIT, (-1.0, 1.0)])
def test_a_laser_moves_images_and_only_adds_light(bounds):
    # Upstream: on numpy 2 no beam moves; the sum is clipped to [0, 1].
    module, x, y = problem(channels=3, bounds=bounds)
    candidates = run("art:LaserAttack(iterations=30)", module, x, y, epsilon=2.0, bounds=bounds)
    changed = (candidates != x).flatten(1).any(1)
    assert bool(changed.any())
    assert bool((candidates >= x - 1e-6).all())
    assert float(candidates[changed].min()) < bounds[0] + 0.5


def test_geoda_keeps_off_the_current_folder_and_ends_without_a_point_to_begin_at(tmp_path, monkeypatch):
    # Upstream: np.mat is gone in numpy 2, the basis is written to the current folder and read from there, and noise is
    # drawn until some is misclassified.
    module, x, y = problem()
    monkeypatch.chdir(tmp_path)
    text = "art:GeoDA(max_iter=500, sub_dim=4)"
    candidates = run(text, module, x, y)
    assert list(tmp_path.iterdir()) == []
    np.save(tmp_path / "2d_dct_basis_4_8.npy", np.zeros((64, 16)))
    assert torch.equal(run(text, module, x, y), candidates)
    assert not hasattr(np, "mat")
    constant = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).eval()
    nn.init.zeros_(constant[1].weight)
    assert torch.equal(run(text, constant, x, predicted(constant, x)), x)


def test_the_numpy_patch_makes_other_classes_likelier():
    # Upstream: a numpy float32 among the clip values is taken for a patch, and there is none yet.
    module, x, y = problem()
    candidates = run("art:AdversarialPatchNumpy(max_iter=30, scale_min=0.8, scale_max=0.9)", module, x, y)
    with torch.no_grad():
        second = module(x).scatter(1, y[:, None], -torch.inf).argmax(1)[:, None]
        before, after = (module(z).softmax(1).gather(1, second).mean() for z in (x, candidates))
    assert float(after) > float(before)


def test_targets_are_the_runners_up_where_an_attack_aims():
    # Upstream: the attack inside the targeted universal perturbation moves away from the target.
    module, x, y = problem()
    second = module(x).scatter(1, y[:, None], -torch.inf).argmax(1)
    candidates = run("art:TargetedUniversalPerturbation(max_iter=3)", module, x, y, "linf", 0.3)
    assert torch.equal(predicted(module, candidates), second)


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
    scene = adapted_settings.AttackContext(inputs=x, threat_model=ThreatModel(norm="linf", epsilon=epsilon))
    steps = adapted_settings.threshold(scene)["th"]
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
    text = "art:GRAPHITEWhiteboxPyTorch(num_xforms=2, steps=2, first_steps=3)"
    assert run(text, module, x, (y + 1) % 3).shape == x.shape
