"""The invariants hold for ART's own attacks, and fail where they are broken."""

import sys
from typing import Any

import numpy as np
import pytest
import torch

invariants = pytest.importorskip("robust_ext.testing.art_invariants", reason="ART is not installed")
attacks = pytest.importorskip("robust_ext.adapters.art.attacks", reason="ART is not installed")
art = invariants.art
Base = invariants.ArtAttackInvariants
evasion = art.attacks.evasion
PGD = evasion.projected_gradient_descent.projected_gradient_descent_pytorch.ProjectedGradientDescentPyTorch

UNIT = (0.0, 1.0)


class AsInArt(Base):
    """What no gradient attack of ART keeps to."""

    @pytest.mark.xfail(strict=True, raises=(TypeError, ValueError), reason="ART takes Python's numbers only")
    def test_eps_may_be_a_numpy_number(self):
        super().test_eps_may_be_a_numpy_number()

    @pytest.mark.xfail(strict=True, raises=AssertionError, reason="ART leaves gradients in the weights")
    def test_weights_and_their_gradients_are_left_as_they_were(self):
        super().test_weights_and_their_gradients_are_left_as_they_were()

    @pytest.mark.xfail(strict=True, raises=AssertionError, reason="ART leaves networks in eval mode")
    def test_the_mode_of_the_network_is_kept(self):
        super().test_the_mode_of_the_network_is_kept()


class TestLinfPGD(AsInArt):
    def make_attack(self, estimator, **settings):
        return PGD(estimator, **{"max_iter": 10, "eps_step": 0.05, **settings})


class TestL2PGD(AsInArt):
    norm = 2

    def make_attack(self, estimator, **settings):
        return PGD(estimator, **{"norm": 2, "max_iter": 10, "eps_step": 0.2, **settings})


class TestAPGD(AsInArt):
    repeatable = None

    def make_attack(self, estimator, **settings):
        return evasion.AutoProjectedGradientDescent(estimator, **{"max_iter": 10, "eps_step": 0.05, **settings})


def broken(generate, base=PGD):
    """An attack with another ``generate``, a function of the attack, inputs, labels and the sound ``generate``."""

    class Broken(base):
        def generate(self, x, y=None, **kwargs):
            return generate(self, x, y, super().generate)

    return Broken


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


def passes_by_preprocessing(attack, x, y, run):
    attack._estimator = invariants.art.estimators.classification.PyTorchClassifier(
        model=attack.estimator.model,
        loss=torch.nn.CrossEntropyLoss(),
        input_shape=attack.estimator.input_shape,
        nb_classes=attack.estimator.nb_classes,
        clip_values=(0, 1),
        device_type="cpu",
    )
    return run(x, y)


def after(change):
    """A ``generate`` that does something to the attack or the inputs first."""

    def generate(attack, x, y, run):
        change(attack, x)
        return run(x, y)

    return generate


def zeros(x):
    return np.zeros(len(x), dtype=np.int64)


ChangesInputs, ChangesLabels = broken(changes_inputs), broken(changes_labels)
ReturnsTheInputs = broken(lambda attack, x, y, run: x)
LeavesTheBall = broken(
    lambda attack, x, y, run: np.clip(x + 2 * (run(x, y) - x), *attack.estimator.clip_values).astype(np.float32)
)
LeavesTheBounds = broken(lambda attack, x, y, run: (x + attack.eps).astype(np.float32))
ForgetsTheType = broken(lambda attack, x, y, run: run(x, y).astype(np.float64))
IgnoresTargets = broken(ignores_targets)
ReadsOneHotAsZeros = broken(lambda attack, x, y, run: run(x, zeros(x) if y is not None and y.ndim == 2 else y))
ReadsNoneAsZeros = broken(lambda attack, x, y, run: run(x, zeros(x) if y is None else y))
ScalesWithTheBatch = broken(lambda attack, x, y, run: x + (run(x, y) - x) * np.float32(min(1, attack.batch_size / 8)))
SqueezesOneRow = broken(lambda attack, x, y, run: run(x, y)[0] if len(x) == 1 else run(x, y))
SeedsItself = broken(
    lambda attack, x, y, run: x + (run(x, y) - x) * np.random.default_rng().random(x.shape, dtype=np.float32)
)
KeepsTwoClasses = broken(lambda attack, x, y, run: x.copy() if attack.estimator.nb_classes == 2 else run(x, y))
PassesByPreprocessing = broken(passes_by_preprocessing)
ReportsNothing = broken(after(lambda attack, x: setattr(attack, "_summary_writer", None)))
AlwaysShows = broken(after(lambda attack, x: sys.stderr.write("working")))
NeverShows = broken(after(lambda attack, x: setattr(attack, "verbose", False)))
WipesGradients = broken(after(lambda attack, x: attack.estimator.model.zero_grad()), attacks.APGD)
Evaluates = broken(after(lambda attack, x: attack.estimator.model.eval()), attacks.APGD)
UpdatesStatistics = broken(after(lambda attack, x: attack.estimator.model(torch.from_numpy(x))), attacks.APGD)


