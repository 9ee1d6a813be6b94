"""Known faults are named, their healthy twins are not, and remedies fix what they are for.

What a fault does is measured without the diagnosis first: a fault that does no harm would be none.
"""

import pytest

from robust_ext.evaluations.causes.model_remedies import ACROSS_JUMPS
from tests.evaluations.diagnosis import held_out
from tests.evaluations.diagnosis.zoo.cases import FAULTS
from tests.evaluations.diagnosis.zoo.published import available
from tests.evaluations.diagnosis.zoo.running import (
    accuracy,
    best_trial,
    diagnosed,
    falsely_confirmed,
    first_cause,
    remedied,
    truth,
    worsened,
)

BY_NAME = {fault.name: fault for fault in (*FAULTS, *held_out.FAULTS)}
QUICK = ("noise",)
# Nothing that is proposed for these is enough; see docs/diagnosis.md.
NOT_FIXED = ("k-winners", "k-winners of channels")


def check_harm(fault):
    measured = truth(fault)
    if fault.harm == "score":
        assert measured["fault"] < 0.5
        assert measured["twin"] >= 0.95
        return
    # The twin predicts the same, so that what is found on it is there.
    assert measured["fault"] >= measured["twin"] + 0.3


def check_names(fault, *, try_remedies):
    ill, healthy = diagnosed(fault, try_remedies=try_remedies)
    assert first_cause(ill) == (fault.code, fault.layer)
    assert [(one.code, one.layer) for one in healthy.findings if one.weight != "low"] == []
    return ill


def check_proposal(fault, ill):
    trial = best_trial(ill)
    if trial is None:
        # Code has to be changed: there is nothing to run.
        assert fault.remedy is None
        return
    _, before, after = trial
    assert before < 0.5
    assert after >= 0.95


@pytest.mark.exhaustive
def test_queries_find_more_across_jumps_than_gradients_do():
    """Which is why the remedy of k winners that is printed first takes no gradients."""
    fault = BY_NAME["k-winners"]
    (faulty, _), (attack, _) = fault.models(), fault.attacks()
    square, smoothed, *_ = ACROSS_JUMPS
    left = [accuracy(faulty, remedied(attack, one.attack or dict(one.view)), fault) for one in (square, smoothed)]
    assert left[0] < left[1]
    assert left[0] <= accuracy(faulty, attack, fault) - 0.2


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in BY_NAME]
)
def test_a_fault_does_harm_is_named_first_and_can_be_fixed(name):
    """And its twin is healthy; by what is proposed, and by what was found by hand without the diagnosis."""
    fault = BY_NAME[name]
    if fault.published and not available():
        pytest.skip("no ResNet-20 or no CIFAR-10 on this machine")
    check_harm(fault)
    ill = check_names(fault, try_remedies=name not in QUICK)
    assert not worsened(ill)
    assert falsely_confirmed(ill) == []
    if name in (*QUICK, *NOT_FIXED) or fault.harm != "score" or fault in held_out.FAULTS:
        return
    check_proposal(fault, ill)
    if fault.remedy is not None:
        # Without the diagnosis.
        assert truth(fault)["remedy"] >= 0.95
