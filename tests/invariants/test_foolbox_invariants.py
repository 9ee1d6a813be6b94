"""The invariants hold for Foolbox's own attacks, and fail where they are broken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

FoolboxModule = pytest.importorskip(
    "robust_ext.adapters.foolbox.model", reason="Foolbox is not installed"
).FoolboxModule
invariants = pytest.importorskip("robust_ext.testing.foolbox_invariants", reason="Foolbox is not installed")
foolbox = invariants.foolbox
Base: Any = invariants.FoolboxAttackInvariants
LinfPGD: Any = foolbox.attacks.LinfPGD
Noise: Any = foolbox.attacks.LinfRepeatedAdditiveUniformNoiseAttack

UNIT = (0.0, 1.0)

leaves_gradients = pytest.mark.xfail(strict=True, reason="Foolbox's gradient attacks leave gradients in the weights")


class TestLinfPGD(Base):
    def make_attack(self) -> Any:
        return LinfPGD(steps=10)

    @leaves_gradients
    def test_the_model_is_left_as_it_was(self) -> None:
        super().test_the_model_is_left_as_it_was()


class TestL2PGD(Base):
    def make_attack(self) -> Any:
        return foolbox.attacks.L2PGD(steps=10, rel_stepsize=0.2)

    @leaves_gradients
    def test_the_model_is_left_as_it_was(self) -> None:
        super().test_the_model_is_left_as_it_was()


class TestL2DeepFool(Base):
    can_aim = False
    any_criterion = True

    def make_attack(self) -> Any:
        return foolbox.attacks.L2DeepFoolAttack(steps=10)

    @leaves_gradients
    def test_the_model_is_left_as_it_was(self) -> None:
        super().test_the_model_is_left_as_it_was()


class TestLinfRepeatedNoise(Base):
    any_criterion = True

    def make_attack(self) -> Any:
        return Noise(repeats=40)


class ChangesInputs(LinfPGD):
    def run(self, model: Any, inputs: Any, criterion: Any, **kwargs: Any) -> Any:
        out = super().run(model, inputs, criterion, **kwargs)
        inputs.raw.copy_(out.raw)
        return out


class ChangesLabels(LinfPGD):
    def run(self, model: Any, inputs: Any, criterion: Any, **kwargs: Any) -> Any:
        out = super().run(model, inputs, criterion, **kwargs)
        criterion.labels.raw.zero_()
        return out


class LeavesTheBounds(LinfPGD):
    def run(self, model: Any, inputs: Any, criterion: Any, *, epsilon: float, **kwargs: Any) -> Any:
        return inputs + epsilon


class LeavesTheBall(LinfPGD):
    def __call__(self, model: Any, inputs: Any, criterion: Any, *, epsilons: Any, **kwargs: Any) -> Any:
        raw, _, success = super().__call__(model, inputs, criterion, epsilons=[3 * e for e in epsilons], **kwargs)
        return raw, raw, success


class IgnoresTargets(LinfPGD):
    def run(self, model: Any, inputs: Any, criterion: Any, **kwargs: Any) -> Any:
        return super().run(model, inputs, model(inputs).argmax(axis=-1), **kwargs)


class FleesFromTargets(LinfPGD):
    def run(self, model: Any, inputs: Any, criterion: Any, **kwargs: Any) -> Any:
        return super().run(model, inputs, getattr(criterion, "target_classes", criterion), **kwargs)


class DoesNothing(LinfPGD):
    def run(self, model: Any, inputs: Any, criterion: Any, **kwargs: Any) -> Any:
        return inputs


class ClaimsSuccess(LinfPGD):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raw, clipped, success = super().__call__(*args, **kwargs)
        return raw, clipped, torch.ones_like(success)


class AlwaysLists(LinfPGD):
    def __call__(self, model: Any, inputs: Any, criterion: Any, *, epsilons: Any, **kwargs: Any) -> Any:
        raw, clipped, success = super().__call__(model, inputs, criterion, epsilons=epsilons, **kwargs)
        return [raw], [clipped], success


class NeverLists(LinfPGD):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raw, clipped, success = super().__call__(*args, **kwargs)
        return torch.stack(raw), torch.stack(clipped), success


class ForgetsTheType(LinfPGD):
    def run(self, model: Any, inputs: Any, criterion: Any, **kwargs: Any) -> Any:
        return type(inputs)(super().run(model, inputs, criterion, **kwargs).raw.float())


class UnwrapsEagerPy(LinfPGD):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raw, clipped, success = super().__call__(*args, **kwargs)
        return [getattr(x, "raw", x) for x in raw], [getattr(x, "raw", x) for x in clipped], success


class SeedsItself(LinfPGD):
    calls = 0

    def run(self, model: Any, inputs: Any, criterion: Any, **kwargs: Any) -> Any:
        SeedsItself.calls += 1
        torch.manual_seed(SeedsItself.calls)
        return super().run(model, inputs, criterion, **kwargs)


class Remembers(LinfPGD):
    def run(self, model: Any, inputs: Any, criterion: Any, **kwargs: Any) -> Any:
        self.last = super().run(model, inputs, criterion, **kwargs)
        return self.last


class SwallowsKeywords(LinfPGD):
    def run(self, model: Any, inputs: Any, criterion: Any, *, epsilon: float, **kwargs: Any) -> Any:
        return super().run(model, inputs, criterion, epsilon=epsilon)


class TakesAnyCriterion(LinfPGD):
    def run(self, model: Any, inputs: Any, criterion: Any, **kwargs: Any) -> Any:
        return super().run(model, inputs, model(inputs).argmax(axis=-1), **kwargs)


class IgnoresConditions(LinfPGD):
    def __call__(self, model: Any, inputs: Any, criterion: Any, **kwargs: Any) -> Any:
        return super().__call__(model, inputs, criterion.labels, **kwargs)


class SqueezesOneRow(LinfPGD):
    def run(self, model: Any, inputs: Any, criterion: Any, **kwargs: Any) -> Any:
        out = super().run(model, inputs, criterion, **kwargs)
        return out[0] if len(out) == 1 else out


class RepeatsWorse(LinfPGD):
    def repeat(self, times: int) -> Any:
        return DoesNothing(steps=1)


class Trains(Noise):
    def run(self, model: Any, inputs: Any, criterion: Any, **kwargs: Any) -> Any:
        FoolboxModule(model).network.train()
        return super().run(model, inputs, criterion, **kwargs)


class LeavesGradients(Noise):
    def run(self, model: Any, inputs: Any, criterion: Any, **kwargs: Any) -> Any:
        for parameter in FoolboxModule(model).parameters():
            parameter.grad = torch.zeros_like(parameter)
        return super().run(model, inputs, criterion, **kwargs)


def make(attack_class: Any) -> Any:
    return attack_class(repeats=10) if issubclass(attack_class, Noise) else attack_class(steps=10)


@pytest.mark.parametrize(
    ("attack_class", "invariant", "arguments"),
    [
        (ChangesInputs, "inputs_and_labels_are_not_changed", (UNIT,)),
        (ChangesLabels, "inputs_and_labels_are_not_changed", (UNIT,)),
        (LeavesTheBounds, "points_are_in_the_ball_and_in_bounds", (UNIT,)),
        (LeavesTheBall, "points_are_in_the_ball_and_in_bounds", (UNIT,)),
        (IgnoresTargets, "targeted_points_go_to_their_targets", (UNIT,)),
        (FleesFromTargets, "targeted_points_go_to_their_targets", (UNIT,)),
        (DoesNothing, "untargeted_points_lower_the_margin_of_the_label", (UNIT,)),
        (DoesNothing, "models_may_be_wrapped", (UNIT,)),
        (ClaimsSuccess, "success_is_that_of_a_fresh_forward_pass", (UNIT, False)),
        (ClaimsSuccess, "success_is_that_of_a_fresh_forward_pass", (UNIT, True)),
        (AlwaysLists, "one_epsilon_gives_tensors", (UNIT,)),
        (NeverLists, "many_epsilons_give_lists", (UNIT,)),
        (ForgetsTheType, "type_and_device_are_kept", (torch.float64, "cpu")),
        (UnwrapsEagerPy, "eagerpy_tensors_give_eagerpy_tensors", (False,)),
        (SeedsItself, "the_same_torch_seed_gives_the_same_points", ()),
        (Remembers, "repr_shows_the_settings_alone", ()),
        (SwallowsKeywords, "unknown_keywords_are_refused", ()),
        (TakesAnyCriterion, "other_criteria_are_refused", ()),
        (IgnoresConditions, "a_misclassification_with_a_condition_is_judged_by_it", ()),
        (SqueezesOneRow, "one_row_is_a_batch", (UNIT,)),
        (RepeatsWorse, "repeating_is_never_worse", ()),
        (Trains, "the_model_is_left_as_it_was", ()),
        (LeavesGradients, "the_model_is_left_as_it_was", ()),
    ],
)
def test_a_broken_attack_is_found(attack_class: Any, invariant: str, arguments: tuple[Any, ...]) -> None:
    class Broken(Base):
        def make_attack(self) -> Any:
            return make(attack_class)

    class Sound(Base):
        def make_attack(self) -> Any:
            return make(attack_class.__base__)

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(Broken(), f"test_{invariant}")(*arguments)
    getattr(Sound(), f"test_{invariant}")(*arguments)
