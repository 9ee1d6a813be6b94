"""ART's attacks and classifiers, and what ART 1.20 does wrong: float64, two classes, bounds, numpy 2, hooks, files."""

import importlib
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from robust_ext import ThreatModel, as_attack, as_module, robust_accuracy
from robust_ext.core.random import seeded_globals
from tests.adapters import common
from tests.adapters.common import UNIT, Recorder, art_classifier, conv_network, predicted, require, uniform

art = require("art")
evasion = art.attacks.evasion
adapted_settings = importlib.import_module("robust_ext.adapters.art.settings")
SHAPE = (1, 8, 8)
NETWORK, X = conv_network(SHAPE), uniform(6, SHAPE)
Y = predicted(NETWORK, X)
LINF = ThreatModel(norm="linf", epsilon=0.1)


def run(attack, module, x, y, norm="l2", epsilon=1.0, *, bounds=UNIT, direct=False):
    with torch.no_grad():
        classes = module(x[:1]).shape[1]
    threat_model = ThreatModel(norm=norm, epsilon=epsilon, bounds=bounds)
    return common.run(as_attack(attack), module, x, y, threat_model, classes=classes, direct=direct)


def classifier(module=NETWORK, **settings):
    return art_classifier(module, SHAPE, **settings)


@pytest.mark.parametrize("bounds", [UNIT, (-1.0, 1.0)])
def test_a_laser_moves_images_and_only_adds_light(bounds):
    # Upstream: on numpy 2 no beam moves; the sum is clipped to [0, 1].
    module, x = common.network_in(bounds, (3, 8, 8)), uniform(4, (3, 8, 8), bounds)
    text = "art:LaserAttack(iterations=30)"
    candidates = run(text, module, x, predicted(module, x), epsilon=2.0, bounds=bounds)
    changed = (candidates != x).flatten(1).any(1)
    assert bool(changed.any())
    assert bool((candidates >= x - 1e-6).all())
    assert float(candidates[changed].min()) < bounds[0] + 0.5


def test_geoda_keeps_off_the_current_folder_and_ends_without_a_point_to_begin_at(tmp_path, monkeypatch):
    # Upstream: np.mat is gone in numpy 2, the basis is written to the current folder and read from there, and noise is
    # drawn until some is misclassified.
    monkeypatch.chdir(tmp_path)
    text = "art:GeoDA(max_iter=500, sub_dim=4)"
    candidates = run(text, NETWORK, X, Y)
    assert list(tmp_path.iterdir()) == []
    np.save(tmp_path / "2d_dct_basis_4_8.npy", np.zeros((64, 16)))
    assert torch.equal(run(text, NETWORK, X, Y), candidates)
    assert not hasattr(np, "mat")
    constant = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).eval()
    nn.init.zeros_(constant[1].weight)
    assert torch.equal(run(text, constant, X, predicted(constant, X)), X)


def test_patches_and_targeted_perturbations_go_to_other_classes():
    with torch.no_grad():
        second = NETWORK(X).scatter(1, Y[:, None], -torch.inf).argmax(1)
    # Upstream: a numpy float32 among the clip values is taken for a patch, and there is none yet.
    candidates = run("art:AdversarialPatchNumpy(max_iter=30, scale_min=0.8, scale_max=0.9)", NETWORK, X, Y)
    before, after = (NETWORK(z).softmax(1).gather(1, second[:, None]).mean() for z in (X, candidates))
    assert bool(after > before)
    # Upstream: the attack inside the targeted universal perturbation moves away from the target.
    candidates = run("art:TargetedUniversalPerturbation(max_iter=3)", NETWORK, X, Y, "linf", 0.3)
    assert torch.equal(predicted(NETWORK, candidates), second)


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
    assert float((there - (there - steps).clamp_min(0).floor()).max()) <= epsilon * 255 + 0.002
    # It is the largest that does: one more would leave the ball, or only rounding keeps it in.
    if grid:
        assert steps + 1 > epsilon * 255 - 0.01


def test_graphite_ends_where_the_input_passes_for_its_target():
    # Upstream: with an empty mask it goes on for ever.
    pytest.importorskip("cv2")
    assert run("art:GRAPHITEWhiteboxPyTorch(num_xforms=2, steps=2, first_steps=3)", NETWORK, X, 4 - Y).shape == X.shape


