"""The invariants hold for ART's own attacks, and fail where they are broken."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

invariants = pytest.importorskip("robust_ext.testing.art_invariants", reason="ART is not installed")
attacks = pytest.importorskip("robust_ext.adapters.art.attacks", reason="ART is not installed")
art = invariants.art
Base: Any = invariants.ArtAttackInvariants
evasion: Any = art.attacks.evasion
PGD: Any = evasion.projected_gradient_descent.projected_gradient_descent_pytorch.ProjectedGradientDescentPyTorch

UNIT = (0.0, 1.0)


class AsInArt(Base):
    """What no gradient attack of ART keeps to."""

    @pytest.mark.xfail(strict=True, raises=(TypeError, ValueError), reason="ART takes Python's numbers only")
    def test_eps_may_be_a_numpy_number(self) -> None:
        super().test_eps_may_be_a_numpy_number()

    @pytest.mark.xfail(strict=True, raises=AssertionError, reason="ART leaves gradients in the weights")
    def test_weights_and_their_gradients_are_left_as_they_were(self) -> None:
        super().test_weights_and_their_gradients_are_left_as_they_were()

    @pytest.mark.xfail(strict=True, raises=AssertionError, reason="ART leaves networks in eval mode")
    def test_the_mode_of_the_network_is_kept(self) -> None:
        super().test_the_mode_of_the_network_is_kept()


class TestLinfPGD(AsInArt):
    def make_attack(self, estimator: Any, **settings: Any) -> Any:
        return PGD(estimator, **{"max_iter": 10, "eps_step": 0.05, **settings})


class TestL2PGD(AsInArt):
    norm = 2

    def make_attack(self, estimator: Any, **settings: Any) -> Any:
        return PGD(estimator, **{"norm": 2, "max_iter": 10, "eps_step": 0.2, **settings})


class TestAPGD(AsInArt):
    repeatable = None

    def make_attack(self, estimator: Any, **settings: Any) -> Any:
        return evasion.AutoProjectedGradientDescent(estimator, **{"max_iter": 10, "eps_step": 0.05, **settings})


class ChangesInputs(PGD):
    def generate(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
        x[...] = super().generate(x, y)
        return x.copy()


class ReturnsTheInputs(PGD):
    def generate(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
        return x


class ChangesLabels(PGD):
    def generate(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
        out = super().generate(x, y)
        y *= 2
        return out


class LeavesTheBall(PGD):
    def generate(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
        return np.clip(x + 2 * (super().generate(x, y) - x), *self.estimator.clip_values).astype(np.float32)


class LeavesTheBounds(PGD):
    def generate(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
        return (x + self.eps).astype(np.float32)


class ForgetsTheType(PGD):
    def generate(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
        return super().generate(x, y).astype(np.float64)


class IgnoresTargets(PGD):
    def generate(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
        self.targeted = False
        return super().generate(x)


class ReadsOneHotAsZeros(PGD):
    def generate(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
        return super().generate(x, np.zeros(len(x), dtype=np.int64) if y is not None and y.ndim == 2 else y)


class ReadsNoneAsZeros(PGD):
    def generate(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
        return super().generate(x, np.zeros(len(x), dtype=np.int64) if y is None else y)


class ScalesWithTheBatch(PGD):
    def generate(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
        return x + (super().generate(x, y) - x) * np.float32(min(1, self.batch_size / 8))


class SqueezesOneRow(PGD):
    def generate(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
        out = super().generate(x, y)
        return out[0] if len(out) == 1 else out


class SeedsItself(PGD):
    def generate(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
        noise = np.random.default_rng().random(x.shape, dtype=np.float32)
        return x + (super().generate(x, y) - x) * noise


class KeepsTwoClasses(PGD):
    def generate(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
        return x.copy() if self.estimator.nb_classes == 2 else super().generate(x, y)


class PassesByPreprocessing(PGD):
    def generate(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
        self._estimator = invariants.PyTorchClassifier(
            model=self.estimator.model,
            loss=torch.nn.CrossEntropyLoss(),
            input_shape=self.estimator.input_shape,
            nb_classes=self.estimator.nb_classes,
            clip_values=(0, 1),
            device_type="cpu",
        )
        return super().generate(x, y)


class ReportsNothing(PGD):
    def generate(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
        self._summary_writer = None
        return super().generate(x, y)


class ReportsTheWrongBatch(PGD):
    def _generate_batch(self, **kwargs: Any) -> Any:
        self._batch_id = 0
        return super()._generate_batch(**kwargs)


class AlwaysShows(PGD):
    def generate(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
        sys.stderr.write("working")
        return super().generate(x, y)


class NeverShows(PGD):
    def generate(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
        self.verbose = False
        return super().generate(x, y)


class ChecksNothing(PGD):
    def __init__(self, estimator: Any, **settings: Any) -> None:
        super().__init__(estimator, **{**settings, "eps": 0.1, "norm": 2, "batch_size": 1, "targeted": False})


class SetsWithoutChecks(PGD):
    def _check_params(self) -> None: ...


class HidesSettings(PGD):
    attack_params: Any = ("norm", "eps", "eps_step")


class RequiresNothing(PGD):
    _estimator_requirements: Any = ()


class WipesGradients(attacks.APGD):  # type: ignore[misc]
    def generate(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
        self.estimator.model.zero_grad()
        return super().generate(x, y)


class Evaluates(attacks.APGD):  # type: ignore[misc]
    def generate(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
        self.estimator.model.eval()
        return super().generate(x, y)


class UpdatesStatistics(attacks.APGD):  # type: ignore[misc]
    def generate(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
        self.estimator.model(torch.from_numpy(x))
        return super().generate(x, y)


def make(attack_class: Any, estimator: Any, settings: dict[str, Any]) -> Any:
    if issubclass(attack_class, attacks.APGD):
        return attack_class(estimator, **{"max_iter": 5, **settings})
    return attack_class(estimator, **{"max_iter": 10, "eps_step": 0.05, **settings})


@pytest.mark.parametrize(
    ("attack_class", "invariant", "arguments"),
    [
        (ChangesInputs, "inputs_and_labels_are_not_changed", ()),
        (ReturnsTheInputs, "inputs_and_labels_are_not_changed", ()),
        (ChangesLabels, "inputs_and_labels_are_not_changed", ()),
        (LeavesTheBall, "points_are_float32_in_the_ball_and_in_bounds", (UNIT,)),
        (LeavesTheBounds, "points_are_float32_in_the_ball_and_in_bounds", (UNIT,)),
        (ForgetsTheType, "points_are_float32_in_the_ball_and_in_bounds", (UNIT,)),
        (ReturnsTheInputs, "points_lower_the_margin_of_the_label", (UNIT,)),
        (IgnoresTargets, "targeted_points_go_to_their_targets", (UNIT,)),
        (IgnoresTargets, "targeted_attacks_need_labels", ()),
        (ReadsOneHotAsZeros, "labels_may_be_one_hot_or_indices", ()),
        (ReadsNoneAsZeros, "without_labels_predictions_are_used", ()),
        (ScalesWithTheBatch, "the_batch_size_decides_nothing", ()),
        (SqueezesOneRow, "one_row_is_a_batch", ()),
        (SeedsItself, "the_same_numpy_seed_gives_the_same_points", ()),
        (KeepsTwoClasses, "two_classes_are_enough", ()),
        (PassesByPreprocessing, "preprocessing_of_the_estimator_is_attacked_through", ()),
        (ReportsNothing, "the_summary_writer_is_updated", ()),
        (ReportsTheWrongBatch, "the_summary_writer_is_updated", ()),
        (AlwaysShows, "the_progress_bar_follows_verbose", ()),
        (NeverShows, "the_progress_bar_follows_verbose", ()),
        (ChecksNothing, "wrong_settings_raise", ()),
        (SetsWithoutChecks, "set_params_sets_and_checks", ()),
        (HidesSettings, "attack_params_are_the_parameters_of_the_constructor", ()),
        (RequiresNothing, "estimators_that_are_no_classifiers_are_refused", ()),
        (WipesGradients, "weights_and_their_gradients_are_left_as_they_were", ()),
        (Evaluates, "the_mode_of_the_network_is_kept", ()),
        (UpdatesStatistics, "a_network_that_trains_is_attacked_in_eval_mode", ()),
    ],
)
def test_a_broken_attack_is_found(attack_class: Any, invariant: str, arguments: tuple[Any, ...]) -> None:
    class Broken(Base):
        def make_attack(self, estimator: Any, **settings: Any) -> Any:
            return make(attack_class, estimator, settings)

    class Sound(Base):
        def make_attack(self, estimator: Any, **settings: Any) -> Any:
            return make(attack_class.__base__, estimator, settings)

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(Broken(), f"test_{invariant}")(*arguments)
    getattr(Sound(), f"test_{invariant}")(*arguments)
