"""Odds on the digits: the detector sees blind attacks, and the pair of tests tells them from those that know it."""

from __future__ import annotations

import pytest

from tests.casestudies.on_digits import judged, measured

pytestmark = pytest.mark.exhaustive


def test_an_attack_that_ignores_the_detector_fails_and_one_that_knows_it_passes():
    assert measured("odds").present
    weak, right = judged("odds", "weak", 48), judged("odds", "right", 48)
    assert weak["verdict"] == "failed"
    assert right["verdict"] == "passed"
    assert right["random_score"] <= 0.2
