"""The invariants hold for Foolbox's own attacks, and fail where they are broken."""

import itertools

import pytest
import torch

FoolboxModule = pytest.importorskip(
    "robust_ext.adapters.foolbox.model", reason="Foolbox is not installed"
).FoolboxModule
invariants = pytest.importorskip("robust_ext.testing.foolbox_invariants", reason="Foolbox is not installed")
foolbox = invariants.foolbox
Base = invariants.FoolboxAttackInvariants
LinfPGD = foolbox.attacks.LinfPGD
Noise = foolbox.attacks.LinfRepeatedAdditiveUniformNoiseAttack

UNIT = (0.0, 1.0)


class AsInFoolbox(Base):
    """What no gradient attack of Foolbox keeps to."""

    @pytest.mark.xfail(strict=True, reason="Foolbox's gradient attacks leave gradients in the weights")
    def test_the_model_is_left_as_it_was(self):
        super().test_the_model_is_left_as_it_was()


class TestLinfPGD(AsInFoolbox):
    def make_attack(self):
        return LinfPGD(steps=10)


class TestL2PGD(AsInFoolbox):
    def make_attack(self):
        return foolbox.attacks.L2PGD(steps=10, rel_stepsize=0.2)


class TestL2DeepFool(AsInFoolbox):
    can_aim = False
    any_criterion = True

    def make_attack(self):
        return foolbox.attacks.L2DeepFoolAttack(steps=10)


class TestLinfRepeatedNoise(Base):
    any_criterion = True

    def make_attack(self):
        return Noise(repeats=40)


def broken(run, base=LinfPGD):
    """An attack with another ``run``, a function of the attack, model, inputs, criterion and the sound ``run``."""

    class Broken(base):
        def run(self, model, inputs, criterion, **kwargs):
            def sound(criterion=criterion, **fewer):
                return super(Broken, self).run(model, inputs, criterion, **(fewer or kwargs))

            return run(self, model, inputs, criterion, sound, kwargs)

    return Broken


def broken_call(call):
    """An attack whose results are a function of raw points, clipped points and successes."""

    class Broken(LinfPGD):
        def __call__(self, *args, **kwargs):
            return call(*super().__call__(*args, **kwargs))

    return Broken


def changes_inputs(attack, model, inputs, criterion, run, kwargs):
    out = run()
    inputs.raw.copy_(out.raw)
    return out


def changes_labels(attack, model, inputs, criterion, run, kwargs):
    out = run()
    criterion.labels.raw.zero_()
    return out


def remembers(attack, model, inputs, criterion, run, kwargs):
    attack.last = run()
    return attack.last


def trains(attack, model, inputs, criterion, run, kwargs):
    FoolboxModule(model).network.train()
    return run()


def leaves_gradients(attack, model, inputs, criterion, run, kwargs):
    for parameter in FoolboxModule(model).parameters():
        parameter.grad = torch.zeros_like(parameter)
    return run()


def without_eagerpy(points):
    return [getattr(x, "raw", x) for x in points]


seeds = itertools.count()
ChangesInputs, ChangesLabels, Remembers = broken(changes_inputs), broken(changes_labels), broken(remembers)
Trains, LeavesGradients = broken(trains, Noise), broken(leaves_gradients, Noise)
LeavesTheBounds = broken(lambda attack, model, x, y, run, kwargs: x + kwargs["epsilon"])
IgnoresTargets = TakesAnyCriterion = broken(lambda attack, model, x, y, run, kwargs: run(model(x).argmax(axis=-1)))
FleesFromTargets = broken(lambda attack, model, x, y, run, kwargs: run(getattr(y, "target_classes", y)))
DoesNothing = broken(lambda attack, model, x, y, run, kwargs: x)
ForgetsTheType = broken(lambda attack, model, x, y, run, kwargs: type(x)(run().raw.float()))
SeedsItself = broken(lambda attack, model, x, y, run, kwargs: (torch.manual_seed(next(seeds)), run())[1])
SwallowsKeywords = broken(lambda attack, model, x, y, run, kwargs: run(epsilon=kwargs["epsilon"]))
SqueezesOneRow = broken(lambda attack, model, x, y, run, kwargs: run()[0] if len(x) == 1 else run())
ClaimsSuccess = broken_call(lambda raw, clipped, success: (raw, clipped, torch.ones_like(success)))
AlwaysLists = broken_call(lambda raw, clipped, success: ([raw], [clipped], success))
NeverLists = broken_call(lambda raw, clipped, success: (torch.stack(raw), torch.stack(clipped), success))
UnwrapsEagerPy = broken_call(lambda raw, clipped, success: (without_eagerpy(raw), without_eagerpy(clipped), success))


