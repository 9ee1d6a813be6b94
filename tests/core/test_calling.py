"""Classes with keywords answer a wrong call with the right one."""

import pytest

from robust_ext import Arm, BinarizationSettings, RobustExtError, ThreatModel, WrongCallError
from robust_ext.attacks.apgd import APGD


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: ThreatModel("linf", 0.2), "ThreatModel(norm='linf', epsilon=0.2)"),
        (lambda: ThreatModel(norm="linf", eps=0.2), "ThreatModel(norm='linf', epsilon=0.2)"),
        (
            lambda: ThreatModel("l2", eps=1.0, clip_values=(0, 255)),
            "ThreatModel(norm='l2', epsilon=1.0, bounds=(0, 255))",
        ),
        (lambda: ThreatModel(epsilon=0.2), "ThreatModel(norm=..., epsilon=0.2)"),
        (lambda: ThreatModel(p="l2", Epsilon=0.2), "ThreatModel(norm='l2', epsilon=0.2)"),
        (lambda: Arm("robust_ext:APGD()", eps=0.1), "Arm(attack='robust_ext:APGD()', epsilon=0.1)"),
        (lambda: APGD(10), "APGD(steps=10)"),
        (lambda: APGD(n_iter=10, n_restarts=2), "APGD(steps=10, restarts=2)"),
        (lambda: BinarizationSettings(ThreatModel(norm="linf", epsilon=0.1)), "BinarizationSettings(threat_model="),
        (lambda: ThreatModel("linf", 0.1, (0, 1), "cpu"), "keywords of norm, epsilon, bounds"),
    ],
)
def test_the_call_that_was_meant_is_named(call, meant):
    with pytest.raises(WrongCallError) as raised:
        call()
    assert meant in str(raised.value).partition(", expected ")[2]
    assert isinstance(raised.value, TypeError)
    assert isinstance(raised.value, RobustExtError)


def test_what_a_value_raises_is_not_a_wrong_call():
    with pytest.raises(RobustExtError, match="norm: got 'linfty'"):
        ThreatModel(norm="linfty", epsilon=0.1)