def test_probes_at_construction_reach_no_network():
    module = Recorder(NETWORK).eval()
    attack = as_attack("art:AutoProjectedGradientDescent(max_iter=3, nb_random_init=1, loss_type='cross_entropy')")
    attack._make(common.target_of(module, SHAPE), adapted_settings.AttackContext(inputs=X, threat_model=LINF))
    assert module.sizes == []
    run(attack, module, X, Y, "linf", 0.1, direct=True)
    assert module.sizes[1] == 6
    assert as_attack(evasion.AutoAttack(classifier(module), eps=0.2)).settings == {"eps": 0.2}


def test_steps_follow_epsilon_and_the_bounds_where_they_are_left_out():
    for text, epsilon, bounds, expected in (
        ("ProjectedGradientDescent", 0.3, UNIT, 0.1),
        ("ProjectedGradientDescent", 0.05, UNIT, 0.005),
        ("ProjectedGradientDescent(max_iter=5)", 0.05, UNIT, 0.025),
        ("ProjectedGradientDescent(eps_step=0.7)", 50.0, (0.0, 255.0), 0.7),
        ("ProjectedGradientDescent", 50.0, (0.0, 255.0), 25.5),
        ("AutoProjectedGradientDescent", 8.0, (0.0, 255.0), 8.0),
        ("FastGradientMethod", 0.05, UNIT, 0.005),
    ):
        threat_model = ThreatModel(norm="linf", epsilon=epsilon, bounds=bounds)
        scene = adapted_settings.AttackContext(inputs=uniform(6, SHAPE, bounds), threat_model=threat_model)
        assert as_attack(f"art:{text}")._completed(scene)["eps_step"] == pytest.approx(expected), text


def test_defences_in_pytorch_are_kept_where_they_are_for_predictions():
    class Halving(art.defences.preprocessor.preprocessor.PreprocessorPyTorch):
        def forward(self, x, y=None):
            return x / 2, y

    defences = [Halving(device_type="cpu"), Halving(device_type="cpu", apply_predict=False)]
    torch.testing.assert_close(as_module(classifier(preprocessing_defences=defences)).module(X), NETWORK(X / 2))


def test_a_freshly_fitted_classifier_in_train_mode_is_measured_as_it_predicts_and_stays_in_it():
    inner = nn.Sequential(nn.BatchNorm2d(1), conv_network(SHAPE), nn.Dropout(0.5)).train()
    fitted = classifier(inner, optimizer=torch.optim.SGD(inner.parameters(), lr=0.1))
    fitted.fit(X.numpy(), Y.numpy(), batch_size=3, nb_epochs=1)
    found = robust_accuracy(fitted, "robust_ext:APGD(steps=2)", X.numpy(), np.eye(5)[Y.numpy()], LINF)
    adapted = as_module(fitted).module
    assert inner.training
    expected = torch.from_numpy(fitted.predict(X.numpy()))
    torch.testing.assert_close(adapted(X).detach(), expected)
    assert found.content["clean_accuracy"] == float((expected.argmax(1) == Y).double().mean())


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_hopskipjump_equals_art_in_the_norm_of_the_threat_model(norm, monkeypatch):
    x, y = X[:1], Y[:1]
    settings = {"max_iter": 2, "max_eval": 20, "init_eval": 5}
    attack = as_attack((evasion.HopSkipJump, settings))
    # Called directly, ART seeds its own generators from the system; these stand in for them.
    states = iter(range(1000))
    original = np.random.RandomState
    monkeypatch.setattr(np.random, "RandomState", lambda: original(next(states)))
    # HopSkipJump sends float64 on numpy 2, which this network takes.
    theirs = classifier(common.Stretched(NETWORK, UNIT))
    with seeded_globals(common.drawn_seed()):
        own = evasion.HopSkipJump(theirs, norm=np.inf if norm == "linf" else 2, verbose=False, **settings)
        expected = torch.from_numpy(own.generate(x.numpy(), y.numpy()))
    states = iter(range(1000))
    monkeypatch.setattr("robust_ext.adapters.art.attack.seeded_states", nullcontext)
    assert torch.equal(run(attack, NETWORK, x, y, norm, 0.1, direct=True), expected)
    assert int(predicted(NETWORK, expected)) != int(y)
