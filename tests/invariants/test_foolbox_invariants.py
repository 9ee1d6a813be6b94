"""The invariants hold for Foolbox's own attacks, and fail where they are broken."""

import itertools

import pytest
import torch

model = pytest.importorskip("robust_ext.adapters.foolbox.model", reason="Foolbox is not installed")
invariants = pytest.importorskip("robust_ext.testing.foolbox_invariants", reason="Foolbox is not installed")
foolbox, Base = invariants.foolbox, invariants.FoolboxAttackInvariants
LinfPGD = foolbox.attacks.LinfPGD
Noise = foolbox.attacks.LinfRepeatedAdditiveUniformNoiseAttack


class TestL2PGD(Base):
    def make_attack(self):
        return foolbox.attacks.L2PGD(steps=10, rel_stepsize=0.2)

    @pytest.mark.xfail(strict=True, reason="Foolbox's gradient attacks leave gradients in the weights")
    def test_the_model_is_left_as_it_was(self):
        super().test_the_model_is_left_as_it_was()


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


def broken_call(call=lambda *found: found, given=lambda inputs, criterion, epsilons: (inputs, criterion, epsilons)):
    """An attack whose results are a function of raw points, clipped points and successes, or which is given others."""

    class Broken(LinfPGD):
        def __call__(self, model, inputs, criterion, *, epsilons, **kwargs):
            inputs, criterion, epsilons = given(inputs, criterion, epsilons)
            return call(*super().__call__(model, inputs, criterion, epsilons=epsilons, **kwargs))

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


def trains(attack, victim, inputs, criterion, run, kwargs):
    model.FoolboxModule(victim).network.train()
    return run()


def leaves_gradients(attack, victim, inputs, criterion, run, kwargs):
    for parameter in model.FoolboxModule(victim).parameters():
        parameter.grad = torch.zeros_like(parameter)
    return run()


def raw(points):
    return [getattr(x, "raw", x) for x in points]


SEEDS, UNIT = itertools.count(), (0.0, 1.0)
DoesNothing = broken(lambda a, model, x, y, run, kwargs: x)
LeavesTheBounds = broken(lambda a, model, x, y, run, kwargs: x + kwargs["epsilon"])
IgnoresTargets = broken(lambda a, model, x, y, run, kwargs: run(model(x).argmax(axis=-1)))
FleesFromTargets = broken(lambda a, model, x, y, run, kwargs: run(getattr(y, "target_classes", y)))
ForgetsTheType = broken(lambda a, model, x, y, run, kwargs: type(x)(run().raw.float()))
SwallowsKeywords = broken(lambda a, model, x, y, run, kwargs: run(epsilon=kwargs["epsilon"]))
SqueezesOneRow = broken(lambda a, model, x, y, run, kwargs: run()[0] if len(x) == 1 else run())
SeedsItself = broken(lambda a, model, x, y, run, kwargs: (torch.manual_seed(next(SEEDS)), run())[1])
ClaimsSuccess = broken_call(lambda raw, clipped, success: (raw, clipped, torch.ones_like(success)))
NeverLists = broken_call(lambda raw, clipped, success: (torch.stack(raw), torch.stack(clipped), success))
MovesAtZero = broken_call(lambda raw, clipped, success: (raw, [clipped[-1], *clipped[1:]], success))
AlwaysLists = broken_call(lambda raw, clipped, success: ([raw], [clipped], success))
UnwrapsEagerPy = broken_call(lambda points, clipped, success: (raw(points), raw(clipped), success))
LeavesTheBall = broken_call(lambda raw, _, success: (raw, raw, success), lambda x, y, eps: (x, y, [3 * e for e in eps]))
IgnoresConditions = broken_call(given=lambda x, y, eps: (x, y.labels, eps))
RepeatsWorse = type("RepeatsWorse", (LinfPGD,), {"repeat": lambda attack, times: DoesNothing(steps=1)})
# An invariant, its arguments and attacks that break it.
BROKEN = [
    ("inputs_and_labels_are_not_changed", (UNIT,), broken(changes_inputs), broken(changes_labels)),
    ("points_are_in_the_ball_and_in_bounds", (UNIT,), LeavesTheBounds, LeavesTheBall),
    ("targeted_points_go_to_their_targets", (UNIT,), IgnoresTargets, FleesFromTargets),
    ("untargeted_points_lower_the_margin_of_the_label", (UNIT,), DoesNothing),
    ("models_may_be_wrapped", (UNIT,), DoesNothing),
    ("success_is_that_of_a_fresh_forward_pass", (UNIT, False), ClaimsSuccess),
    ("success_is_that_of_a_fresh_forward_pass", (UNIT, True), ClaimsSuccess),
    ("one_epsilon_gives_tensors", (UNIT,), AlwaysLists),
    ("many_epsilons_give_lists", (UNIT,), NeverLists, MovesAtZero),
    ("type_and_device_are_kept", (torch.float64, "cpu"), ForgetsTheType),
    ("eagerpy_tensors_give_eagerpy_tensors", (False,), UnwrapsEagerPy),
    ("the_same_torch_seed_gives_the_same_points", (), SeedsItself),
    ("repr_shows_the_settings_alone", (), broken(remembers)),
    ("unknown_keywords_are_refused", (), SwallowsKeywords),
    ("other_criteria_are_refused", (), IgnoresTargets),
    ("a_misclassification_with_a_condition_is_judged_by_it", (), IgnoresConditions),
    ("one_row_is_a_batch", (UNIT,), SqueezesOneRow),
    ("repeating_is_never_worse", (), RepeatsWorse),
    ("the_model_is_left_as_it_was", (), broken(trains, Noise), broken(leaves_gradients, Noise)),
]


class Judged(Base):
    def __init__(self, attack_class):
        self.attack_class = attack_class

    def make_attack(self):
        return self.attack_class(**({"repeats": 10} if issubclass(self.attack_class, Noise) else {"steps": 10}))


@pytest.mark.parametrize(("invariant", "arguments", "attack"), [(*row[:2], one) for row in BROKEN for one in row[2:]])
def test_a_broken_attack_is_found(invariant, arguments, attack):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(Judged(attack), f"test_{invariant}")(*arguments)
    getattr(Judged(attack.__base__), f"test_{invariant}")(*arguments)