class ReportsTheWrongBatch(PGD):
    def _generate_batch(self, **kwargs):
        self._batch_id = 0
        return super()._generate_batch(**kwargs)


class ChecksNothing(PGD):
    def __init__(self, estimator, **settings):
        super().__init__(estimator, **{**settings, "eps": 0.1, "norm": 2, "batch_size": 1, "targeted": False})


class SetsWithoutChecks(PGD):
    def _check_params(self): ...


class HidesSettings(PGD):
    attack_params: Any = ("norm", "eps", "eps_step")


class RequiresNothing(PGD):
    _estimator_requirements: Any = ()


def make(attack_class, estimator, settings):
    if issubclass(attack_class, attacks.APGD):
        return attack_class(estimator, **{"max_iter": 5, **settings})
    return attack_class(estimator, **{"max_iter": 10, "eps_step": 0.05, **settings})


# An invariant, its arguments and the attacks that break it.
BROKEN = [
    ("inputs_and_labels_are_not_changed", (), [ChangesInputs, ReturnsTheInputs, ChangesLabels]),
    ("points_are_float32_in_the_ball_and_in_bounds", (UNIT,), [LeavesTheBall, LeavesTheBounds, ForgetsTheType]),
    ("points_lower_the_margin_of_the_label", (UNIT,), [ReturnsTheInputs]),
    ("targeted_points_go_to_their_targets", (UNIT,), [IgnoresTargets]),
    ("targeted_attacks_need_labels", (), [IgnoresTargets]),
    ("labels_may_be_one_hot_or_indices", (), [ReadsOneHotAsZeros]),
    ("without_labels_predictions_are_used", (), [ReadsNoneAsZeros]),
    ("the_batch_size_decides_nothing", (), [ScalesWithTheBatch]),
    ("one_row_is_a_batch", (), [SqueezesOneRow]),
    ("the_same_numpy_seed_gives_the_same_points", (), [SeedsItself]),
    ("two_classes_are_enough", (), [KeepsTwoClasses]),
    ("preprocessing_of_the_estimator_is_attacked_through", (), [PassesByPreprocessing]),
    ("the_summary_writer_is_updated", (), [ReportsNothing, ReportsTheWrongBatch]),
    ("the_progress_bar_follows_verbose", (), [AlwaysShows, NeverShows]),
    ("wrong_settings_raise", (), [ChecksNothing]),
    ("set_params_sets_and_checks", (), [SetsWithoutChecks]),
    ("attack_params_are_the_parameters_of_the_constructor", (), [HidesSettings]),
    ("estimators_that_are_no_classifiers_are_refused", (), [RequiresNothing]),
    ("weights_and_their_gradients_are_left_as_they_were", (), [WipesGradients]),
    ("the_mode_of_the_network_is_kept", (), [Evaluates]),
    ("a_network_that_trains_is_attacked_in_eval_mode", (), [UpdatesStatistics]),
]


@pytest.mark.parametrize(
    ("attack_class", "invariant", "arguments"),
    [(attack_class, *case) for *case, broken_ones in BROKEN for attack_class in broken_ones],
)
def test_a_broken_attack_is_found(attack_class, invariant, arguments):
    class Broken(Base):
        def make_attack(self, estimator, **settings):
            return make(attack_class, estimator, settings)

    class Sound(Base):
        def make_attack(self, estimator, **settings):
            return make(attack_class.__base__, estimator, settings)

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(Broken(), f"test_{invariant}")(*arguments)
    getattr(Sound(), f"test_{invariant}")(*arguments)
