"""Results as a run writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def _attack(name: str, **changes: Any) -> dict[str, Any]:
    """One attack's entry; ``changes`` replaces whole values."""
    entry: dict[str, Any] = {
        "name": name,
        "target": "",
        "score": 0.61328125,
        "score_interval": [0.5546875, 0.6690625],
        "random_score": 0.12109375,
        "random_score_interval": [0.0837, 0.1671],
        "verdict": "failed",
        "reason": "157 of 256 planted problems were solved.",
        "samples": 256,
        "not_separable": 3,
        "not_planted": 7,
        "outcomes": {
            "found": 157,
            "not_adversarial": 80,
            "beyond_epsilon": 11,
            "out_of_bounds": 5,
            "not_finite": 2,
        },
        "canaries": {"planted": 37, "repaired": 9},
        "seconds": {"features": 41.5, "readout": 3.25, "attack": 22.5, "random": 18.75, "verify": 0.5, "total": 87.0},
        "passes": {"forward": 716811, "backward": 10249},
        "hardness": [
            {"kappa": 0.9, "score": 0.83, "random_score": 0.41},
            {"kappa": 0.99, "score": 0.72, "random_score": 0.22},
        ],
    }
    assert changes.keys() <= entry.keys()
    return {**entry, **changes}


def _result(attacks: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """A result of these attacks; ``changes`` replaces whole values."""
    entry: dict[str, Any] = {
        "kind": "binarization",
        "verdict": "failed",
        "reason": "Planted adversarial examples were missed.",
        "attacks": attacks,
        "calibration": None,
        "settings": {"norm": "linf", "epsilon": 8 / 255, "threshold": 0.95, "kappa": 0.999, "corners": True},
        "versions": {"robust_ext": "0.1.0", "torch": "2.5.1"},
        "seed": 20240501,
    }
    assert changes.keys() <= entry.keys()
    return {**entry, **changes}


@pytest.fixture
def make_attack() -> Callable[..., dict[str, Any]]:
    return _attack


@pytest.fixture
def make_result() -> Callable[..., dict[str, Any]]:
    return _result
