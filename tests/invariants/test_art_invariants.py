"""The invariants hold for ART's own attacks, and fail where they are broken."""

import sys

import numpy as np
import pytest
import torch

invariants = pytest.importorskip("robust_ext.testing.art_invariants", reason="ART is not installed")
APGD = pytest.importorskip("robust_ext.adapters.art.attacks", reason="ART is not installed").APGD
art, Base = invariants.art, invariants.ArtAttackInvariants
evasion = art.attacks.evasion
PGD = evasion.projected_gradient_descent.projected_gradient_descent_pytorch.ProjectedGradientDescentPyTorch


class TestL2PGD(Base):
    norm = 2

    def make_attack(self, estimator, **settings):
        return PGD(estimator, **{"norm": 2, "max_iter": 10, "eps_step": 0.2, **settings})

    # What no gradient attack of ART keeps to.
    @pytest.mark.xfail(strict=True, raises=(TypeError, ValueError), reason="ART takes Python's numbers only")
    def test_eps_may_be_a_numpy_number(self):
        super().test_eps_may_be_a_numpy_number()

    @pytest.mark.xfail(strict=True, raises=AssertionError, reason="ART leaves gradients in the weights")
    def test_weights_and_their_gradients_are_left_as_they_were(self):
        super().test_weights_and_their_gradients_are_left_as_they_were()

    @pytest.mark.xfail(strict=True, raises=AssertionError, reason="ART leaves networks in eval mode")
    def test_the_mode_of_the_network_is_kept(self):
        super().test_the_mode_of_the_network_is_kept()


def broken(generate, base=PGD):
    """An attack with another ``generate``, a function of the attack, inputs, labels and the sound ``generate``."""

    class Broken(base):
        def generate(self, x, y=None, **kwargs):
            return generate(self, x, y, super().generate)

    return Broken


def after(change, base=PGD):
    """An attack that does something to itself or with the inputs first."""
    return broken(lambda attack, x, y, run: (change(attack, x), run(x, y))[1], base)


def having(**members):
    return type("Broken", (PGD,), members)


def changes_inputs(attack, x, y, run):
    x[...] = run(x, y)
    return x.copy()


def changes_labels(attack, x, y, run):
    out = run(x, y)
    y *= 2
    return out


def ignores_targets(attack, x, y, run):
    attack.targeted = False
    return run(x)


def moved(points, x, size):
    return x + (points - x) * np.asarray(size, dtype=np.float32)


def zeros(x):
    return np.zeros(len(x), dtype=np.int64)


def without_preprocessing(attack, x):
    old = attack.estimator
    given = {"input_shape": old.input_shape, "nb_classes": old.nb_classes, "clip_values": (0, 1), "device_type": "cpu"}
    made = art.estimators.classification.PyTorchClassifier
    attack._estimator = made(model=old.model, loss=torch.nn.CrossEntropyLoss(), **given)


def wrong_batch(attack, **kwargs):
    attack._batch_id = 0
    return PGD._generate_batch(attack, **kwargs)


def checks_nothing(attack, estimator, **settings):
    PGD.__init__(attack, estimator, **{**settings, "eps": 0.1, "norm": 2, "batch_size": 1, "targeted": False})


ReturnsTheInputs, IgnoresTargets = broken(lambda a, x, y, run: x), broken(ignores_targets)
LeavesTheBall = broken(lambda a, x, y, run: np.clip(moved(run(x, y), x, 2), *a.estimator.clip_values))
LeavesTheBounds = broken(lambda a, x, y, run: (x + a.eps).astype(np.float32))
ForgetsTheType = broken(lambda a, x, y, run: run(x, y).astype(np.float64))
ReadsOneHotAsZeros = broken(lambda a, x, y, run: run(x, zeros(x) if y is not None and y.ndim == 2 else y))
SeedsItself = broken(lambda a, x, y, run: moved(run(x, y), x, np.random.default_rng().random(x.shape)))
KeepsTwoClasses = broken(lambda a, x, y, run: x.copy() if a.estimator.nb_classes == 2 else run(x, y))
UpdatesStatistics = after(lambda a, x: a.estimator.model(torch.from_numpy(x)), APGD)
AlwaysShows = after(lambda a, x: sys.stderr.write("working"))
NeverShows = after(lambda a, x: setattr(a, "verbose", False))
ReportsNothing = after(lambda a, x: setattr(a, "_summary_writer", None))
BROKEN = {
    "inputs_and_labels_are_not_changed": [broken(changes_inputs), ReturnsTheInputs, broken(changes_labels)],
    "points_are_float32_in_the_ball_and_in_bounds": [LeavesTheBall, LeavesTheBounds, ForgetsTheType],
    "points_lower_the_margin_of_the_label": [ReturnsTheInputs],
    "targeted_points_go_to_their_targets": [IgnoresTargets],
    "targeted_attacks_need_labels": [IgnoresTargets],
    "labels_may_be_one_hot_or_indices": [ReadsOneHotAsZeros],
    "without_labels_predictions_are_used": [broken(lambda a, x, y, run: run(x, zeros(x) if y is None else y))],
    "the_batch_size_decides_nothing": [broken(lambda a, x, y, run: moved(run(x, y), x, min(1, a.batch_size / 8)))],
    "one_row_is_a_batch": [broken(lambda a, x, y, run: run(x, y)[0] if len(x) == 1 else run(x, y))],
    "the_same_numpy_seed_gives_the_same_points": [SeedsItself],
    "two_classes_are_enough": [KeepsTwoClasses],
    "preprocessing_of_the_estimator_is_attacked_through": [after(without_preprocessing)],
    "the_summary_writer_is_updated": [ReportsNothing, having(_generate_batch=wrong_batch)],
    "the_progress_bar_follows_verbose": [AlwaysShows, NeverShows],
    "wrong_settings_raise": [having(__init__=checks_nothing)],
    "set_params_sets_and_checks": [having(_check_params=lambda attack: None)],
    "attack_params_are_the_parameters_of_the_constructor": [having(attack_params=("norm", "eps", "eps_step"))],
    "estimators_that_are_no_classifiers_are_refused": [having(_estimator_requirements=())],
    "weights_and_their_gradients_are_left_as_they_were": [after(lambda a, x: a.estimator.model.zero_grad(), APGD)],
    "the_mode_of_the_network_is_kept": [after(lambda a, x: a.estimator.model.eval(), APGD)],
    "a_network_that_trains_is_attacked_in_eval_mode": [UpdatesStatistics],
}
"""Invariants, and attacks that break them."""


class Judged(Base):
    def __init__(self, attack_class):
        self.attack_class = attack_class

    def make_attack(self, estimator, **settings):
        own = {"max_iter": 5} if issubclass(self.attack_class, APGD) else {"max_iter": 10, "eps_step": 0.05}
        return self.attack_class(estimator, **{**own, **settings})


@pytest.mark.parametrize(("invariant", "attack"), [(name, one) for name, several in BROKEN.items() for one in several])
def test_a_broken_attack_is_found(invariant, attack):
    arguments = ((0.0, 1.0),) if "points_" in invariant and "same" not in invariant else ()
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(Judged(attack), f"test_{invariant}")(*arguments)
    getattr(Judged(attack.__base__), f"test_{invariant}")(*arguments)