class LeavesTheBall(LinfPGD):
    def __call__(self, model, inputs, criterion, *, epsilons, **kwargs):
        raw, _, success = super().__call__(model, inputs, criterion, epsilons=[3 * e for e in epsilons], **kwargs)
        return raw, raw, success


class IgnoresConditions(LinfPGD):
    def __call__(self, model, inputs, criterion, **kwargs):
        return super().__call__(model, inputs, criterion.labels, **kwargs)


class RepeatsWorse(LinfPGD):
    def repeat(self, times):
        return DoesNothing(steps=1)


def make(attack_class):
    return attack_class(repeats=10) if issubclass(attack_class, Noise) else attack_class(steps=10)


# An invariant, its arguments and the attacks that break it.
BROKEN = [
    ("inputs_and_labels_are_not_changed", (UNIT,), [ChangesInputs, ChangesLabels]),
    ("points_are_in_the_ball_and_in_bounds", (UNIT,), [LeavesTheBounds, LeavesTheBall]),
    ("targeted_points_go_to_their_targets", (UNIT,), [IgnoresTargets, FleesFromTargets]),
    ("untargeted_points_lower_the_margin_of_the_label", (UNIT,), [DoesNothing]),
    ("models_may_be_wrapped", (UNIT,), [DoesNothing]),
    ("success_is_that_of_a_fresh_forward_pass", (UNIT, False), [ClaimsSuccess]),
    ("success_is_that_of_a_fresh_forward_pass", (UNIT, True), [ClaimsSuccess]),
    ("one_epsilon_gives_tensors", (UNIT,), [AlwaysLists]),
    ("many_epsilons_give_lists", (UNIT,), [NeverLists]),
    ("type_and_device_are_kept", (torch.float64, "cpu"), [ForgetsTheType]),
    ("eagerpy_tensors_give_eagerpy_tensors", (False,), [UnwrapsEagerPy]),
    ("the_same_torch_seed_gives_the_same_points", (), [SeedsItself]),
    ("repr_shows_the_settings_alone", (), [Remembers]),
    ("unknown_keywords_are_refused", (), [SwallowsKeywords]),
    ("other_criteria_are_refused", (), [TakesAnyCriterion]),
    ("a_misclassification_with_a_condition_is_judged_by_it", (), [IgnoresConditions]),
    ("one_row_is_a_batch", (UNIT,), [SqueezesOneRow]),
    ("repeating_is_never_worse", (), [RepeatsWorse]),
    ("the_model_is_left_as_it_was", (), [Trains, LeavesGradients]),
]


@pytest.mark.parametrize(
    ("attack_class", "invariant", "arguments"),
    [(attack_class, *case) for *case, broken_ones in BROKEN for attack_class in broken_ones],
)
def test_a_broken_attack_is_found(attack_class, invariant, arguments):
    class Broken(Base):
        def make_attack(self):
            return make(attack_class)

    class Sound(Base):
        def make_attack(self):
            return make(attack_class.__base__)

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(Broken(), f"test_{invariant}")(*arguments)
    getattr(Sound(), f"test_{invariant}")(*arguments)
