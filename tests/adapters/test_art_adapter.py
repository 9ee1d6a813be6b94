import importlib
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from robust_ext import ThreatModel, as_attack, as_module, robust_accuracy
from robust_ext.core.random import seeded_globals
from tests.adapters import common
from tests.adapters.common import (
    UNIT,
    Recorder,
    Stretched,
    art_classifier,
    conv_network,
    drawn_seed,
    predicted,
    require,
    target_of,
    uniform,
)

art = require("art")
evasion = art.attacks.evasion
preprocessors = art.defences.preprocessor
AttackContext = importlib.import_module("robust_ext.adapters.art.settings").AttackContext
SHAPE = (1, 10, 10)


def network(classes=5):
    return conv_network(SHAPE, classes)


def batch(bounds=UNIT, classes=5):
    x = uniform(6, SHAPE, bounds)
    return x, predicted(network(classes), x)


X, Y = batch()
LINF = ThreatModel(norm="linf", epsilon=0.1)


def run(attack, x, y, threat_model, module=None, classes=5):
    return common.run(attack, module or network(classes), x, y, threat_model, classes=classes)


def classifier(module=None, **settings):
    return art_classifier(network() if module is None else module, SHAPE, **settings)


def host(name, x, y, bounds, settings):
    """What ART returns, of a network that takes float64 too, which HopSkipJump sends on numpy 2."""
    with seeded_globals(drawn_seed()):
        attack = getattr(evasion, name)(classifier(Stretched(network(), UNIT), clip_values=bounds), **settings)
        return torch.from_numpy(attack.generate(x.numpy(), y.numpy()))


def test_probes_at_construction_do_not_reach_the_target():
    module = Recorder(network()).eval()
    attack = as_attack("art:AutoProjectedGradientDescent(max_iter=3, nb_random_init=1, loss_type='cross_entropy')")
    attack._make(target_of(module, SHAPE), AttackContext(inputs=X, threat_model=LINF))
    assert module.sizes == []
    run(attack, X, Y, LINF, module=module)
    assert module.sizes[0] == 6


def test_objects_do_not_drag_their_old_estimator_along():
    other = Recorder(network()).eval()
    square = evasion.SquareAttack(classifier(other), max_iter=5, verbose=False)
    run(as_attack(square), X, Y, LINF)
    assert other.sizes == []
    assert as_attack(square).settings == {"max_iter": 5, "verbose": False}
    auto = evasion.AutoAttack(classifier(other), eps=0.2)
    other.queries.clear()
    assert as_attack(auto).settings == {"eps": 0.2}


def test_steps_follow_epsilon_and_the_bounds_where_they_are_left_out():
    def step(text, epsilon, bounds=UNIT):
        x, _ = batch(bounds)
        scene = AttackContext(inputs=x, threat_model=ThreatModel(norm="linf", epsilon=epsilon, bounds=bounds))
        return as_attack(text)._completed(scene)["eps_step"]

    assert step("art:ProjectedGradientDescent", 0.3) == 0.1
    assert step("art:ProjectedGradientDescent", 0.05) == pytest.approx(0.005)
    assert step("art:ProjectedGradientDescent(max_iter=5)", 0.05) == pytest.approx(0.025)
    assert step("art:ProjectedGradientDescent(eps_step=0.7)", 0.05) == 0.7
    assert step("art:ProjectedGradientDescent(eps_step=0.7)", 50.0, (0.0, 255.0)) == 0.7
    assert step("art:ProjectedGradientDescent", 50.0, (0.0, 255.0)) == pytest.approx(25.5)
    assert step("art:AutoProjectedGradientDescent", 0.05) == 0.05
    assert step("art:AutoProjectedGradientDescent", 8.0, (0.0, 255.0)) == 8.0
    assert step("art:FastGradientMethod", 0.05) == pytest.approx(0.005)


def test_attacks_of_others_go_one_row_at_a_time():
    class Mine(evasion.FastGradientMethod):
        pass

    attack = as_attack(Mine)
    assert attack.traits.batching == "single"
    expected = host("FastGradientMethod", X, Y, UNIT, {"eps": 0.1})
    assert torch.equal(run(attack, X, Y, LINF), expected)


def test_defences_in_pytorch_are_kept():
    class Halving(preprocessors.preprocessor.PreprocessorPyTorch):
        def forward(self, x, y=None):
            return x / 2, y

    class FitOnly(Halving):
        def forward(self, x, y=None):
            raise AssertionError("it is for training only")

    inner = network()
    defences = [Halving(device_type="cpu"), FitOnly(device_type="cpu", apply_predict=False)]
    model = classifier(inner, preprocessing_defences=defences)
    x = X
    out = as_module(model).module(x)
    torch.testing.assert_close(out, inner(x / 2))
    np.testing.assert_allclose(out.detach().numpy(), model.predict(x.numpy()), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(out, inner(x))


def test_a_freshly_fitted_classifier_in_train_mode_is_measured_as_it_predicts_and_stays_in_it():
    inner = torch.nn.Sequential(torch.nn.BatchNorm2d(1), network(), torch.nn.Dropout(0.5)).train()
    fitted = art.estimators.classification.PyTorchClassifier(
        inner,
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(inner.parameters(), lr=0.1),
        input_shape=SHAPE,
        nb_classes=5,
        clip_values=UNIT,
    )
    fitted.fit(X.numpy(), Y.numpy(), batch_size=3, nb_epochs=1)
    assert inner.training
    found = robust_accuracy(fitted, "robust_ext:APGD(steps=2)", X.numpy(), np.eye(5)[Y.numpy()], LINF)
    adapted = as_module(fitted).module
    assert inner.training
    expected = fitted.predict(X.numpy())
    np.testing.assert_allclose(adapted(X).detach().numpy(), expected, rtol=1e-5, atol=1e-6)
    assert found.content["clean_accuracy"] == float((expected.argmax(1) == Y.numpy()).mean())


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_hopskipjump_equals_art_in_the_norm_of_the_threat_model(norm, monkeypatch):
    x, y = X[:1], Y[:1]
    settings = {"max_iter": 2, "max_eval": 20, "init_eval": 5}
    attack = as_attack((evasion.HopSkipJump, settings))
    # Called directly, ART seeds its own generators from the system; these stand in for them.
    states = iter(range(1000))
    original = np.random.RandomState
    monkeypatch.setattr(np.random, "RandomState", lambda: original(next(states)))
    order = np.inf if norm == "linf" else 2
    expected = host("HopSkipJump", x, y, (0.0, 1.0), {**settings, "norm": order, "verbose": False})
    states = iter(range(1000))
    monkeypatch.setattr("robust_ext.adapters.art.attack.seeded_states", nullcontext)
    candidates = run(attack, x, y, ThreatModel(norm=norm, epsilon=0.1))
    assert torch.equal(candidates, expected)
    assert (attack.traits.batching, attack.traits.gradients) == ("single", False)
    assert int(network()(candidates).argmax(1)) != int(y)


def test_ordered_attacks_ask_for_whole_batches_only():
    x, y = X.repeat(7, 1, 1, 1), Y.repeat(7)
    for text in ("ProjectedGradientDescent(max_iter=3, batch_size=2)", "DeepFool(max_iter=3)", "FastGradientMethod"):
        module, attack = Recorder(network()).eval(), as_attack(f"art:{text}")
        run(attack, x, y, ThreatModel(norm=attack.traits.norms[-1], epsilon=0.5), module=module)
        assert attack.traits.batching == "full"
        assert set(module.sizes) == {len(x)}, text
