"""Classes with keywords answer a wrong call with the right one."""

import pytest
import torch
from torch import nn

import robust_ext
from robust_ext import (
    BPDA,
    Arm,
    BinarizationSettings,
    EoT,
    InvalidArgumentError,
    RobustExtError,
    ThreatModel,
    WrongCallError,
)
from robust_ext.attacks.apgd import APGD

FLAT = nn.Flatten()


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
        (
            lambda: ThreatModel("linf", 0.1, (0, 1), "cpu"),
            "ThreatModel(norm='linf', epsilon=0.1, bounds=(0, 1), mask='cpu')",
        ),
        (lambda: EoT(FLAT, n=5), "EoT(module=Flatten(start_dim=1, end_dim=-1), draws=5)"),
        (lambda: EoT(FLAT, 5, n_samples=3), "EoT(module=Flatten(start_dim=1, end_dim=-1), draws=3, chunk=5)"),
        (lambda: EoT(FLAT), "EoT(module=Flatten(start_dim=1, end_dim=-1), draws=...)"),
        (lambda: EoT(model=FLAT, draws=2), "EoT(module=Flatten(start_dim=1, end_dim=-1), draws=2)"),
        (lambda: BPDA(FLAT, layr="quantise"), "BPDA(forward=Flatten(start_dim=1, end_dim=-1), layer='quantise')"),
        (lambda: BPDA(FLAT, "quantise"), "BPDA(forward=Flatten(start_dim=1, end_dim=-1), layer='quantise')"),
        (lambda: BPDA(), "BPDA(forward=...)"),
        (lambda: BPDA(FLAT, forward=FLAT), "BPDA(forward=Flatten(start_dim=1, end_dim=-1))"),
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


@pytest.mark.parametrize(
    ("keyword", "words"),
    [
        ({"eps": 0.1}, "; state epsilon in the threat model: ThreatModel(norm=..., epsilon=...)"),
        ({"norm": "l2"}, "; state norm in the threat model: ThreatModel(norm=..., epsilon=...)"),
        ({"clip_values": (0, 1)}, "; state bounds in the threat model: ThreatModel(norm=..., epsilon=..., bounds=...)"),
        ({"Seed": 1}, "; did you mean seed?"),
        ({"inner_pts": 20}, "; did you mean inner_points or inner?"),
        ({"nothing_like_it": 1}, ""),
    ],
)
def test_unknown_settings_are_answered_with_what_was_meant(keyword, words):
    ball = ThreatModel(norm="linf", epsilon=0.1)
    with pytest.raises(InvalidArgumentError) as raised:
        robust_ext.binarization_test(FLAT, APGD(), torch.rand(2, 1, 2, 2), ball, **keyword)
    assert str(raised.value).endswith(words) if words else ";" not in str(raised.value)
