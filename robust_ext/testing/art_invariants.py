"""The invariants of ART evasion attacks on a ``PyTorchClassifier``, as a base test class."""

from __future__ import annotations

import contextlib
import inspect
import io
import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from robust_ext.testing.art_parts import RecordingWriter, Standardised, classifier_of, gradient_of, margin_of
from robust_ext.testing.networks import small_batch, small_network

art: Any = import_module("robust_ext.adapters.art.library").art
PyTorchRegressor: Any = import_module("art.estimators.regression.pytorch").PyTorchRegressor
Bounds = tuple[float, float]
EachBounds = pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 1.0)])


class ArtAttackInvariants:
    """The invariants of an ART evasion attack; subclass it and define :meth:`make_attack`.

    Where an attack breaks one for a reason, override that method with a mark or with a test of what the attack does.

    Attributes:
        shape: Shape of one input.
        classes: Classes of the classifier.
        norm: ``np.inf``, 2 or 1: the norm of the attack that :meth:`make_attack` makes.
        epsilon: Budget a value, as a share of the bounds' width: ``eps`` itself for ``np.inf``, otherwise scaled to the
            norm.
        wrong_settings: Settings that raise ``ValueError``, each by itself.
        repeatable: Settings with which results do not depend on the batch size; None if no settings do.
    """

    shape: tuple[int, ...] = (1, 4, 4)
    classes = 4
    norm: float = np.inf
    epsilon = 0.2
    wrong_settings: Sequence[Mapping[str, Any]] = (
        {"eps": -1.0},
        {"norm": 0.5},
        {"batch_size": 0},
        {"targeted": "yes"},
        {"verbose": "yes"},
    )
    repeatable: Mapping[str, Any] | None = {}

    def make_attack(self, estimator: Any, **settings: Any) -> Any:
        """Return the attack on an estimator; ``settings`` override those of your own.

        They are among ``eps``, ``targeted``, ``batch_size``, ``verbose``, ``summary_writer``, those in
        ``wrong_settings`` and those in ``repeatable``.
        """
        raise NotImplementedError

    def make_network(self, bounds: Bounds, classes: int) -> nn.Module:
        """Return the network to attack, in eval mode."""
        return small_network(self.shape, classes, bounds=bounds)

    def test_attack_params_are_the_parameters_of_the_constructor(self) -> None:
        """``set_params`` reaches every parameter, and each can be read."""
        attack = self._make(self._classifier())
        parameters = set(inspect.signature(type(attack)).parameters) - {"estimator", "classifier"}
        assert parameters <= set(attack.attack_params)
        assert all(hasattr(attack, name) for name in parameters)

    def test_set_params_sets_and_checks(self) -> None:
        """``set_params`` takes effect, refuses unknown names, and checks values."""
        attack = self._make(self._classifier())
        if "eps" in attack.attack_params:
            attack.set_params(eps=0.125)
            assert attack.eps == 0.125
        attack.set_params(batch_size=3)
        assert attack.batch_size == 3
        with pytest.raises(ValueError, match="no_such_parameter"):
            attack.set_params(no_such_parameter=1)
        with pytest.raises(ValueError, match="batch"):
            attack.set_params(batch_size=0)

    def test_wrong_settings_raise(self) -> None:
        """Each of ``wrong_settings`` raises ``ValueError`` where the attack is made."""
        assert self.wrong_settings
        for wrong in self.wrong_settings:
            with pytest.raises(ValueError, match=r"\S"):
                self._make(self._classifier(), **wrong)

    def test_estimators_that_are_no_classifiers_are_refused(self) -> None:
        """The attack declares which estimators it needs, and ART checks them."""
        regressor = PyTorchRegressor(
            model=self.make_network((0.0, 1.0), 1), loss=nn.MSELoss(), input_shape=self.shape, device_type="cpu"
        )
        with pytest.raises(art.exceptions.EstimatorError):
            self._make(regressor)

    @EachBounds
    def test_points_are_float32_in_the_ball_and_in_bounds(self, bounds: Bounds) -> None:
        """Points are float32 in the inputs' shape, within ``eps`` and ``clip_values``."""
        estimator, x, y = self._problem(bounds)
        points = self._make(estimator, bounds).generate(x, y)
        assert isinstance(points, np.ndarray)
        assert (points.dtype, points.shape) == (np.float32, x.shape)
        assert np.isfinite(points).all()
        assert points.min() >= bounds[0] - 1e-6
        assert points.max() <= bounds[1] + 1e-6
        distances = np.linalg.norm((points.astype(float) - x).reshape(len(x), -1), ord=self.norm, axis=1)
        assert distances.max() <= self._eps(bounds) * (1 + 1e-4) + 1e-6

    @EachBounds
    def test_points_lower_the_margin_of_the_label(self, bounds: Bounds) -> None:
        """An untargeted attack moves away from the labels, and finds something."""
        estimator, x, y = self._problem(bounds)
        points = self._make(estimator, bounds).generate(x, y)
        assert margin_of(estimator, points, y).mean() < margin_of(estimator, x, y).mean()
        found = estimator.predict(points).argmax(1) != y
        assert found.any(), "nothing was adversarial; make the attack stronger or its epsilon larger"

    @EachBounds
    def test_targeted_points_go_to_their_targets(self, bounds: Bounds) -> None:
        """Another target gives other points, each better for its own target."""
        estimator, x, y = self._problem(bounds)
        one, other = (y + 1) % self.classes, (y + 2) % self.classes
        at_one, at_other = (self._make(estimator, bounds, targeted=True).generate(x, aim) for aim in (one, other))
        assert margin_of(estimator, at_one, one).mean() > margin_of(estimator, at_other, one).mean()
        assert margin_of(estimator, at_other, other).mean() > margin_of(estimator, at_one, other).mean()
        assert margin_of(estimator, at_one, one).mean() > margin_of(estimator, x, one).mean()

    def test_targeted_attacks_need_labels(self) -> None:
        """A targeted attack without labels raises ``ValueError``."""
        estimator, x, _ = self._problem()
        with pytest.raises(ValueError, match=r"[Tt]arget"):
            self._make(estimator, targeted=True).generate(x)

    def test_inputs_and_labels_are_not_changed(self) -> None:
        """The user's arrays stay unchanged."""
        estimator, x, y = self._problem()
        hot = np.eye(self.classes, dtype=np.float32)[y]
        x_before, hot_before = x.copy(), hot.copy()
        points = self._make(estimator).generate(x, hot)
        assert not np.shares_memory(points, x)
        assert np.array_equal(x, x_before)
        assert np.array_equal(hot, hot_before)

    def test_labels_may_be_one_hot_or_indices(self) -> None:
        """One-hot labels and indices give the same points."""
        estimator, x, y = self._problem()
        hot = np.eye(self.classes, dtype=np.float32)[y]
        assert np.array_equal(self._run(estimator, x, y), self._run(estimator, x, hot))

    def test_without_labels_predictions_are_used(self) -> None:
        """No labels, or the predictions as labels: the same points."""
        estimator, x, _ = self._problem()
        predicted = estimator.predict(x).argmax(1)
        assert np.array_equal(self._run(estimator, x, None), self._run(estimator, x, predicted))

    def test_the_batch_size_decides_nothing(self) -> None:
        """With the settings in ``repeatable``, batches of one, of a few and of all give the same points."""
        if self.repeatable is None:
            pytest.skip("the attack's results depend on the batch size")
        estimator, x, y = self._problem()
        whole, few, single = (self._run(estimator, x, y, batch_size=size, **self.repeatable) for size in (64, 3, 1))
        np.testing.assert_allclose(few, whole, atol=1e-5)
        np.testing.assert_allclose(single, whole, atol=1e-5)

    def test_one_row_is_a_batch(self) -> None:
        """One input is attacked as many are."""
        estimator, x, y = self._problem()
        assert self._make(estimator).generate(x[:1], y[:1]).shape == x[:1].shape

    def test_the_same_numpy_seed_gives_the_same_points(self) -> None:
        """``np.random.seed`` decides all randomness."""
        estimator, x, y = self._problem()
        assert np.array_equal(self._run(estimator, x, y), self._run(estimator, x, y))

    def test_eps_may_be_a_numpy_number(self) -> None:
        """``eps`` computed by numpy is as good as Python's."""
        estimator, x, y = self._problem()
        single = np.float32(self._eps((0.0, 1.0)))
        assert np.array_equal(self._run(estimator, x, y, eps=single), self._run(estimator, x, y, eps=float(single)))

    def test_two_classes_are_enough(self) -> None:
        """A classifier of two classes is attacked like any other."""
        estimator, x, y = self._problem(classes=2)
        points = self._make(estimator).generate(x, y)
        assert margin_of(estimator, points, y).mean() < margin_of(estimator, x, y).mean()

    def test_preprocessing_of_the_estimator_is_attacked_through(self) -> None:
        """A mean and a deviation given to the estimator act as a layer of the network does."""
        network, _, x, y = self._network_problem()
        mean, deviation = 0.25, 1.5
        inside = nn.Sequential(Standardised(mean, deviation), network).eval()
        outside = self._classifier(network, preprocessing=(mean, deviation))
        np.testing.assert_allclose(
            self._run(outside, x, y), self._run(self._classifier(inside), x, y), atol=1e-4, rtol=0
        )

    def test_the_summary_writer_is_updated(self) -> None:
        """A summary writer is updated with inputs and labels for each batch, in order, and reset at the end."""
        estimator, x, y = self._problem()
        if "summary_writer" not in inspect.signature(type(self._make(estimator))).parameters:
            pytest.skip("the attack has no summary writer")
        writer = RecordingWriter()
        self._make(estimator, summary_writer=writer, batch_size=5).generate(x, y)
        assert [update["batch_id"] for update in writer.updates] == sorted(
            update["batch_id"] for update in writer.updates
        )
        assert {update["batch_id"] for update in writer.updates} == {0, 1}
        for number, rows in enumerate((slice(0, 5), slice(5, 8))):
            updates = [update for update in writer.updates if update["batch_id"] == number]
            assert [update["global_step"] for update in updates] == list(range(len(updates)))
            for update in updates:
                assert update["x"].shape == x[rows].shape
                assert np.array_equal(update["y"], np.eye(self.classes)[y[rows]])
                assert update["grad"] is None or update["grad"].shape == x[rows].shape
                assert update["estimator"] is estimator
                assert update["targeted"] is False
        assert writer.resets == 1

    def test_the_progress_bar_follows_verbose(self) -> None:
        """Something is shown with ``verbose``, and nothing without."""
        estimator, x, y = self._problem()
        shown = []
        for verbose in (True, False):
            with contextlib.redirect_stderr(io.StringIO()) as stream:
                self._make(estimator, verbose=verbose).generate(x, y)
            shown.append(stream.getvalue())
        assert shown[0]
        assert not shown[1]

    def test_weights_and_their_gradients_are_left_as_they_were(self) -> None:
        """Weights, their gradients and ``requires_grad`` are the user's."""
        network, estimator, x, y = self._network_problem()
        kept, *others = network.parameters()
        kept.grad = torch.ones_like(kept)
        values = {name: value.clone() for name, value in network.state_dict().items()}
        self._run(estimator, x, y)
        assert all(torch.equal(value, values[name]) for name, value in network.state_dict().items())
        assert torch.equal(gradient_of(kept), torch.ones_like(kept))
        assert not any(gradient_of(parameter).any() for parameter in others)
        assert all(parameter.requires_grad for parameter in network.parameters())

    def test_a_network_that_trains_is_attacked_in_eval_mode(self) -> None:
        """A network in train mode is attacked as ART predicts with it, and its statistics are not updated."""
        network, estimator, x, y = self._network_problem()
        evaluated = self._run(estimator, x, y)
        statistics = {name: value.clone() for name, value in network.named_buffers()}
        network.train()
        assert np.array_equal(self._run(estimator, x, y), evaluated)
        assert all(torch.equal(value, statistics[name]) for name, value in network.named_buffers())

    def test_the_mode_of_the_network_is_kept(self) -> None:
        """A network that trains still does afterwards, and each part of it."""
        network, estimator, x, y = self._network_problem()
        network.train()
        next(network.children()).eval()
        flags = [part.training for part in network.modules()]
        self._run(estimator, x, y)
        assert [part.training for part in network.modules()] == flags

    def _problem(self, bounds: Bounds = (0.0, 1.0), *, classes: int | None = None) -> tuple[Any, Any, Any]:
        """Return an estimator, inputs, and its predictions as labels."""
        return self._network_problem(bounds, classes=classes)[1:]

    def _network_problem(
        self, bounds: Bounds = (0.0, 1.0), *, classes: int | None = None
    ) -> tuple[nn.Module, Any, Any, Any]:
        network, inputs = self.make_network(bounds, classes or self.classes), small_batch(8, self.shape, bounds=bounds)
        with torch.no_grad():
            y = network(inputs).argmax(1).numpy()
        return network, self._classifier(network, clip_values=bounds, classes=classes), inputs.numpy(), y

    def _classifier(
        self,
        network: nn.Module | None = None,
        *,
        clip_values: Bounds = (0.0, 1.0),
        classes: int | None = None,
        preprocessing: Any = (0.0, 1.0),
    ) -> Any:
        classes = classes or self.classes
        network = self.make_network(clip_values, classes) if network is None else network
        return classifier_of(network, self.shape, classes, clip_values=clip_values, preprocessing=preprocessing)

    def _eps(self, bounds: Bounds) -> float:
        values = int(torch.Size(self.shape).numel())
        return self.epsilon * (bounds[1] - bounds[0]) * math.pow(values, 1 / self.norm)

    def _make(self, estimator: Any, bounds: Bounds = (0.0, 1.0), **settings: Any) -> Any:
        return self.make_attack(estimator, **{"eps": self._eps(bounds), "verbose": False, **settings})

    def _run(self, estimator: Any, x: Any, y: Any, **settings: Any) -> Any:
        attack = self._make(estimator, **settings)
        np.random.seed(3)
        return attack.generate(x, y) if y is not None else attack.generate(x)
