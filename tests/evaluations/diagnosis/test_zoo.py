"""Known faults are named, their healthy twins are not, and remedies mend what they are for.

What a fault does is measured without the diagnosis first: a fault that does no harm would be none.
"""

import pytest

from tests.evaluations.diagnosis.zoo.cases import FAULTS
from tests.evaluations.diagnosis.zoo.published import available
from tests.evaluations.diagnosis.zoo.running import best_trial, diagnosed, first_cause, truth

BY_NAME = {fault.name: fault for fault in FAULTS}
QUICK = ("noise",)
# Nothing that is proposed for this one is enough; see docs/diagnosis.md.
NOT_MENDED = ("k-winners",)


@pytest.fixture(scope="module")
def fault(request):
    """A fault by name, where what it needs is on this machine."""
    found = BY_NAME[request.param]
    if found.published and not available():
        pytest.skip("no ResNet-20 or no CIFAR-10 on this machine")
    return found


def every(names):
    marks = {name: () if name in QUICK else (pytest.mark.exhaustive,) for name in names}
    # The tests of one fault are run after another, in one process, which keeps what was measured of it.
    return pytest.mark.parametrize(
        "fault", [pytest.param(name, marks=marks[name], id=name) for name in names], indirect=True, scope="module"
    )


@every(BY_NAME)
def test_a_fault_does_harm_and_its_twin_none(fault):
    measured = truth(fault)
    if fault.harm == "score":
        assert measured["fault"] < 0.5
        assert measured["twin"] >= 0.95
        return
    # The twin predicts the same, so that what is found on it is there.
    assert measured["fault"] >= measured["twin"] + 0.3


@every(BY_NAME)
def test_a_fault_is_named_first_and_its_twin_is_healthy(fault):
    ill, healthy = diagnosed(fault, try_remedies=fault.name not in QUICK)
    assert first_cause(ill) == (fault.code, fault.layer)
    assert [(one.code, one.layer) for one in healthy.findings if one.weight != "low"] == []


@every([name for name, fault in BY_NAME.items() if fault.harm == "score" and name not in (*QUICK, *NOT_MENDED)])
def test_what_is_proposed_mends_it(fault):
    trial = best_trial(diagnosed(fault, try_remedies=True)[0])
    if trial is None:
        # Code has to be changed: there is nothing to run.
        assert fault.remedy is None
        return
    _, before, after = trial
    assert before < 0.5
    assert after >= 0.95


@every([name for name, fault in BY_NAME.items() if fault.remedy is not None and name not in (*QUICK, *NOT_MENDED)])
def test_it_can_be_mended(fault):
    """By what was found by hand, without the diagnosis."""
    measured = truth(fault)
    if fault.harm == "score":
        assert measured["remedy"] >= 0.95
