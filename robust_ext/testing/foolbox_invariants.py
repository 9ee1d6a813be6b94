"""The invariants of Foolbox attacks on PyTorch models, as a base test class."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import eagerpy as ep
import pytest
import torch
from torch import Tensor, nn

from robust_ext.testing.networks import margins, small_batch, small_network

foolbox: Any = import_module("robust_ext.adapters.foolbox.library").foolbox
Criterion: Any = foolbox.criteria.Criterion
Misclassification: Any = foolbox.criteria.Misclassification
TargetedMisclassification: Any = foolbox.criteria.TargetedMisclassification

Bounds = tuple[float, float]
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
EachBounds = pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 1.0)])
EachAim = pytest.mark.parametrize("targeted", [False, True])


class FoolboxAttackInvariants:
    """The invariants of a Foolbox attack; subclass it and define :meth:`make_attack`.

    Where an attack breaks one for a reason, override that method with a mark or with a test of what the attack does.

    Attributes:
        shape: Shape of one input.
        classes: Classes of the classifier.
        epsilon: Budget a value, as a share of the bounds' width: linf epsilon itself, otherwise scaled to the norm.
        can_aim: Whether :class:`foolbox.criteria.TargetedMisclassification` is supported.
        any_criterion: Whether any criterion is supported, and not only those with labels or target classes.
    """

    shape: tuple[int, ...] = (1, 4, 4)
    classes = 4
    epsilon = 0.2
    can_aim = True
    any_criterion = False

    def make_attack(self) -> Any:
        """Return the attack, with settings under which it takes a fraction of a second on eight inputs."""
        raise NotImplementedError

    def make_network(self, bounds: Bounds) -> nn.Module:
        """Return the network to attack, in eval mode."""
        return small_network(self.shape, self.classes, bounds=bounds)

    @EachBounds
    def test_one_epsilon_gives_tensors(self, bounds: Bounds) -> None:
        """A single epsilon gives three tensors: raw and clipped points, and success ``(N,)``."""
        model, x, y = self._problem(bounds)
        raw, clipped, success = self._attack(model, x, y, self._epsilon(bounds))
        assert all(isinstance(part, Tensor) for part in (raw, clipped, success))
        assert raw.shape == clipped.shape == x.shape
        assert (success.shape, success.dtype) == ((len(x),), torch.bool)

    @EachBounds
    def test_many_epsilons_give_lists(self, bounds: Bounds) -> None:
        """K epsilons, zero among them, give two lists of K, and success ``(K, N)``."""
        model, x, y = self._problem(bounds)
        epsilons = [0.0, self._epsilon(bounds) / 2, self._epsilon(bounds)]
        raw, clipped, success = self._attack(model, x, y, epsilons)
        assert isinstance(raw, list)
        assert [points.shape for points in (*raw, *clipped)] == [x.shape] * 6
        assert (success.shape, success.dtype) == ((3, len(x)), torch.bool)
        assert torch.equal(clipped[0], x)
        assert not bool(success[0].any())

    @EachBounds
    def test_points_are_in_the_ball_and_in_bounds(self, bounds: Bounds) -> None:
        """Clipped points keep to epsilon; raw and clipped ones to the bounds."""
        model, x, y = self._problem(bounds)
        epsilons = [self._epsilon(bounds) / 3, self._epsilon(bounds)]
        raw, clipped, _ = self._attack(model, x, y, epsilons)
        distance = self.make_attack().distance
        for epsilon, points in zip(epsilons, clipped, strict=True):
            assert float(distance(x, points).max()) <= epsilon * (1 + 1e-4) + 1e-6
        for points in (*raw, *clipped):  # NaN is in no bounds.
            assert bool(((points >= bounds[0] - 1e-6) & (points <= bounds[1] + 1e-6)).all())

    @EachAim
    @EachBounds
    def test_success_is_that_of_a_fresh_forward_pass(self, bounds: Bounds, targeted: bool) -> None:
        """Success is what the model predicts for the clipped points."""
        self._skip_unless_it_aims(targeted)
        model, x, y = self._problem(bounds)
        criterion = TargetedMisclassification(y) if targeted else y
        epsilons = [self._epsilon(bounds) / 2, self._epsilon(bounds)]
        if targeted:
            # Some rows are of the class they aim at, others are not.
            y[: len(y) // 2] = (y[: len(y) // 2] + 1) % self.classes
        _, clipped, success = self._attack(model, x, criterion, epsilons)
        for points, claimed in zip(clipped, success, strict=True):
            hit = _logits(model, points).argmax(1) == y
            assert torch.equal(claimed, hit if targeted else ~hit)

    @EachBounds
    def test_untargeted_points_lower_the_margin_of_the_label(self, bounds: Bounds) -> None:
        """An untargeted attack moves away from the labels, and finds something."""
        model, x, y = self._problem(bounds)
        _, clipped, success = self._attack(model, x, y, self._epsilon(bounds))
        before, after = margins(_logits(model, x), y), margins(_logits(model, clipped), y)
        assert float(after.mean()) < float(before.mean())
        assert bool(success.any()), "nothing was adversarial; make the attack stronger or its epsilon larger"

    @EachBounds
    def test_targeted_points_go_to_their_targets(self, bounds: Bounds) -> None:
        """Another target gives other points, each better for its own target."""
        self._skip_unless_it_aims(True)
        model, x, y = self._problem(bounds)
        one, other = ((y + step) % self.classes for step in (1, 2))
        points = (self._attack(model, x, TargetedMisclassification(aim), self._epsilon(bounds)) for aim in (one, other))
        at_one, at_other = (_logits(model, clipped) for _, clipped, _ in points)
        assert float((margins(at_one, one) - margins(at_other, one)).mean()) > 0
        assert float((margins(at_other, other) - margins(at_one, other)).mean()) > 0
        assert float((margins(at_one, one) - margins(_logits(model, x), one)).mean()) > 0

    def test_other_criteria_are_refused(self) -> None:
        """A criterion of another kind raises ``ValueError``."""
        if self.any_criterion:
            pytest.skip("the attack supports any criterion")

        class Anything(Criterion):  # type: ignore[misc]
            def __repr__(self) -> str:
                return "Anything()"

            def __call__(self, perturbed: Any, outputs: Any) -> Any:
                return ep.astensor(outputs).argmax(axis=-1) >= 0

        model, x, _ = self._problem((0.0, 1.0))
        with pytest.raises(ValueError, match="unsupported criterion"):
            self._attack(model, x, Anything(), 0.1)

    def test_a_misclassification_with_a_condition_is_judged_by_it(self) -> None:
        """A subclass of ``Misclassification`` with a condition of its own decides what success is."""

        class AndBright(Misclassification):  # type: ignore[misc]
            def __call__(self, perturbed: Any, outputs: Any) -> Any:
                bright = ep.astensor(perturbed).flatten(start=1).max(axis=-1) > 0.9
                wrong = ep.astensor(super().__call__(perturbed, outputs))
                _, restore = ep.astensor_(outputs)
                return restore(ep.logical_and(wrong, bright))

        model, x, y = self._problem((0.0, 1.0))
        _, clipped, success = self._attack(model, x, AndBright(y), self._epsilon((0.0, 1.0)))
        wrong = _logits(model, clipped).argmax(1) != y
        assert torch.equal(success, wrong & (clipped.flatten(1).amax(1) > 0.9))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("device", DEVICES)
    def test_type_and_device_are_kept(self, dtype: torch.dtype, device: str) -> None:
        """Points have the dtype and the device of the inputs."""
        network = self.make_network((0.0, 1.0)).to(device, dtype)
        model = foolbox.PyTorchModel(network, bounds=(0, 1), device=device)
        x = self._inputs((0.0, 1.0)).to(device, dtype)
        raw, clipped, success = self._attack(model, x, network(x).argmax(1), self._epsilon((0.0, 1.0)))
        assert raw.dtype == clipped.dtype == dtype
        assert raw.device == clipped.device == success.device == x.device
        assert not torch.equal(clipped, x)

    @EachBounds
    def test_inputs_and_labels_are_not_changed(self, bounds: Bounds) -> None:
        """The user's tensors stay unchanged."""
        model, x, y = self._problem(bounds)
        before = x.clone(), y.clone()
        self._attack(model, x, y, self._epsilon(bounds))
        assert all(torch.equal(*pair) for pair in zip((x, y), before, strict=True))

    @pytest.mark.parametrize("change", [lambda y: y[:1], lambda y: y[:-1], lambda y: y.view(-1, 1)])
    def test_labels_of_another_shape_are_refused(self, change: Callable[[Tensor], Tensor]) -> None:
        """Labels that are not ``(N,)`` raise."""
        model, x, y = self._problem((0.0, 1.0))
        with pytest.raises((ValueError, AssertionError)):
            self._attack(model, x, change(y), 0.1)

    def test_unknown_keywords_are_refused(self) -> None:
        """A keyword that the attack does not have raises ``TypeError``."""
        model, x, y = self._problem((0.0, 1.0))
        with pytest.raises(TypeError, match="no_such_keyword"):
            self.make_attack()(model, x, y, epsilons=0.1, no_such_keyword=1)

    @EachAim
    def test_eagerpy_tensors_give_eagerpy_tensors(self, targeted: bool) -> None:
        """The same points come back, in the type they were given in."""
        self._skip_unless_it_aims(targeted)
        model, x, y = self._problem((0.0, 1.0))
        kind = TargetedMisclassification if targeted else Misclassification
        epsilon = self._epsilon((0.0, 1.0))
        native = self._attack(model, x, kind(y), [epsilon])
        wrapped = self._attack(model, ep.astensor(x), kind(ep.astensor(y)), [epsilon])
        for a, b in zip((*native[0], *native[1], native[2]), (*wrapped[0], *wrapped[1], wrapped[2]), strict=True):
            assert isinstance(b, ep.PyTorchTensor)
            assert torch.equal(a, b.raw)

    def test_repeating_is_never_worse(self) -> None:
        """``repeat`` keeps every success of the first run, and returns points that go with it."""
        model, x, y = self._problem((0.0, 1.0))
        for share in (0.25, 0.5, 1.0):
            epsilon = share * self._epsilon((0.0, 1.0))
            once = self._attack(model, x, y, epsilon)[2]
            torch.manual_seed(3)
            _, clipped, often = self.make_attack().repeat(3)(model, x, y, epsilons=epsilon)
            assert bool((often | ~once).all())
            assert torch.equal(often, _logits(model, clipped).argmax(1) != y)

    def test_repr_shows_the_settings_alone(self) -> None:
        """The repr, which names tests and results, does not change and holds parameters of the constructor only."""
        attack = self.make_attack()
        shown = repr(attack)
        model, x, y = self._problem((0.0, 1.0))
        attack(model, x, y, epsilons=self._epsilon((0.0, 1.0)))
        assert repr(attack) == shown == repr(self.make_attack())
        # Foolbox's base class writes all attributes.
        names = {name.strip("_") for name in vars(attack)}
        assert names <= set(inspect.signature(type(attack)).parameters)
        assert re.search(r"0x[0-9a-f]+|tensor\(", shown) is None

    def test_the_model_is_left_as_it_was(self) -> None:
        """Weights, their gradients, ``requires_grad`` and train flags are the user's."""
        network = self.make_network((0.0, 1.0))
        model = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
        x = self._inputs((0.0, 1.0))
        parameters = dict(network.named_parameters())
        kept, *others = parameters.values()
        kept.grad = torch.ones_like(kept)
        others[-1].requires_grad_(False)
        flags = [part.training for part in network.modules()]
        required = {name: parameter.requires_grad for name, parameter in parameters.items()}
        values = {name: value.clone() for name, value in network.state_dict().items()}
        self._attack(model, x, network(x).argmax(1), self._epsilon((0.0, 1.0)))
        assert [part.training for part in network.modules()] == flags
        assert {name: parameter.requires_grad for name, parameter in parameters.items()} == required
        assert all(torch.equal(value, values[name]) for name, value in network.state_dict().items())
        assert torch.equal(kept.grad, torch.ones_like(kept))
        assert all(parameter.grad is None for parameter in others)

    def test_the_same_torch_seed_gives_the_same_points(self) -> None:
        """``torch.manual_seed`` decides all randomness."""
        model, x, y = self._problem((0.0, 1.0))
        epsilon = self._epsilon((0.0, 1.0))
        first, second = (self._attack(model, x, y, epsilon)[0] for _ in range(2))
        assert torch.equal(first, second)

    @EachBounds
    def test_one_row_is_a_batch(self, bounds: Bounds) -> None:
        """One input is attacked as many are."""
        model, x, y = self._problem(bounds)
        raw, clipped, success = self._attack(model, x[:1], y[:1], [self._epsilon(bounds)])
        assert raw[0].shape == clipped[0].shape == x[:1].shape
        assert success.shape == (1, 1)

    @EachBounds
    def test_models_may_be_wrapped(self, bounds: Bounds) -> None:
        """The attack queries a wrapper of Foolbox around the model, not the model inside."""
        inner, x, y = self._problem(bounds)
        model = inner.transform_bounds((0, 2), wrapper=True)
        low, high = bounds
        stretched = ((x - low) / (high - low) * 2).clamp(0, 2)
        _, clipped, success = self._attack(model, stretched, y, self._epsilon((0.0, 2.0)))
        back = (clipped / 2 * (high - low) + low).clamp(low, high)
        assert torch.equal(success, _logits(model, clipped).argmax(1) != y)
        assert margins(_logits(inner, back), y).mean() < margins(_logits(inner, x), y).mean()

    def _problem(self, bounds: Bounds) -> tuple[Any, Tensor, Tensor]:
        """Return a Foolbox model, inputs, and its predictions as labels."""
        network = self.make_network(bounds)
        x = self._inputs(bounds)
        with torch.no_grad():
            y = network(x).argmax(1)
        return foolbox.PyTorchModel(network, bounds=bounds, device="cpu"), x, y

    def _inputs(self, bounds: Bounds) -> Tensor:
        return small_batch(8, self.shape, bounds=bounds)

    def _epsilon(self, bounds: Bounds) -> float:
        values, power = math.prod(self.shape), float(self.make_attack().distance.p)
        return self.epsilon * (bounds[1] - bounds[0]) * math.pow(values, 1 / power)

    def _attack(self, model: Any, x: Any, criterion: Any, epsilons: Any) -> Any:
        torch.manual_seed(3)
        return self.make_attack()(model, x, criterion, epsilons=epsilons)

    def _skip_unless_it_aims(self, targeted: bool) -> None:
        if targeted and not self.can_aim:
            pytest.skip("the attack supports no targeted criterion")


def _logits(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(x)
    return logits
